"""From a tensor to its census, and the fast path to its amax alone. Any shape, strides and device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fp8dbg.errors import UsageError
from fp8dbg.numerics.census_kernels import count_codes, largest_magnitude, repeats_itself
from fp8dbg.numerics.code_census import CODES, CodeCensus
from fp8dbg.numerics.compiled import parts_of, share_out
from fp8dbg.numerics.figures import Census, QuantFigures
from fp8dbg.numerics.memory import array_of, scratch
from fp8dbg.numerics.stream import Stream

__all__ = [
    "Amax",
    "Census",
    "CodeCensus",
    "QuantFigures",
    "Stream",
    "amax_of",
    "census",
    "passing_census",
    "read_together",
]

AnyCounts = npt.NDArray[Any]

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_DEVICE_CHUNK = 1 << 22
_WORDS_PER_THREAD = 1 << 17
_TEAMWORK = 1 << 16
_MASK_16, _MASK_32 = np.uint16(0x7FFF), np.uint32(0x7FFFFFFF)
_LARGEST_PART = 1 << 28  # words: no uint32 counter can overflow


def census(tensor: torch.Tensor) -> Census:
    """Count a tensor, once, for every per-tensor figure under any format and scale.

    Any shape (0-d, empty), strides (non-contiguous, expanded), layout and device. bfloat16 and float16 tensors are
    counted at once, on their own device and without waiting for it, and may change or go afterwards. Other floating
    dtypes are taken as float32 by a ``Stream``, which reads the tensor when a figure is asked for. Integer, complex
    and meta tensors are a UsageError.
    """
    return _census(tensor, lambda use: torch.empty)


def passing_census(tensor: torch.Tensor) -> Census:
    """The same for figures that are read at once: the thread's next one takes its memory."""
    return _census(tensor, scratch)


def _census(tensor: torch.Tensor, memory: Callable[[str], Callable[..., torch.Tensor]]) -> Census:
    flat, repeat = _flatten(tensor)
    if flat.dtype not in _SIXTEEN_BITS:
        return Stream([(flat, repeat)])
    counts = _count_on_host(flat, memory("counts")) if flat.device.type == "cpu" else _count_by_torch(flat)
    return CodeCensus(str(flat.dtype).removeprefix("torch."), counts, repeat)


def _flatten(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The elements, 16-bit or float32, in any order, and how often they occur; copies only if there are gaps."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"A torch tensor is wanted, not {type(tensor).__name__}.", "Use torch.as_tensor(...).")
    if not tensor.is_floating_point() or tensor.is_meta or tensor.layout != torch.strided or tensor.is_nested:
        odd = tensor.layout if tensor.layout != torch.strided else tensor.dtype
        kind = "meta" if tensor.is_meta else "nested" if tensor.is_nested else str(odd).removeprefix("torch.")
        raise UsageError(f"A {kind} tensor cannot be measured.", "Give a dense floating-point tensor with data.")
    tensor, repeat = tensor.detach(), 1
    if tensor.dtype not in _SIXTEEN_BITS:
        tensor = tensor.float()
    if tensor.is_contiguous():
        return tensor.reshape(-1), 1
    for d, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor, repeat = tensor.narrow(d, 0, 1), repeat * size
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1).contiguous(), repeat


