"""What is asked of a tensor: the figures of its values, and of a cast of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp8dbg.errors import UsageError
from fp8dbg.numerics.formats import Format, format_named

Counts = npt.NDArray[np.int64]


class CastSums(NamedTuple):
    """Counts and float64 sums over the finite elements of one cast: x before, y after, d = y - x."""

    underflow: int
    saturated: int
    at_max: int
    subnormal: int
    d2: float
    d: float
    y2: float
    xy: float


@dataclass(frozen=True, slots=True)
class QuantFigures:
    """Figures of one cast, as metrics define them; None where a figure does not exist.

    Finite elements only. ``underflow``, ``saturated``, ``at_max`` and ``subnormal`` are counts; ``mse`` is absolute;
    ``sqnr_db`` is in dB and None where nothing differs; ``bias`` is the mean difference over the rms.
    """

    underflow: int
    saturated: int
    at_max: int
    subnormal: int
    mse: float | None
    rel_l2: float | None
    sqnr_db: float | None
    cosine: float | None
    norm_ratio: float | None
    bias: float | None

    @classmethod
    def from_sums(cls, sums: CastSums, x2: float, finite: int) -> QuantFigures:
        """From the sums of a cast, the sum of x^2 and the number of finite elements.

        Sums that are not finite (a scale of 0, Inf or NaN) leave the error figures None and the counts as they are.
        """
        counts = (int(sums.underflow), int(sums.saturated), int(sums.at_max), int(sums.subnormal))
        if not finite or not all(map(math.isfinite, sums[4:])):
            return cls(*counts, None, None, None, None, None, None)
        mse = sums.d2 / finite
        if not x2:
            return cls(*counts, mse, None, None, None, None, None)
        rel_l2, norm_ratio = math.sqrt(sums.d2 / x2), math.sqrt(sums.y2 / x2)
        return cls(
            *counts,
            mse,
            rel_l2,
            0.0 - 20.0 * math.log10(rel_l2) if rel_l2 else None,
            max(-1.0, min(1.0, sums.xy / math.sqrt(x2) / math.sqrt(sums.y2))) if sums.y2 else None,
            norm_ratio,
            sums.d / finite / math.sqrt(x2 / finite),
        )


class Tally(NamedTuple):
    """What one pass over a tensor gives: counts, extremes, and sums over the finite elements."""

    numel: int
    zeros: int
    nan: int
    inf: int
    amax: float | None
    amin: float | None
    x: float
    x2: float

    @property
    def finite(self) -> int:
        """Elements that are neither NaN nor infinite."""
        return self.numel - self.nan - self.inf


class Census(ABC):
    """Everything that per-tensor figures can be read off; made by ``census``.

    Censuses of parts add up to the census of the whole. Moments are over the finite elements, extremes and the median
    over the finite non-zero ones; a figure that has nothing to be taken over is None. ``dtype`` is torch's name
    ("bfloat16").
    """

    dtype: str

    @abstractmethod
    def __add__(self, other: Census) -> Census:
        """The census of both parts; of different dtypes, a UsageError."""

    @abstractmethod
    def histogram(self) -> tuple[int, list[int]]:
        """Elements per binade of abs(x), finite non-zero: ``counts[i]`` of them lie in [2^(e+i), 2^(e+i+1)).

        Returns (e, counts), from the first occupied binade to the last; (0, []) where there is none.
        """

    @abstractmethod
    def codes(self) -> tuple[npt.NDArray[np.uint16], Counts] | None:
        """The 16-bit codes that occur, ascending, and how often; None where the dtype has no such codes."""

    @abstractmethod
    def _count(self) -> Tally: ...

    @abstractmethod
    def _central_moments(self, mean: float) -> tuple[float, float]:
        """Sums of (x - mean)^2 and (x - mean)^4; zeros where all finite elements are equal."""

    @abstractmethod
    def _median(self) -> float:
        """Median of abs(x) over the finite non-zero elements, of which there is at least one."""

    @abstractmethod
    def _cast(self, scale: np.float32, parameters: tuple[Any, ...]) -> CastSums:
        """Cast every finite element under a positive finite scale."""

    @cached_property
    def _tally(self) -> Tally:
        return self._count()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self._tally.numel

    @property
    def zeros(self) -> int:
        """Elements equal to zero, -0.0 included."""
        return self._tally.zeros

    @property
    def nan(self) -> int:
        """NaN elements."""
        return self._tally.nan

    @property
    def inf(self) -> int:
        """Infinite elements of either sign."""
        return self._tally.inf

    @property
    def amax(self) -> float | None:
        """Largest finite absolute value; None if nothing finite differs from zero."""
        return self._tally.amax

    @property
    def amin(self) -> float | None:
        """Smallest finite non-zero absolute value."""
        return self._tally.amin

    @property
    def mean(self) -> float | None:
        """Mean of the finite elements."""
        return self._tally.x / self._tally.finite if self._tally.finite else None

    @property
    def rms(self) -> float | None:
        """Root mean square of the finite elements."""
        return math.sqrt(self._tally.x2 / self._tally.finite) if self._tally.finite else None

    @cached_property
    def kurtosis(self) -> float | None:
        """Fourth central moment over squared variance: 3 for a Gaussian; None where all finite elements are equal."""
        if self.mean is None:
            return None
        second, fourth = self._central_moments(self.mean)
        variance = second / self._tally.finite
        return fourth / self._tally.finite / variance**2 if variance**2 > 0 else None

    @cached_property
    def peak_to_median(self) -> float | None:
        """``amax`` over the median absolute value of the finite non-zero elements."""
        return self.amax / self._median() if self.amax is not None else None

    def quantised(self, fmt: Format | str, scale: float) -> QuantFigures:
        """What a cast to ``fmt`` under one scale does: the product x * scale in float32, then the rounding.

        A scale of 0, Inf or NaN gives the counts that the products have, and no error figures. The sign of the scale
        does not matter. E8M0, which holds no zero, is a UsageError.
        """
        fmt = format_named(fmt) if isinstance(fmt, str) else fmt
        if not fmt.signed:
            raise UsageError(f"{fmt.name} holds scales, not tensors.", "Choose another format.")
        with np.errstate(over="ignore"):
            factor = np.abs(np.float32(scale))
        usable = np.isfinite(factor) and factor > 0
        sums = self._cast(factor, fmt.kernel_parameters) if usable else self._uncast(factor)
        return QuantFigures.from_sums(sums, self._tally.x2, self._tally.finite)

    def _uncast(self, factor: np.float32) -> CastSums:
        """Counts where the product is the same for every non-zero element: 0, Inf or NaN."""
        nonzero = self._tally.finite - self.zeros
        underflow, saturated = (nonzero if factor == 0 else 0), (nonzero if np.isinf(factor) else 0)
        return CastSums(underflow, saturated, saturated, 0, math.nan, math.nan, math.nan, math.nan)
