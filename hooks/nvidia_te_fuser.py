"""The fuser of ``te.ops``: it runs operations without calling their modules, so no module hook hears of them.

While a layer listens, the methods by which the fuser runs operations are wrapped on Transformer Engine's classes, and
put back when the last one has stopped; no module is changed. Each wrapper calls the method it stands for, with the same
arguments, and hands its result on untouched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fp8dbg.recording.guard import guarded

OPERATIONS = "transformer_engine.pytorch.ops"

_BEFORE = "fp8dbg_before_cast"
"""Attribute of a tensor that an operation hands to the next one in FP8: what made it, and out of what."""


class Made(NamedTuple):
    """What an operation has cast to FP8 for the next one: the operation, and what it was given.

    ``context``: in an activation's backward, on measured steps, what it needs to be run once more without the cast.
    """

    operation: nn.Module
    given: Tensor
    context: SimpleNamespace | None = None


class Listener(Protocol):
    """Somebody who records one ``BasicLinear``. Its methods raise nothing."""

    def lost(self, what: str, error: Exception) -> None:
        """Say that something of the layer is no longer seen."""

    def measures(self) -> bool:
        """Whether this step is measured in full."""

    def called(self, grad_enabled: bool) -> None:
        """The fuser is about to run; whether gradients are wanted shows only here, outside its autograd function."""

    def forward(self, run_by: nn.Module, context: Any, given: Any, output: Any, made: Made | None) -> None:
        """A forward: run by the operation itself or by a fusion; ``made``: where ``given`` came in FP8."""

    def gradient(self, context: Any, gradient: Any, made: Made | None) -> None:
        """A backward is about to run; ``made``: where ``gradient`` came in FP8."""

    def results(self, run_by: nn.Module, context: Any, grad_input: Any, grad_weight: Any) -> None:
        """The backward is done."""


_listeners: dict[int, list[Listener]] = {}
_originals: list[tuple[type, str, Any]] = []


def basic_linear(module: nn.Module) -> nn.Module | None:
    """The operation that holds the weight of a linear of ``te.ops``: itself, or ``te.ops.Linear``'s; else None."""
    if not type(module).__module__.startswith(OPERATIONS):
        return None
    if type(module).__name__ == "Linear":
        return next((op for op in module.basic_ops if _is_linear(op)), None)  # type: ignore[union-attr, unused-ignore]
    return module if _is_linear(module) else None


def plain(tensor: Any) -> bool:
    """Whether this is a tensor in high precision."""
    return isinstance(tensor, Tensor) and not hasattr(tensor, "_quantizer")


def listen(operation: nn.Module, listener: Listener) -> None:
    """Tell the listener of every call of this ``BasicLinear`` from now on."""
    if not _listeners:
        _wrap()
    _listeners.setdefault(id(operation), []).append(listener)


def unlisten(operation: nn.Module, listener: Listener) -> None:
    """Tell it nothing more."""
    found = _listeners.get(id(operation), [])
    if listener in found:
        found.remove(listener)
    if not found:
        _listeners.pop(id(operation), None)
    if not _listeners:
        while _originals:
            kind, name, method = _originals.pop()
            setattr(kind, name, method)


def _is_linear(op: nn.Module) -> bool:
    return any(kind.__name__ == "BasicLinear" for kind in type(op).__mro__)


def _wrap() -> None:
    """Wrap the methods where they are defined: in the base of all basic operations, and in each fusion of several."""
    _watching.off.clear()
    op = sys.modules[f"{OPERATIONS}.op"]
    linear = sys.modules[f"{OPERATIONS}.basic.basic_linear"].BasicLinear
    _replace(linear, "pre_fuser_forward", _announcing)
    for kind in (op.BasicOperation, *_kinds_of(op.FusedOperation)):
        _replace(kind, "fuser_forward", _forwarding)
        _replace(kind, "fuser_backward", _reversing)


def _kinds_of(kind: type) -> Iterator[type]:
    found: list[type] = kind.__subclasses__()
    for one in found:
        yield one
        yield from _kinds_of(one)


def _replace(kind: type, name: str, wrapper: Callable[[Any], Any]) -> None:
    method = vars(kind).get(name)
    if method is not None:
        _originals.append((kind, name, method))
        setattr(kind, name, wrapper(method))