def _count_on_host(flat: torch.Tensor, empty: Callable[..., torch.Tensor]) -> AnyCounts:
    """Counts per code of a contiguous 16-bit CPU tensor: whole uint64 words compiled, the ends by numpy."""
    codes = array_of(flat)
    head = min(-flat.data_ptr() % 8 // 2, codes.size)
    tail = head + (codes.size - head) // 4 * 4
    words = codes[head:tail].view(np.uint64)
    lanes = 4 if repeats_itself(words) else 1

    dtype: type[np.integer[Any]] = np.uint32 if codes.size < 2**32 else np.int64
    # Handed out here: memory of a worker's own would be its next part's before these counts are added up.
    tables = list(empty((parts_of(words.size, _WORDS_PER_THREAD), lanes, CODES), dtype=torch.int32))

    def count(start: int, stop: int) -> AnyCounts:
        first = min(start + _LARGEST_PART, stop)
        try:
            memory = tables.pop()
        except IndexError:  # no thread could be started, and somebody has taken its part twice
            memory = torch.empty((lanes, CODES), dtype=torch.int32)
        counts = _count_words(words[start:first], memory).astype(dtype, copy=False)
        for i in range(first, stop, _LARGEST_PART):
            more = torch.empty((lanes, CODES), dtype=torch.int32)
            counts += _count_words(words[i : min(i + _LARGEST_PART, stop)], more)
        return counts

    counts, *others = share_out(count, words.size, _WORDS_PER_THREAD)
    for other in others:
        counts += other
    np.add.at(counts, np.concatenate([codes[:head], codes[tail:]]), 1)
    return counts


def _count_words(words: AnyCounts, memory: torch.Tensor) -> AnyCounts:
    """Counts of the codes in at most ``_LARGEST_PART`` words, uint32, in the memory given, int32 [lanes, codes]."""
    table = array_of(memory).view(np.uint32)
    table[:] = 0
    count_codes(words, table.reshape(-1), np.uint64(CODES * (len(table) > 1)))
    counts: AnyCounts = table[0]
    for lane in table[1:]:
        counts += lane
    return counts


def _count_by_torch(flat: torch.Tensor) -> torch.Tensor:
    """The same counts by torch operations on the tensor's device; nothing here waits for the device.

    Not ``torch.bincount``, which reads the largest value back to the host first.
    """
    dtype = torch.int32 if flat.numel() < 2**31 else torch.int64
    counts = torch.zeros(CODES, dtype=dtype, device=flat.device)
    one = torch.ones(1, dtype=dtype, device=flat.device)
    for chunk in torch.split(flat.view(torch.int16), _DEVICE_CHUNK):
        counts.scatter_add_(0, chunk.to(torch.int64) & 0xFFFF, one.expand(chunk.numel()))
    return counts


class Amax:
    """What the cheapest look at a tensor gives; on a device, read back only when asked for.

    Attributes:
        amax: largest finite absolute value; 0.0 if all are zero, None if nothing is finite.
        nan, inf: counts of such elements.
    """

    __slots__ = ("_numel", "_pending", "_values")

    def __init__(self, values: tuple[float, int, int], numel: int, pending: torch.Tensor | None = None) -> None:
        self._values, self._numel, self._pending = values, numel, pending

    def _read(self) -> tuple[float, int, int]:
        if self._pending is not None:
            self._accept(self._pending.tolist())
        return self._values

    def _accept(self, pending: list[int]) -> None:
        bits, nan, inf = pending
        self._values, self._pending = (float(np.uint32(bits).view(np.float32)), nan, inf), None

    @property
    def amax(self) -> float | None:
        """Largest finite absolute value; 0.0 if all are zero, None if nothing is finite."""
        amax, nan, inf = self._read()
        return amax if nan + inf < self._numel else None

    @property
    def nan(self) -> int:
        """NaN elements."""
        return self._read()[1]

    @property
    def inf(self) -> int:
        """Infinite elements."""
        return self._read()[2]

    def __float__(self) -> float:
        """The amax that an fmax-style reduction hands on: Inf where there is one, NaN never, 0 for nothing."""
        return math.inf if self.inf else self.amax or 0.0


def amax_of(tensor: torch.Tensor) -> Amax:
    """Largest absolute value: one pass over the bits where everything is finite, a closer look where not.

    The same tensors as ``census``. On a device nothing waits: the answer is read back when asked for.
    """
    flat, repeat = _flatten(tensor)
    if flat.device.type != "cpu":
        return Amax((0.0, 0, 0), tensor.numel(), _amax_by_torch(flat, repeat))
    if not flat.numel():
        return Amax((0.0, 0, 0), 0)
    amax = _largest_on_host(flat)
    if math.isfinite(amax):
        return Amax((amax, 0, 0), tensor.numel())
    found = census(tensor)
    return Amax((found.amax or 0.0, found.nan, found.inf), tensor.numel())


def _largest_on_host(flat: torch.Tensor) -> float:
    """Largest magnitude of a contiguous CPU tensor; NaN if there is one.

    Where torch has a team of threads a large tensor is theirs: they are awake, and each reads what it has written. The
    compiled loop takes half the time of ``torch.aminmax`` on one thread.
    """
    if flat.numel() >= _TEAMWORK and torch.get_num_threads() > 1:
        low, high = torch.aminmax(flat)
        return float(max(-low.item(), high.item()))
    mask: np.unsignedinteger[Any]
    if flat.dtype in _SIXTEEN_BITS:
        bits, mask = array_of(flat), _MASK_16
    else:
        bits, mask = array_of(flat).view(np.uint32), _MASK_32
    largest = int(largest_magnitude(bits, mask))
    if flat.dtype is torch.float16:
        return float(np.uint16(largest).view(np.float16))
    return float(np.uint32(largest << 16 if flat.dtype is torch.bfloat16 else largest).view(np.float32))


def _amax_by_torch(flat: torch.Tensor, repeat: int) -> torch.Tensor:
    """int64 [3] on the tensor's device: the bits of the finite amax as float32, NaN and Inf elements."""
    magnitude = flat.abs() if flat.numel() else flat.new_zeros(1)
    finite = torch.where(magnitude < math.inf, magnitude, 0.0)
    bits = finite.amax().float().view(torch.int32).to(torch.int64)
    return torch.stack([bits, magnitude.isnan().sum() * repeat, magnitude.isinf().sum() * repeat])


def read_together(found: Iterable[Amax]) -> None:
    """Copy what is still on a device to the host in one transfer; later reads wait for nothing."""
    waiting = [a for a in found if a._pending is not None]
    if waiting:
        rows = torch.stack([a._pending for a in waiting if a._pending is not None]).tolist()
        for a, row in zip(waiting, rows, strict=True):
            a._accept(row)
