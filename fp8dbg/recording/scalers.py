"""What a gradient scaler does: it multiplies the loss, and leaves a step out where the gradients overflowed.

Figures of the loss and what is predicted of it are in the loss's own units: the loss is what ``GradScaler.scale`` was
given, found again from a root. Gradients stay as they are: the scaler's multiples are what is cast to FP8.

While somebody listens, ``scale`` notes the loss on the autograd node of what it returns. The note lives and dies with
that node, and the node is there whatever becomes of the tensor. ``step`` tells of an optimizer that did not step.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["Root", "root_of", "unscale", "watch_scalers"]

_NOTE = "fp8dbg loss"

_LOOKED_AT = 32
"""Autograd nodes from a root on among which a scaler's is looked for: what is done to a loss after it was scaled."""

_Method = Callable[..., Any]

_noted = False
"""Whether any scaler has noted a loss in this process: if none has, no graph needs looking at."""


class _Deciding(threading.local):
    """What the thread's scaler does: None where none is about to step, else whether an optimizer has stepped."""

    stepped: bool | None = None


_deciding = _Deciding()


def watch_scalers(left_out: Callable[[Optimizer], None]) -> Callable[[], None]:
    """Have every kind of scaler that there is note losses; returns what puts everything back.

    Args:
        left_out: told of each optimizer that a scaler does not call.
    """
    wrapped = ExitStack()
    wrapped.callback(register_optimizer_step_post_hook(_stepped).remove)
    for kind in _kinds(GradScaler):
        for name, around in (("scale", _noting), ("step", functools.partial(_telling, left_out))):
            if name in vars(kind):
                wrapped.callback(_wrap(kind, name, around))
    return wrapped.close


class Root(NamedTuple):
    """What a backward pass's root is a multiple of.

    Attributes:
        loss: the loss; None where something was done to it after a scaler multiplied it, so that nobody knows it.
        factor: what it was multiplied by, and every gradient with it; 1 without a scaler, NaN where it is not known.
    """

    loss: Tensor | None
    factor: float | Tensor = 1.0


def root_of(root: Tensor) -> Root:
    """The loss behind a backward pass's root of one element; where it is on an accelerator, nothing waits for it."""
    nodes = islice(_nodes(root), _LOOKED_AT)
    first = next(nodes, None) if _noted else None
    if first is None:
        return Root(root)
    note: Tensor | None = first.metadata.get(_NOTE)
    if note is not None:
        return Root(note, _ratio(root.detach(), note))
    return Root(None, math.nan) if any(_NOTE in node.metadata for node in nodes) else Root(root)


def unscale(row: dict[str, Any], factor: float | Tensor) -> None:
    """Give a row of ``gemms`` the loss's own units: impact grows with the gradient, sensitivity with its square."""
    factor = float(factor)
    for name, power in (("impact", 1), ("sensitivity", 2)):
        if factor != 1.0 and row.get(name) is not None:
            row[name] = row[name] / factor**power if math.isfinite(factor) and factor else None


def _ratio(scaled: Tensor, loss: Tensor) -> float | Tensor:
    if not loss.is_cpu:
        return scaled.float() / loss.float()
    value = float(loss)
    return float(scaled) / value if value else math.nan


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    """A class and all below it: FSDP's scaler has a ``scale`` of its own."""
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _wrap(kind: type[Any], name: str, around: Callable[[_Method], _Method]) -> Callable[[], None]:
    original: _Method = vars(kind)[name]
    ours = functools.wraps(original)(around(original))
    setattr(kind, name, ours)

    def restore() -> None:
        if vars(kind)[name] is ours:  # else somebody has wrapped it in turn: what is below goes on, for nobody
            setattr(kind, name, original)

    return restore


def _noting(scale: _Method) -> _Method:
    def noted(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if not torch.compiler.is_compiling():
            _note(outputs, scaled)
        return scaled

    return noted


def _telling(left_out: Callable[[Optimizer], None], step: _Method) -> _Method:
    def told(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # a step that calls its parent's is asked once
        if torch.compiler.is_compiling() or _deciding.stepped is not None:
            return step(self, optimizer, *args, **kwargs)
        _deciding.stepped = False
        try:
            result = step(self, optimizer, *args, **kwargs)
            stepped = _deciding.stepped
        finally:
            _deciding.stepped = None
        if not stepped and _overflowed(self, optimizer):
            left_out(optimizer)
        return result

    return told


def _stepped(*_: object) -> None:
    if _deciding.stepped is not None:
        _deciding.stepped = True


def _overflowed(scaler: Any, optimizer: object) -> bool:
    """Whether the scaler has found Inf or NaN in this optimizer's gradients; it has waited for the answer already."""
    try:
        found = scaler._per_optimizer_states.get(id(optimizer), {})["found_inf_per_device"]
        return any(bool(flag) for flag in found.values())
    except Exception:  # noqa: BLE001  a scaler of another make must not stop the training
        return False


def _note(outputs: Any, scaled: Any) -> None:
    global _noted
    if isinstance(outputs, (list, tuple)):
        for one, other in zip(outputs, scaled, strict=True):
            _note(one, other)
    elif isinstance(scaled, Tensor) and scaled is not outputs and scaled.grad_fn is not None:
        node: Any = scaled.grad_fn
        node.metadata[_NOTE], _noted = outputs.detach(), True


def _nodes(root: Tensor) -> Iterator[Any]:
    """The autograd nodes behind a root, nearest first."""
    waiting, seen = [root.grad_fn], set()
    for node in waiting:
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions]
