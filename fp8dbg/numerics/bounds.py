"""What a cast does to a tensor of which only a histogram per binade is known: bounds that hold for every such tensor.

Every step of a cast is monotonic in abs(x): the product with the scale in float32, the rounding, the saturation. So
what happens at both ends of a binade bounds what happens inside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from fp8dbg.numerics.formats import Format

Floats = npt.NDArray[np.float64]

SLACK = 2.0**-16
"""Relative: the product x * scale is rounded to float32, by 2^-24 of itself or 2^-19 of a half step."""

_BELOW = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""By how much of itself the largest value below a power of two is smaller than it, by dtype."""


@dataclass(frozen=True)
class Binades:
    """A tensor's finite non-zero elements by binade of abs(x).

    Args:
        exponent: ``counts[i]`` elements lie in [2^(exponent+i), 2^(exponent+i+1)).
        counts: integers [n].
        amin, amax: smallest and largest of them; None: unknown.
        dtype: torch's name, "bfloat16".
    """

    exponent: int
    counts: npt.ArrayLike
    amin: float | None = None
    amax: float | None = None
    dtype: str = "float32"

    def ends(self) -> tuple[Floats, Floats, Floats]:
        """Smallest and largest value that each occupied binade can hold, and its count; float64 [n] each."""
        counts = np.asarray(self.counts, dtype=np.float64)
        start = np.exp2(self.exponent + np.arange(len(counts), dtype=np.float64))
        low = np.maximum(start, self.amin or 0.0)
        high = np.minimum(2.0 * start * (1.0 - _BELOW.get(self.dtype, 2.0**-24)), self.amax or math.inf)
        there = counts > 0
        return low[there], np.maximum(high, low)[there], counts[there]


@dataclass(frozen=True)
class Bounds:
    """Lower and upper bounds of counts, and of the sum of (y - x)^2 over the finite elements."""

    underflow: tuple[float, float]
    saturated: tuple[float, float]
    d2: tuple[float, float]


def cast_bounds(found: Binades, fmt: Format, scale: float) -> Bounds | None:
    """Bounds for a cast under one scale; None where the scale is 0, Inf or NaN."""
    low, high, counts = found.ends()
    factor = _usable(scale)
    if factor is None:
        return None
    least, most = _product(low, factor), _product(high, factor)
    flushed = [fmt.round(v) == 0 for v in (most, least)]
    clipped = [fmt.saturates(v) for v in (least, most)]
    one_flushed = found.amin is not None and bool(flushed[1][:1].any())
    one_clipped = found.amax is not None and bool(clipped[1][-1:].any())
    least_error = _least_error(low, fmt, float(factor), flushed[0], clipped[0])
    most_error = _largest_error(high, fmt, float(factor))
    errors = _d2(counts, least_error, most_error)
    return Bounds(_between(counts, flushed, one_flushed), _between(counts, clipped, one_clipped), errors)


def finer_bounds(found: Binades, fmt: Format, scale: float, clips: bool) -> Bounds | None:
    """Bounds where scales are finer than a tensor, of which each is at least ``scale``, that of the largest block.

    A larger scale flushes less. ``clips``: whether the recipe's scales can clip at all.
    """
    low, high, counts = found.ends()
    factor = _usable(scale)
    if factor is None:
        return None
    flushed = float(counts @ (fmt.round(_product(low, factor)) == 0))
    step = np.maximum(high * 2.0 ** -(fmt.mantissa_bits + 1), fmt.smallest_subnormal / 2 / float(factor))
    most_error = high if clips else np.minimum(step, high)
    return Bounds((0.0, flushed), (0.0, float(counts.sum()) * clips), _d2(counts, 0.0 * high, most_error))


def _usable(scale: float) -> np.float32 | None:
    with np.errstate(over="ignore"):
        factor = np.abs(np.float32(scale))
    return factor if np.isfinite(factor) and factor > 0 else None


def _d2(counts: Floats, least: Floats, most: Floats) -> tuple[float, float]:
    return float(counts @ least**2) * (1.0 - 4 * SLACK), float(counts @ most**2) * (1.0 + 4 * SLACK)


def _product(values: Floats, factor: np.float32) -> Floats:
    """x * scale as the cast takes it, in float32."""
    with np.errstate(over="ignore", under="ignore"):
        return (values.astype(np.float32) * factor).astype(np.float64)


def _between(counts: Floats, some: list[npt.NDArray[np.bool_]], one: bool) -> tuple[float, float]:
    """Elements for which it is certain, at least ``one`` of them, and elements for which it is possible."""
    certain, possible = (float(counts @ mask) for mask in some)
    return max(certain, float(one)), possible


def _least_error(
    low: Floats, fmt: Format, scale: float, flushed: npt.NDArray[np.bool_], clipped: npt.NDArray[np.bool_]
) -> Floats:
    """abs(y - x) is at least this: all of a flushed value, what is beyond the maximum of a clipped one."""
    return np.where(flushed, low, np.where(clipped, np.maximum(low - fmt.max / scale, 0.0), 0.0))


def _largest_error(high: Floats, fmt: Format, scale: float) -> Floats:
    """abs(y - x) is at most this: half a step at the far end, what is beyond the maximum, or all of a small value."""
    scaled = np.minimum(high * scale, fmt.max)
    with np.errstate(divide="ignore"):
        step = np.exp2(np.floor(np.log2(np.maximum(scaled, 5e-324))) - fmt.mantissa_bits)
    half = np.maximum(step, fmt.smallest_subnormal) / 2 / scale
    error: Floats = np.maximum(np.minimum(half, high), high - fmt.max / scale)
    return error
