"""The census of a 16-bit tensor: how often each of its at most 65,536 codes occurs. Exact, and cheap to ask again."""

from __future__ import annotations

from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp8dbg.errors import UsageError
from fp8dbg.numerics.figures import CastSums, Census, Counts, Tally

if TYPE_CHECKING:
    import torch

Codes = npt.NDArray[np.uint16]

CODES = 65536
_SIGN = 32768
_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00}


class _Gathered(NamedTuple):
    """What all figures are read off: counts, sums, and the finite non-zero magnitudes that occur, ascending.

    ``total``: elements of each magnitude; ``excess``: the positive less the negative ones.
    """

    zeros: int
    nan: int
    inf: int
    x: float
    x2: float
    values: npt.NDArray[np.float32]
    total: Counts
    excess: Counts


class CodeCensus(Census):
    """Counts of codes.

    Sums run over the magnitudes that occur, ascending, so that equal counts give equal figures, bit for bit.

    Args:
        dtype: "bfloat16" or "float16".
        counts: one count per code, integers [65536]; or a tensor of them on a device, copied to the host when a figure
            is first read and not before.
        repeat: how many times the tensor counted occurs.
    """

    def __init__(self, dtype: str, counts: npt.NDArray[Any] | torch.Tensor, repeat: int = 1) -> None:
        if dtype not in _INFINITY:
            raise UsageError(f"A census counts the codes of {' or '.join(_INFINITY)}, not of {dtype}.")
        self.dtype = dtype
        self._source, self._repeat = counts, repeat

    @classmethod
    def from_codes(cls, dtype: str, codes: npt.ArrayLike, counts: npt.ArrayLike) -> CodeCensus:
        """The census that ``codes()`` described; codes not named do not occur."""
        dense = np.zeros(CODES, dtype=np.int64)
        np.add.at(dense, np.asarray(codes, dtype=np.uint16), np.asarray(counts, dtype=np.int64))
        return cls(dtype, dense)

    @cached_property
    def _dense(self) -> npt.NDArray[Any]:
        source = self._source
        return source if isinstance(source, np.ndarray) else source.cpu().numpy()

    def codes(self) -> tuple[Codes, Counts]:
        """The codes that occur (uint16, ascending), and how often each does (int64)."""
        codes = np.flatnonzero(self._dense)
        return codes.astype(np.uint16), self._dense[codes].astype(np.int64) * self._repeat

    def __add__(self, other: Census) -> CodeCensus:
        if not isinstance(other, CodeCensus) or other.dtype != self.dtype:
            raise UsageError(f"A census of {self.dtype} and one of {other.dtype} do not add up.", "Measure both alike.")
        (codes, counts), (more_codes, more_counts) = self.codes(), other.codes()
        return CodeCensus.from_codes(
            self.dtype, np.concatenate([codes, more_codes]), np.concatenate([counts, more_counts])
        )

    @cached_property
    def _gathered(self) -> _Gathered:
        from fp8dbg.numerics.census_kernels import gather_magnitudes

        return _Gathered(*gather_magnitudes(self._dense, _values(self.dtype), _INFINITY[self.dtype], self._repeat))

    @property
    def _magnitudes(self) -> tuple[npt.NDArray[np.float32], Counts, Counts]:
        return self._gathered[5:]

    def _count(self) -> Tally:
        zeros, nan, inf, x, x2, values, total, _ = self._gathered
        amax, amin = (float(values[-1]), float(values[0])) if values.size else (None, None)
        return Tally(zeros + nan + inf + int(total.sum()), zeros, nan, inf, amax, amin, x, x2)

    def _central_moments(self, mean: float) -> tuple[float, float]:
        from fp8dbg.numerics.census_kernels import central_moments

        second, fourth, different = central_moments(*self._magnitudes, self.zeros, mean)
        return (second, fourth) if different > 1 else (0.0, 0.0)

    def _median(self) -> float:
        from fp8dbg.numerics.census_kernels import median_magnitude

        values, total, _ = self._magnitudes
        return float(median_magnitude(values, total))

    def histogram(self) -> tuple[int, list[int]]:
        """Elements per binade; see ``Census.histogram``."""
        from fp8dbg.numerics.census_kernels import count_binades

        values, total, _ = self._magnitudes
        if not values.size:
            return 0, []
        first, counts = count_binades(values, total)
        return first, counts.tolist()

    def _cast(self, scale: np.float32, parameters: tuple[Any, ...]) -> CastSums:
        from fp8dbg.numerics.census_kernels import cast_magnitudes

        return CastSums(*cast_magnitudes(*self._magnitudes, scale, parameters))


@cache
def _values(dtype: str) -> npt.NDArray[np.float32]:
    """The magnitude of each of the 32,768 codes without a sign, as float32."""
    codes = np.arange(_SIGN, dtype=np.uint16)
    if dtype == "float16":
        return codes.view(np.float16).astype(np.float32)
    return (codes.astype(np.uint32) << 16).view(np.float32)
