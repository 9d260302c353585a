"""Compiled loops behind the census: counting 16-bit codes, and casting values while summing their errors.

Every sum runs in one fixed order, so an answer depends on the values alone, never on how the work was shared out.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fp8dbg.numerics.compiled import compiled

BLOCK = 1024
"""Values cast before they are summed: the scratch arrays stay in the first-level cache."""


@compiled
def count_codes(words: Any, table: Any, lane: Any) -> None:
    """Add the four 16-bit codes of every uint64 word to a table of uint32 counts.

    ``lane`` (uint64) is the distance between the sub-tables of a word's four positions; 0: one table for all. One
    table is fastest while neighbours differ; four avoid the stall of incrementing the same counter twice running.
    """
    low = np.uint64(0xFFFF)
    second, third = lane + lane, lane + lane + lane
    for i in range(words.size):
        word = words[i]
        table[word & low] += np.uint32(1)
        table[((word >> np.uint64(16)) & low) + lane] += np.uint32(1)
        table[((word >> np.uint64(32)) & low) + second] += np.uint32(1)
        table[(word >> np.uint64(48)) + third] += np.uint32(1)


@compiled
def repeats_itself(words: Any) -> Any:
    """Whether neighbouring codes are often equal (zeros after a ReLU): more than 2 % of some words, eight at a time."""
    low, seen, equal = np.uint64(0xFFFF), 0, 0
    for start in range(0, words.size, max(8, words.size // 32)):
        for i in range(start, min(start + 8, words.size)):
            seen += 1
            equal += (words[i] & low) == ((words[i] >> np.uint64(16)) & low)
    return equal * 50 > seen


@compiled
def largest_magnitude(bits: Any, mask: Any) -> Any:
    """Largest magnitude of floating-point numbers, as bits: uint16 or uint32 in and out; ``mask`` drops the sign.

    The order of the bits is that of the values, with Inf above the finite ones and NaN above Inf.
    """
    largest = mask & ~mask
    for i in range(bits.size):
        largest = max(largest, bits[i] & mask)
    return largest


@compiled
def gather_magnitudes(dense: Any, values: Any, infinity: Any, repeat: Any) -> Any:
    """The magnitudes that occur, ascending, from counts per code.

    ``dense``: counts of the codes without, then with a sign; ``values``: float32, each code's magnitude;
    ``infinity``: Inf's code. Returns zeros, NaN and infinite elements, the sums of x and x^2 over the others (float64),
    their magnitudes (float32), the elements of each and the positive less the negative ones (int64).
    """
    sign = values.size
    seen, total, excess = np.empty(infinity, np.float32), np.empty(infinity, np.int64), np.empty(infinity, np.int64)
    n, x, x2 = 0, 0.0, 0.0
    for code in range(1, infinity):
        above, below = np.int64(dense[code]), np.int64(dense[code + sign])
        if above + below:
            value = np.float64(values[code])
            seen[n], total[n], excess[n] = values[code], (above + below) * repeat, (above - below) * repeat
            x += np.float64(excess[n]) * value
            x2 += np.float64(total[n]) * value * value
            n += 1
    nan = np.int64(0)
    for code in range(infinity + 1, sign):
        nan += np.int64(dense[code]) + np.int64(dense[code + sign])
    zeros, inf = (
        np.int64(dense[0]) + np.int64(dense[sign]),
        np.int64(dense[infinity]) + np.int64(dense[infinity + sign]),
    )
    return zeros * repeat, nan * repeat, inf * repeat, x, x2, seen[:n].copy(), total[:n].copy(), excess[:n].copy()


@compiled
def central_moments(magnitudes: Any, total: Any, excess: Any, zeros: Any, mean: Any) -> Any:
    """Sums of (x - mean)^2 and (x - mean)^4, and how many different values there are."""
    second, fourth = zeros * mean**2, zeros * mean**4
    different = 1 if zeros else 0
    for i in range(magnitudes.size):
        positive, negative = (total[i] + excess[i]) // 2, (total[i] - excess[i]) // 2
        different += (positive > 0) + (negative > 0)
        above, below = (magnitudes[i] - mean) ** 2, (magnitudes[i] + mean) ** 2
        second += positive * above + negative * below
        fourth += positive * above**2 + negative * below**2
    return second, fourth, different


@compiled
def median_magnitude(magnitudes: Any, total: Any) -> Any:
    """Median of the elements, float64: the mean of the middle two where they are even in number; at least one."""
    elements = total.sum()
    below, lower, middle = np.int64(0), 0, 0
    for i in range(magnitudes.size):
        below += total[i]
        lower += below <= (elements - 1) // 2
        middle += below <= elements // 2
    return (np.float64(magnitudes[lower]) + np.float64(magnitudes[middle])) / 2.0


@compiled
def count_binades(magnitudes: Any, total: Any) -> Any:
    """Exponent of the first binade, and the elements of each binade up to the last; at least one magnitude."""
    first, last = math.frexp(magnitudes[0])[1] - 1, math.frexp(magnitudes[-1])[1] - 1
    counts = np.zeros(last - first + 1, np.int64)
    place, ceiling = 0, np.ldexp(1.0, first + 1)
    for i in range(magnitudes.size):
        while magnitudes[i] >= ceiling:
            place, ceiling = place + 1, ceiling * 2.0
        counts[place] += total[i]
    return first, counts


@compiled
def _rounded(p: Any, shrink: Any, step: Any, largest: Any, boundary: Any, tie: Any) -> Any:
    """A non-negative float64 rounded to a format: adding and taking away 1.5 * 2^52 steps rounds to nearest even."""
    binade = np.int64(np.float64(p).view(np.int64) & np.int64(0x7FF0000000000000)).view(np.float64)
    magic = 6755399441055744.0 * max(binade * shrink, step)
    return largest if p > boundary or (p == boundary and tie) else min((p + magic) - magic, largest)


@compiled
def cast_magnitudes(magnitudes: Any, total: Any, excess: Any, scale: Any, parameters: Any) -> Any:
    """Cast each magnitude once and weight it by its counts.

    ``magnitudes``: float32, positive, finite; ``total``, ``excess``: int64, how many elements have that magnitude,
    and how many more positive ones than negative. ``scale``: float32, positive. ``parameters``: a format's
    ``kernel_parameters``. Returns underflow, saturated, at_max, subnormal, and the sums of d^2, d, y^2 and x y.
    """
    bits, step, normal, largest, boundary, tie = parameters
    shrink, divisor = 2.0**-bits, np.float64(scale)
    underflow, saturated, at_max, subnormal = 0, 0, 0, 0
    seen = np.empty(magnitudes.size)
    for i in range(magnitudes.size):
        p = np.float64(np.float32(magnitudes[i] * scale))
        q = _rounded(p, shrink, step, largest, boundary, tie)
        underflow += total[i] if q == 0.0 else 0
        saturated += total[i] if p > boundary or (p == boundary and tie) else 0
        at_max += total[i] if q == largest else 0
        subnormal += total[i] if 0.0 < q < normal else 0
        seen[i] = q / divisor
    d2, d, y2, xy = 0.0, 0.0, 0.0, 0.0
    for i in range(magnitudes.size):
        x, y, n = np.float64(magnitudes[i]), seen[i], np.float64(total[i])
        d2 += n * (y - x) * (y - x)
        d += excess[i] * (y - x)
        y2 += n * y * y
        xy += n * x * y
    return underflow, saturated, at_max, subnormal, d2, d, y2, xy


def _add_products(a: Any, b: Any) -> Any:
    """Sum of a * b. The compiler may regroup the additions (so it uses vector units), always in the same way."""
    total = 0.0
    for i in range(a.size):
        total += a[i] * b[i]
    return total


def _add_up(a: Any) -> Any:
    total = 0.0
    for i in range(a.size):
        total += a[i]
    return total


_dot = compiled(_add_products, fastmath={"reassoc"})
_sum = compiled(_add_up, fastmath={"reassoc"})

CHUNK = 65536
"""float32 values per row of partial sums: fixed, so that the sums do not depend on how chunks are shared out."""

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)


@compiled
def scan(x: Any, first: Any, last: Any, counts: Any, sums: Any) -> None:
    """One row per chunk of float32 ``x``, for chunks ``first`` to ``last``.

    ``counts`` int64: zeros, NaN, infinite, positive finite; then the bits of amax, and of amin less one (all ones
    where nothing is finite and non-zero). ``sums`` float64: x and x^2 of the finite.
    """
    bits, value = x.view(np.uint32), np.empty(BLOCK)
    for chunk in range(first, last):
        zeros, nan, inf, positive = 0, 0, 0, 0
        peak, low = np.uint32(0), np.uint32(0xFFFFFFFF)
        for start in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, x.size), BLOCK):
            values, patterns = x[start : start + BLOCK], bits[start : start + BLOCK]
            n = values.size
            for j in range(n):
                b = patterns[j] & _MAGNITUDE
                finite = b if b < _INFINITY else np.uint32(0)
                zeros += b == 0
                nan += b > _INFINITY
                inf += b == _INFINITY
                positive += (finite > 0) & (patterns[j] == b)
                peak = max(peak, finite)
                low = min(low, np.uint32(finite - np.uint32(1)))
                value[j] = values[j] if b < _INFINITY else 0.0
            sums[chunk, 0] += _sum(value[:n])
            sums[chunk, 1] += _dot(value[:n], value[:n])
        counts[chunk, 0], counts[chunk, 1], counts[chunk, 2], counts[chunk, 3] = zeros, nan, inf, positive
        counts[chunk, 4], counts[chunk, 5] = peak, low


@compiled
def deviations(x: Any, first: Any, last: Any, mean: Any, counts: Any, sums: Any) -> None:
    """Sums of (x - mean)^2 and (x - mean)^4 over the finite values, one row of ``sums`` per chunk; no counts."""
    bits, square = x.view(np.uint32), np.empty(BLOCK)
    for chunk in range(first, last):
        for start in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, x.size), BLOCK):
            values, patterns = x[start : start + BLOCK], bits[start : start + BLOCK]
            n = values.size
            for j in range(n):
                d = values[j] - mean
                square[j] = d * d if patterns[j] & _MAGNITUDE < _INFINITY else 0.0
            sums[chunk, 0] += _sum(square[:n])
            sums[chunk, 1] += _dot(square[:n], square[:n])


@compiled
def cast_values(x: Any, first: Any, last: Any, scale: Any, parameters: Any, counts: Any, sums: Any) -> None:
    """Cast float32 values under a positive finite scale; one row per chunk, columns as ``cast_magnitudes`` returns."""
    bits, step, normal, largest, boundary, tie = parameters
    shrink, divisor, all_bits = 2.0**-bits, np.float64(scale), x.view(np.uint32)
    before, after, error = np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK)
    for chunk in range(first, last):
        underflow, saturated, at_max, subnormal = 0, 0, 0, 0
        for start in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, x.size), BLOCK):
            values, patterns = x[start : start + BLOCK], all_bits[start : start + BLOCK]
            n = values.size
            for j in range(n):
                finite = (patterns[j] & _MAGNITUDE) < _INFINITY
                magnitude = abs(values[j]) if finite else np.float32(0.0)
                p = np.float64(np.float32(magnitude * scale))
                q = _rounded(p, shrink, step, largest, boundary, tie)
                underflow += (q == 0.0) & (magnitude > 0)
                saturated += p > boundary or (p == boundary and tie)
                at_max += q == largest
                subnormal += 0.0 < q < normal
                before[j], after[j] = magnitude, q / divisor
                d = q / divisor - np.float64(magnitude)
                error[j] = d if values[j] >= 0 else -d
            sums[chunk, 0] += _dot(error[:n], error[:n])
            sums[chunk, 1] += _sum(error[:n])
            sums[chunk, 2] += _dot(after[:n], after[:n])
            sums[chunk, 3] += _dot(before[:n], after[:n])
        counts[chunk, 0], counts[chunk, 1], counts[chunk, 2], counts[chunk, 3] = underflow, saturated, at_max, subnormal


@compiled
def count_high(bits: Any, table: Any) -> None:
    """Add the upper halves of float32 magnitudes, given as uint32, to a table of 32,768 counts."""
    for i in range(bits.size):
        table[(bits[i] & _MAGNITUDE) >> np.uint32(16)] += 1


@compiled
def count_low(bits: Any, high: Any, table: Any) -> None:
    """Add the lower halves of those magnitudes whose upper half is ``high`` to a table of 65,536 counts."""
    for i in range(bits.size):
        if (bits[i] & _MAGNITUDE) >> np.uint32(16) == high:
            table[bits[i] & np.uint32(0xFFFF)] += 1
