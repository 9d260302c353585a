"""The hooks of a module whose call is its layer's call: ``Recorder.hook`` puts them on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from fp8dbg.recording.watch import Watch

_called_eagerly = _disable_dynamo(Watch.called)


class ModuleHook:
    """The forward hook of a module. A copy of the module, deep or pickled, gets a hook that does nothing."""

    __slots__ = ("_watch",)

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """A call of the module; what torch.compile is tracing it leaves, by a graph break, to plain Python."""
        if torch.compiler.is_compiling():
            _called_eagerly(self._watch, args, kwargs, output)
        else:
            self._watch.called(args, kwargs, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, returns None, is there without fp8dbg


class AheadHook(ModuleHook):
    """The forward pre-hook of a module."""

    __slots__ = ()

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any = None) -> None:
        """A call that is about to come; what torch.compile is tracing it leaves alone."""
        if not torch.compiler.is_compiling():
            self._watch.coming(args, kwargs)


class ModuleHandle:
    """The hooks of one module."""

    def __init__(self, *handles: RemovableHandle) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Take them off; twice does nothing."""
        for handle in self._handles:
            handle.remove()


def hook_module(watch: Watch) -> ModuleHandle:
    """Hook the layer's module. First in line: FSDP's own hook, if it comes first, puts the weight away."""
    module = watch.layer.module
    handles = [module.register_forward_hook(ModuleHook(watch), with_kwargs=True, prepend=True)]
    if watch.layer.looks_ahead:
        handles.append(module.register_forward_pre_hook(AheadHook(watch), with_kwargs=True))
    return ModuleHandle(*handles)
