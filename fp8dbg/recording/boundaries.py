"""Where a microbatch ends (a backward root has finished) and where a step ends (an optimizer has stepped).

Both are watched globally, once, whatever the number of sessions, and so are gradient scalers; with the last session
they are restored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from fp8dbg.recording.scalers import watch_scalers

__all__ = ["Listener", "listen", "unlisten"]


class Listener(Protocol):
    """What a session is told."""

    def root_finished(self, tensors: Any) -> None:
        """A backward pass from these roots (a tensor or a sequence of them) has finished."""

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """An optimizer, anyone's, has stepped."""

    def step_left_out(self, optimizer: Optimizer) -> None:
        """A gradient scaler has left an optimizer's step out."""


_listeners: list[Listener] = []
_handle: RemovableHandle | None = None
_original: Callable[..., None] | None = None
_installed: Callable[..., None] | None = None
_leave_scalers: Callable[[], None] | None = None


def listen(listener: Listener) -> None:
    """Tell this listener from now on."""
    global _handle, _leave_scalers
    _listeners.append(listener)
    if _handle is None:
        _handle = register_optimizer_step_post_hook(_stepped)
        _leave_scalers = watch_scalers(_tell_left_out)
        _wrap_backward()


def unlisten(listener: Listener) -> None:
    """Tell it no more; with the last listener everything is as it was before the first."""
    global _handle, _leave_scalers
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners and _handle is not None and _leave_scalers is not None:
        _handle.remove()
        _leave_scalers()
        _handle = _leave_scalers = None
        _unwrap_backward()


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        _tell_stepped_eagerly(optimizer)
    else:
        _tell_stepped(optimizer)


def _tell_stepped(optimizer: Optimizer) -> None:
    for listener in tuple(_listeners):
        listener.optimizer_stepped(optimizer)


def _tell_left_out(optimizer: Optimizer) -> None:
    for listener in tuple(_listeners):
        listener.step_left_out(optimizer)


_tell_stepped_eagerly = _disable_dynamo(_tell_stepped)


def _wrap_backward() -> None:
    """Tensor.backward looks torch.autograd.backward up when it is called, so wrapping that sees every backward."""
    global _original, _installed
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        nested = torch._C._current_graph_task_id() != -1  # reentrant checkpointing calls it inside a backward
        original(tensors, *args, **kwargs)
        if not nested and backward is _installed:
            for listener in tuple(_listeners):
                listener.root_finished(tensors)

    _original, _installed = original, backward
    torch.autograd.backward = backward


def _unwrap_backward() -> None:
    """Restore, unless somebody has wrapped it in turn: then ours stays below theirs, and tells nobody any more."""
    global _original, _installed
    if torch.autograd.backward is _installed and _original is not None:
        torch.autograd.backward = _original
    _original = _installed = None
