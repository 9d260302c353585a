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


class _Magnitudes(NamedTuple):
    """Finite non-zero magnitudes that occur, ascending; elements of each, and positive less negative ones."""

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
    def _occurring(self) -> tuple[Codes, Counts]:
        """The codes that occur and their counts; the dense source is dropped."""
        source, self._source = self._source, np.zeros(0)
        dense = source if isinstance(source, np.ndarray) else source.cpu().numpy()
        codes = np.flatnonzero(dense != 0)
        return codes.astype(np.uint16), dense[codes].astype(np.int64) * self._repeat

    def codes(self) -> tuple[Codes, Counts]:
        """The codes that occur (uint16, ascending), and how often each does (int64)."""
        return self._occurring

    def __add__(self, other: Census) -> CodeCensus:
        if not isinstance(other, CodeCensus) or other.dtype != self.dtype:
            raise UsageError(f"A census of {self.dtype} and one of {other.dtype} do not add up.", "Measure both alike.")
        (codes, counts), (more_codes, more_counts) = self.codes(), other.codes()
        return CodeCensus.from_codes(
            self.dtype, np.concatenate([codes, more_codes]), np.concatenate([counts, more_counts])
        )

    @cached_property
    def _magnitudes(self) -> _Magnitudes:
        codes, counts = self.codes()
        infinity = _INFINITY[self.dtype]
        a, b, c, d = np.searchsorted(codes, [1, infinity, _SIGN + 1, _SIGN + infinity])
        above, below = codes[a:b], codes[c:d] - np.uint16(_SIGN)
        ends = np.concatenate([above[:1], above[-1:], below[:1], below[-1:]])
        first, last = int(ends.min(initial=_SIGN)), int(ends.max(initial=0))
        positive, negative = np.zeros((2, max(0, last + 1 - first)), dtype=np.int64)
        positive[above - first], negative[below - first] = counts[a:b], counts[c:d]
        total = positive + negative
        present = np.flatnonzero(total)
        return _Magnitudes(_values(self.dtype)[present + first], total[present], positive[present] - negative[present])

    def _count(self) -> Tally:
        codes, counts = self.codes()
        magnitudes, infinity = codes & np.uint16(_SIGN - 1), _INFINITY[self.dtype]
        values, total, excess = self._magnitudes
        wide = values.astype(np.float64)
        return Tally(
            int(counts.sum()),
            int(counts[magnitudes == 0].sum()),
            int(counts[magnitudes > infinity].sum()),
            int(counts[magnitudes == infinity].sum()),
            float(values[-1]) if values.size else None,
            float(values[0]) if values.size else None,
            float((excess * wide).sum()),
            float((total * wide * wide).sum()),
        )

    def _central_moments(self, mean: float) -> tuple[float, float]:
        values, total, excess = self._magnitudes
        positive, negative = (total + excess) // 2, (total - excess) // 2
        occupied = np.count_nonzero(positive) + np.count_nonzero(negative) + (self.zeros > 0)
        if occupied < 2:
            return 0.0, 0.0
        wide = values.astype(np.float64)
        above, below = (wide - mean) ** 2, (wide + mean) ** 2
        second = (positive * above + negative * below).sum() + self.zeros * mean**2
        fourth = (positive * above**2 + negative * below**2).sum() + self.zeros * mean**4
        return float(second), float(fourth)

    def _median(self) -> float:
        values, total, _ = self._magnitudes
        running = np.cumsum(total)
        middle = [(running[-1] - 1) // 2, running[-1] // 2]
        return float(values[np.searchsorted(running, middle, side="right")].astype(np.float64).mean())

    def histogram(self) -> tuple[int, list[int]]:
        """Elements per binade; see ``Census.histogram``."""
        values, total, _ = self._magnitudes
        if not values.size:
            return 0, []
        exponents = np.frexp(values)[1] - 1
        counts = np.zeros(exponents[-1] - exponents[0] + 1, dtype=np.int64)
        np.add.at(counts, exponents - exponents[0], total)
        return int(exponents[0]), counts.tolist()

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
