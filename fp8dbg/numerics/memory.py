"""A CPU tensor's memory as an array, without a trace on the tensor; and memory that is used again."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_TYPES = {torch.float32: "<f4", torch.bfloat16: "<u2", torch.float16: "<u2", torch.float64: "<f8", torch.int32: "<i4"}


class _Memory:
    """What numpy asks for; holds the tensor for as long as there is an array."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": _TYPES[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The values of a contiguous CPU tensor, those of 16-bit floats as their uint16 codes; memory is shared.

    Not ``Tensor.numpy()``, after which torch refuses to resize the storage: FSDP frees gathered weights that way, so a
    look at one would break the training.
    """
    return np.asarray(_Memory(tensor))


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}


_scratch = _Scratch()

LARGEST_SCRATCH = 8 << 20
"""Bytes of one use that are kept; what needs more gets memory of its own."""


def scratch(use: str) -> Callable[..., torch.Tensor]:
    """Like ``torch.empty(shape, dtype=...)`` on the CPU, on memory that the thread's next call for this use has again.

    A large tensor's fresh pages cost more than what is written into them, for the training too, whose memory they would
    be: without this a sampled step of the benchmark's model takes 12,000 page faults more.
    """

    def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size > LARGEST_SCRATCH:
            return torch.empty(shape, dtype=dtype)
        held = _scratch.held.get(use)
        if held is None or held.numel() < size:
            with torch.inference_mode(False):
                held = _scratch.held[use] = torch.empty(size, dtype=torch.uint8)
        return held[:size].view(dtype).view(tuple(shape))

    return empty


__all__ = ["array_of", "scratch"]