class _Watching:
    """What the wrappers do beside the methods they stand for. A fault in it ends it, and never reaches training."""

    def __init__(self) -> None:
        self.off: set[str] = set()

    def lost(self, what: str, error: Exception) -> None:
        """Have every layer's run say that something of it is no longer seen."""
        for listener in [one for found in _listeners.values() for one in found]:
            listener.lost(what, error)

    @guarded("its calls by the fuser")
    def announced(self, op: Any) -> None:
        """An operation's fuser is about to run."""
        for listener in _listeners.get(id(op), ()):
            listener.called(torch.is_grad_enabled())

    @guarded("its forward by the fuser")
    def after_forward(self, op: Any, contexts: Any, given: Any, done: Any) -> None:
        """An operation has run forward."""
        made = _taken(given)
        for place, listener in _places(op):
            listener.forward(op, contexts[place], given, done[0], made)
        _leave(done[0], op, given)

    @guarded("its backward by the fuser")
    def before_backward(self, op: Any, contexts: Any, gradient: Any) -> SimpleNamespace | None:
        """An operation is about to run backward; what is kept of an activation's context."""
        made = _taken(gradient)
        for place, listener in _places(op):
            listener.gradient(contexts[_place_of(contexts, "weight_requires_grad", place)], gradient, made)
        last = op.basic_ops[-1] if op.is_fused_op else op
        return (
            _kept_for_again(contexts[_place_of(contexts, _CASTS, len(contexts) - 1)]) if is_activation(last) else None
        )

    @guarded("its results by the fuser")
    def after_backward(self, op: Any, contexts: Any, gradient: Any, done: Any, context: SimpleNamespace | None) -> None:
        """An operation has run backward."""
        for place, listener in _places(op):
            own = _place_of(contexts, "weight_requires_grad", place)
            listener.results(op, contexts[own], done[0], next(iter(done[1][own] or ()), None))
        _leave(done[0], op, gradient, context)


_watching = _Watching()

_CASTS = "prev_op_grad_output_quantizer"
"""What an activation's context has: the quantizer of the gradient that it hands on."""


def _announcing(method: Any) -> Any:
    @functools.wraps(method)
    def pre_fuser_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        _watching.announced(self)
        return method(self, *args, **kwargs)

    return pre_fuser_forward


def _forwarding(method: Any) -> Any:
    @functools.wraps(method)
    def fuser_forward(self: Any, contexts: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        done = method(self, contexts, given, *args, **kwargs)
        _watching.after_forward(self, contexts, given, done)
        return done

    return fuser_forward


def _reversing(method: Any) -> Any:
    @functools.wraps(method)
    def fuser_backward(self: Any, contexts: Any, gradient: Any, *args: Any, **kwargs: Any) -> Any:
        context = _watching.before_backward(self, contexts, gradient)
        done = method(self, contexts, gradient, *args, **kwargs)
        _watching.after_backward(self, contexts, gradient, done, context)
        return done

    return fuser_backward


def is_activation(op: Any) -> bool:
    """Whether this is one of the operations that compute an activation."""
    return type(op).__module__.startswith((f"{OPERATIONS}.basic.activation", f"{OPERATIONS}.basic.swiglu"))


def _kept_for_again(context: Any) -> SimpleNamespace | None:
    """An activation's context before its backward empties it, to be read once more without the cast at its end."""
    saved = context.saved_tensors or ()
    if not all(map(plain, saved)) or not any(one.measures() for found in _listeners.values() for one in found):
        return None
    return SimpleNamespace(**{**vars(context), "saved_tensors": tuple(t.detach() for t in saved), _CASTS: None})


def _place_of(contexts: Any, mark: str, place: int) -> int:
    """Where an operation's context is among a fusion's in backward: its forward has left a mark in it.

    Transformer Engine 2.8 hands them in the order of the backward, later versions in that of the operations.
    """
    marked = [i for i, context in enumerate(contexts) if hasattr(context, mark)]
    return marked[0] if len(marked) == 1 else place


def _places(op: Any) -> list[tuple[int, Listener]]:
    """The linears that an operation runs, by their place in it, with who listens to them."""
    if not op.is_fused_op:
        return [(0, listener) for listener in _listeners.get(id(op), ())]
    return [(i, one) for i, basic in enumerate(op.basic_ops) for one in _listeners.get(id(basic), ())]


def _leave(made: Any, operation: Any, given: Any, context: SimpleNamespace | None = None) -> None:
    """Leave at a tensor in FP8, for the operation that comes next, what it was before the cast."""
    if hasattr(made, "_quantizer") and plain(given) and hasattr(made, "__dict__"):
        made.__dict__[_BEFORE] = Made(operation, given, context)


def _taken(tensor: Any) -> Made | None:
    """What was left there; it is forgotten, so that nothing lives longer than it would."""
    found = getattr(tensor, "__dict__", {}).pop(_BEFORE, None) if hasattr(tensor, "_quantizer") else None
    return found if isinstance(found, Made) else None
