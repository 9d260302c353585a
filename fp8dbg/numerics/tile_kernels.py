"""Compiled loops over the tiles of a matrix: amax, cast, sums. Plain arrays in and out, no torch.

A matrix ``x`` is C-contiguous [rows, columns], float32 or bfloat16 seen as uint16. A ``tile`` is (height, width), from
the top left corner on; tiles at the right and lower edges may be smaller. A ``span`` is a range of tile rows; a kernel
writes only what belongs to its span, so spans may run on any threads in any order with the same result.
``rounding``, ``limits``: see ``tiles.rounding_constants`` and ``tiles.limits``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from fp8dbg.numerics.compiled import compiled

CAST_CHUNK, SUM_CHUNK = 2048, 1024
"""Columns handled at a time, so that the scratch rows stay in the first-level cache."""

_ABS = np.uint32(0x7FFFFFFF)
_INF = np.uint32(0x7F800000)
_HALF = np.uint32(16)


def _reinterpreted(source: Any, target: Any) -> Any:
    """A typed function that gives 32 bits another type; numpy's ``view`` of a scalar keeps loops from vectorising."""

    def typed(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(target))

        return target(source), generate

    return intrinsic(typed)


float_of: Any = _reinterpreted(types.uint32, types.float32)
bits_of: Any = _reinterpreted(types.float32, types.uint32)


def widen(value: Any) -> Any:
    """A matrix element as float32; numba takes the overload below."""


@overload(widen, inline="always")
def _widen_typed(value: Any) -> Any:
    def from_bfloat16(value: Any) -> Any:
        return float_of(np.uint32(value) << _HALF)

    def unchanged(value: Any) -> Any:
        return value

    return from_bfloat16 if isinstance(value, types.Integer) else unchanged


def _put(out: Any, j: Any, value: Any) -> Any:
    """Write a float32 that the row's dtype can hold; numba takes the overload below."""


@overload(_put, inline="always")
def _put_typed(out: Any, j: Any, value: Any) -> Any:
    def store(out: Any, j: Any, value: Any) -> Any:
        out[j] = value

    def store_upper_half(out: Any, j: Any, value: Any) -> Any:
        out[j] = np.uint16(np.uint32(bits_of(value)) >> _HALF)

    return store_upper_half if isinstance(out.dtype, types.Integer) else store


def _narrow(out: Any, j: Any, value: Any) -> Any:
    """Write a float32 into a row, rounding to nearest even if the row is bfloat16; numba takes the overload below."""


@overload(_narrow, inline="always")
def _narrow_typed(out: Any, j: Any, value: Any) -> Any:
    def store(out: Any, j: Any, value: Any) -> Any:
        out[j] = value

    def round_and_store(out: Any, j: Any, value: Any) -> Any:
        bits = np.uint32(bits_of(value))
        carry = np.uint32(np.uint32(np.uint32(bits >> _HALF) & np.uint32(1)) + np.uint32(0x7FFF))
        nearest = np.uint32(np.uint32(bits + carry) >> _HALF)
        out[j] = np.uint16(nearest if np.uint32(bits & _ABS) <= _INF else np.uint32(0x7FC0))

    return round_and_store if isinstance(out.dtype, types.Integer) else store


@compiled
def _round(value: Any, rounding: Any) -> Any:
    """Nearest value of a format, ties to even, saturating; NaN stays NaN.

    Adding and taking away a power of two 23 - mantissa bits binades above the value's own, but no less than the finest
    step times 2^23, lets float32's own rounding do the work.
    """
    shift, floor, largest = rounding
    bits = bits_of(value)
    absolute = float_of(np.uint32(bits & _ABS))
    absolute = largest if absolute > largest else absolute
    anchor = np.uint32(np.uint32(bits_of(absolute) & _INF) + shift)
    anchor = float_of(max(anchor, floor))
    return float_of(np.uint32(bits_of((absolute + anchor) - anchor) | np.uint32(bits & ~_ABS)))


@compiled
def _largest(bits: Any) -> Any:
    best = np.uint32(0)
    for j in range(bits.size):
        best = bits[j] if bits[j] > best else best
    return best


@compiled
def amax_tiles(x: Any, tile: Any, span: Any, ceiling: Any, out: Any) -> None:
    """Largest absolute value of every tile into ``out``, float32 [tile rows, tile columns]; 0 where all are zero.

    Bits of absolute values order as the values do. Those above ``ceiling`` count as 0: the bits of Inf keep NaN out,
    as every fmax does; all ones lets it in.
    """
    rows, columns = x.shape
    height, width = tile
    peak = np.empty(columns, np.uint32)
    for t in range(span[0], span[1]):
        peak[:] = 0
        for i in range(t * height, min(t * height + height, rows)):
            row = x[i]
            for j in range(columns):
                bits = np.uint32(bits_of(widen(row[j])) & _ABS)
                bits = bits if bits <= ceiling else np.uint32(0)
                peak[j] = bits if bits > peak[j] else peak[j]
        for b in range(out.shape[1]):
            out[t, b] = float_of(_largest(peak[b * width : b * width + width]))


