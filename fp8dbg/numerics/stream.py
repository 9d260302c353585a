"""The census's twin for float32 tensors, whose values are too many to count: it keeps the tensor and reads it again."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fp8dbg.errors import UsageError
from fp8dbg.numerics import census_kernels as kernels
from fp8dbg.numerics.compiled import share_out
from fp8dbg.numerics.figures import CastSums, Census, Counts, Tally
from fp8dbg.numerics.memory import array_of

if TYPE_CHECKING:
    import torch

Values = npt.NDArray[np.float32]

_CHUNKS_PER_THREAD = 16
_VALUES_PER_THREAD = 1 << 20
_INFINITY = 0x7F80


class Stream(Census):
    """Float32 values, read in chunks; no copy of the tensor in a wider type is ever made.

    The tensor is read when a figure is asked for: ask before it changes. Sums are float64, over chunks of fixed size,
    whatever the threads. Counts, extremes and the median of parts added are those of the whole exactly; the moments
    and errors to the last bits of float64, as their order of summation is another.

    Args:
        parts: flat float32 tensors on any device, and how often each occurs; a device tensor is copied to the host
            when a figure is first asked for.
    """

    dtype = "float32"

    def __init__(self, parts: list[tuple[torch.Tensor, int]]) -> None:
        self._parts = parts

    def __add__(self, other: Census) -> Stream:
        if not isinstance(other, Stream):
            raise UsageError(f"A census of float32 and one of {other.dtype} do not add up.", "Measure both alike.")
        return Stream(self._parts + other._parts)

    def codes(self) -> None:
        """None: float32 values have no 16-bit codes."""

    @cached_property
    def _arrays(self) -> list[tuple[Values, int]]:
        return [(array_of(tensor.cpu()), repeat) for tensor, repeat in self._parts]

    def _pass(self, kernel: Any, arguments: tuple[Any, ...], counted: int, summed: int) -> tuple[Counts, list[float]]:
        """Run a kernel over every chunk: its rows of counts, the last column being how often they occur; its sums.

        Partial sums are added exactly and rounded once, so their order does not matter.
        """
        rows, partials = [np.zeros((0, counted + 1), dtype=np.int64)], [np.zeros((0, summed))]
        for x, repeat in self._arrays:
            found = np.full((_chunks(x), counted + 1), repeat, dtype=np.int64)
            partial = np.zeros((_chunks(x), summed))

            def work(start: int, stop: int, outputs: Any = (x, found, partial)) -> None:
                kernel(outputs[0], start, stop, *arguments, *outputs[1:])

            share_out(work, _chunks(x), _CHUNKS_PER_THREAD)
            rows.append(found)
            partials.append(partial * repeat)
        return np.concatenate(rows), [math.fsum(column) for column in np.concatenate(partials).T.tolist()]

    @cached_property
    def _scanned(self) -> tuple[Counts, list[float]]:
        return self._pass(kernels.scan, (), 6, 2)

    def _count(self) -> Tally:
        rows, sums = self._scanned
        zeros, nan, inf = (rows[:, :3] * rows[:, 6:]).sum(axis=0).tolist()
        numel = sum(x.size * repeat for x, repeat in self._arrays)
        high, low = rows[:, 4].max(initial=0), rows[:, 5].min(initial=0xFFFFFFFF) + 1
        amax, amin = (float(np.uint32(bits).view(np.float32)) if high else None for bits in (high, low & 0xFFFFFFFF))
        return Tally(numel, zeros, nan, inf, amax, amin, *sums)

    def _central_moments(self, mean: float) -> tuple[float, float]:
        rows, finite = self._scanned[0], self._tally.finite
        positive = int((rows[:, 3] * rows[:, 6]).sum())
        if self.zeros == finite or (not self.zeros and self.amax == self.amin and positive in (0, finite)):
            return 0.0, 0.0
        second, fourth = self._pass(kernels.deviations, (mean,), 0, 2)[1]
        return second, fourth

    def _cast(self, scale: np.float32, parameters: tuple[Any, ...]) -> CastSums:
        rows, sums = self._pass(kernels.cast_values, (scale, parameters), 4, 4)
        return CastSums(*(rows[:, :4] * rows[:, 4:]).sum(axis=0).tolist(), *sums)

    @cached_property
    def _high(self) -> Counts:
        """Finite non-zero elements by the upper half of their magnitude's bits: the bfloat16 codes, truncated."""
        table = self._table(32768, kernels.count_high)
        table[0] -= self.zeros
        return table[:_INFINITY]

    def _low(self, high: int) -> Counts:
        """The elements of one upper half by their lower half."""
        table = self._table(65536, lambda bits, out: kernels.count_low(bits, np.uint32(high), out))
        table[0] -= self.zeros if high == 0 else 0
        return table

    def _table(self, size: int, kernel: Callable[[Any, Counts], None]) -> Counts:
        total = np.zeros(size, dtype=np.int64)
        for x, repeat in self._arrays:
            bits = x.view(np.uint32)

            def count(start: int, stop: int, bits: Any = bits) -> Counts:
                table = np.zeros(size, dtype=np.int64)
                kernel(bits[start:stop], table)
                return table

            for table in share_out(count, x.size, _VALUES_PER_THREAD):
                total += table * repeat
        return total

    def _median(self) -> float:
        running = np.cumsum(self._high)
        return float(np.mean([self._ranked(int(k), running) for k in {(running[-1] - 1) // 2, running[-1] // 2}]))

    def _ranked(self, k: int, running: Counts) -> float:
        """The k-th smallest magnitude, from 0: first its upper half, then the lower within it."""
        high = int(np.searchsorted(running, k, side="right"))
        k -= int(running[high - 1]) if high else 0
        low = int(np.searchsorted(np.cumsum(self._low(high)), k, side="right"))
        return float(np.uint32(high << 16 | low).view(np.float32))

    def histogram(self) -> tuple[int, list[int]]:
        """Elements per binade; see ``Census.histogram``."""
        high, counts = self._high, np.zeros(149 + 128, dtype=np.int64)
        present = np.flatnonzero(high[1:]) + 1
        exponents = np.frexp((present.astype(np.uint32) << 16).view(np.float32))[1] - 1
        np.add.at(counts, exponents + 149, high[present])
        if high[0]:
            low = self._low(0)
            codes = np.flatnonzero(low)
            np.add.at(counts, np.frexp(codes.astype(np.float64))[1] - 1, low[codes])
        occupied = np.flatnonzero(counts)
        if not occupied.size:
            return 0, []
        return int(occupied[0]) - 149, counts[occupied[0] : occupied[-1] + 1].tolist()


def _chunks(x: Values) -> int:
    return int(-(-x.size // kernels.CHUNK))
