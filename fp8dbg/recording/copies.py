"""The copies of operands that layers read under autocast, made once for layers that read the same input."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from fp8dbg.numerics.memory import LARGEST_SCRATCH, scratch

_pass = 0


def next_pass() -> None:
    """A microbatch or a step is over: from now on no tensor counts as one that was seen before."""
    global _pass
    _pass += 1


def version_of(tensor: Tensor) -> object:
    """Changes with every pass, and with every write in place within one; an inference tensor's is never the same.

    Writes through ``tensor.data`` or numpy are not counted, as torch's autograd does not see them either: a buffer that
    every batch is put into that way is another tensor from pass to pass, but not from layer to layer.
    """
    return object() if tensor.is_inference() else (_pass, tensor._version)


class _Copied(threading.local):
    """What the thread's memory for a copied input holds: of this thread as the memory is, whoever records."""

    original: weakref.ref[Tensor] | None = None
    version: object = None
    copy: Tensor | None = None


_copied = _Copied()


def copied(role: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A CPU tensor in another dtype, until the role's next one; layers that read the same input share the work."""
    memory = scratch(role)(tensor.shape, dtype=dtype)
    if role != "input":
        return memory.copy_(tensor)
    last, version = _copied.copy, version_of(tensor)
    same = _copied.original is not None and _copied.original() is tensor and _copied.version == version
    if same and last is not None and last.dtype == dtype and last.data_ptr() == memory.data_ptr():
        return last
    _copied.original = _copied.copy = None  # should the copy fail midway
    memory.copy_(tensor)
    if memory.nbytes <= LARGEST_SCRATCH:  # more is memory of its own, and goes with its last user
        _copied.copy, _copied.version = memory, version
        _copied.original = weakref.ref(tensor)
    return memory