@compiled
def _spread(factors: Any, width: int, start: int, stop: int, out: Any) -> None:
    """One factor per column, for columns ``start`` to ``stop``, from one per tile."""
    if width == 1:
        out[: stop - start] = factors[start:stop]
        return
    for b in range(start // width, (stop - 1) // width + 1):
        out[max(b * width - start, 0) : min(b * width + width, stop) - start] = factors[b]


@compiled
def _cast_row(x: Any, scale: Any, inverse: Any, rounding: Any, out: Any) -> None:
    for j in range(x.size):
        _put(out, j, _round(widen(x[j]) * scale[j], rounding) * inverse[j])


@compiled
def _error_row(x: Any, scale: Any, inverse: Any, rounding: Any, out: Any) -> None:
    for j in range(x.size):
        value = widen(x[j])
        _narrow(out, j, _round(value * scale[j], rounding) * inverse[j] - value)


@compiled
def cast_tiles(x: Any, scales: Any, inverses: Any, tile: Any, span: Any, rounding: Any, error: bool, out: Any) -> None:
    """Write round(x * scale) * inverse, or with ``error`` that minus x, into ``out``: as x, either dtype.

    ``scales``, ``inverses``: float32 [tile rows, tile columns]. Into bfloat16 an error is rounded; values must fit.
    """
    rows, columns = x.shape
    height, width = tile
    scale, inverse = np.empty(CAST_CHUNK, np.float32), np.empty(CAST_CHUNK, np.float32)
    for t in range(span[0], span[1]):
        for start in range(0, columns, CAST_CHUNK):
            stop = min(start + CAST_CHUNK, columns)
            _spread(scales[t], width, start, stop, scale)
            _spread(inverses[t], width, start, stop, inverse)
            for i in range(t * height, min(t * height + height, rows)):
                if error:
                    _error_row(x[i, start:stop], scale, inverse, rounding, out[i, start:stop])
                else:
                    _cast_row(x[i, start:stop], scale, inverse, rounding, out[i, start:stop])


@compiled
def _count_row(
    x: Any, scale: Any, inverse: Any, rounding: Any, limits: Any, before: Any, after: Any, counts: Any
) -> None:
    """Add a row's counts; leave its values before and after the cast, 0 for both where a value is not finite."""
    normal, boundary = limits
    largest = rounding[2]
    zero, one = np.int32(0), np.int32(1)
    underflow, saturated, at_max, subnormal, finite = zero, zero, zero, zero, zero
    for j in range(x.size):
        value = widen(x[j])
        is_finite = np.uint32(bits_of(value) & _ABS) < _INF
        value = value if is_finite else np.float32(0.0)
        product = value * scale[j]
        code = _round(product, rounding)
        magnitude = abs(code)
        underflow = np.int32(underflow + (one if (value != 0.0) & (code == 0.0) else zero))
        saturated = np.int32(saturated + (one if abs(product) > boundary else zero))
        at_max = np.int32(at_max + (one if magnitude == largest else zero))
        subnormal = np.int32(subnormal + (one if (magnitude > 0.0) & (magnitude < normal) else zero))
        finite = np.int32(finite + (one if is_finite else zero))
        before[j], after[j] = value, (code * inverse[j] if is_finite else np.float32(0.0))
    for c, count in enumerate((underflow, saturated, at_max, subnormal, finite)):
        counts[c] += count


@compiled
def _sum_row(before: Any, after: Any, size: int, columns: Any) -> None:
    """Add x^2, y^2, d^2, d and x y to one running sum per column: vectors, without leave to reorder a sum."""
    for j in range(size):
        x, y = np.float64(before[j]), np.float64(after[j])
        columns[0, j] += x * x
        columns[1, j] += y * y
        columns[2, j] += (y - x) * (y - x)
        columns[3, j] += y - x
        columns[4, j] += x * y


@compiled
def sum_tiles(
    x: Any, scales: Any, inverses: Any, tile: Any, span: Any, rounding: Any, limits: Any, counts: Any, totals: Any
) -> None:
    """Add the span's counts and sums over finite elements.

    ``counts``, int64: underflow, saturated, at_max, subnormal, finite. ``totals``, float64: x^2, y^2, d^2, d, x y.
    """
    rows, columns = x.shape
    height, width = tile
    scale, inverse = np.empty(SUM_CHUNK, np.float32), np.empty(SUM_CHUNK, np.float32)
    before, after, running = np.empty(SUM_CHUNK, np.float32), np.empty(SUM_CHUNK, np.float32), np.empty((5, SUM_CHUNK))
    for start in range(0, columns, SUM_CHUNK):
        stop = min(start + SUM_CHUNK, columns)
        running[:] = 0.0
        for t in range(span[0], span[1]):
            _spread(scales[t], width, start, stop, scale)
            _spread(inverses[t], width, start, stop, inverse)
            for i in range(t * height, min(t * height + height, rows)):
                _count_row(x[i, start:stop], scale, inverse, rounding, limits, before, after, counts)
                _sum_row(before, after, stop - start, running)
        for s in range(5):
            totals[s] += running[s].sum()
