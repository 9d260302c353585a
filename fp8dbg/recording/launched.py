"""Inside a program that ``fp8dbg run`` started: find the models that it trains, and attach to them.

An optimizer says which parameters are trained when it is made; who owns them is looked up once. From then to its first
call in training the model carries a hook that attaches. A process without an optimizer pays nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import weakref
from collections.abc import Callable
from importlib import import_module
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fp8dbg.errors import UsageError
from fp8dbg.recording import planned
from fp8dbg.recording.guard import logger
from fp8dbg.recording.planned import Applied

_OPTIMIZER: Any = Optimizer
"""Its __init__ is wrapped: torch has hooks for an optimizer's steps, none for its making."""

MOST_LOOKS = 16
"""Optimizers whose model is looked up: each look goes through all of Python's objects, some 0.1 s in a big program."""


def arm(options: str, tell: Callable[[str], None]) -> Search:
    """Look for models from now on.

    Args:
        options: what ``launch.Options.to_json`` wrote.
        tell: takes a line for the launcher.
    """
    _allow_graph_breaks()
    search = Search(Attacher(json.loads(options), tell, lambda: search.models()))
    search.start()
    return search


def _allow_graph_breaks() -> None:
    """With fullgraph=True torch.compile would raise at the first hook of ours, into a program that asked for none."""
    original = torch.compile
    seen: list[str] = []

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("fullgraph"):
            kwargs["fullgraph"] = False
            if not seen:
                seen.append("")
                logger.warning("fp8dbg: torch.compile runs without fullgraph=True here, for hooks break graphs")
        return original(*args, **kwargs)

    torch.compile = compile


class Search:
    """Finds each model that is trained, at its first call in training mode with gradients on.

    A model is the outermost module that holds parameters of an optimizer, whether or not it is what is called.

    Args:
        found: called with each model, once; whatever it raises is logged.
    """

    def __init__(self, found: Callable[[nn.Module], None]) -> None:
        self._found, self._looks = found, 0
        self._known: list[weakref.ref[nn.Module]] = []
        self._original: Any = None

    def start(self) -> None:
        """Watch optimizers being made."""
        self._original = original = _OPTIMIZER.__init__

        @functools.wraps(original)
        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            with _harmless("what this optimizer trains"):
                self.optimizer_made(optimizer)

        _OPTIMIZER.__init__ = made

    def stop(self) -> None:
        """Watch no more."""
        _OPTIMIZER.__init__ = self._original

    def models(self) -> list[nn.Module]:
        """Those known so far, called or not."""
        return [_inside(model) for ref in self._known if (model := ref()) is not None]

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Wait for the first call of each model that it trains and that is not known yet."""
        known = {id(p) for ref in self._known if (model := ref()) is not None for p in model.parameters()}
        new = {id(p) for group in optimizer.param_groups for p in group["params"]} - known
        if not new or self._looks >= MOST_LOOKS:
            return
        self._looks += 1
        if self._looks == MOST_LOOKS:
            logger.warning("fp8dbg: %d optimizers were made; the models of later ones are not recorded", MOST_LOOKS)
        for model in _owners(new):
            self._known.append(weakref.ref(model))
            Pin(model, self._found)


class Pin:
    """A hook on every module of a model until the first of them is called in training."""

    def __init__(self, model: nn.Module, found: Callable[[nn.Module], None]) -> None:
        self._model, self._found = weakref.ref(model), found
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            self._handles.append(module.register_forward_pre_hook(self, prepend=True))

    def __call__(self, module: nn.Module, _: Any) -> None:
        """A call; what torch.compile is tracing it leaves, by a graph break, to plain Python."""
        if module.training and torch.is_grad_enabled():
            if torch.compiler.is_compiling():
                _trained_eagerly(self)
            else:
                self.trained()

    def trained(self) -> None:
        """The model is being trained: take the hooks off and say so."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        model = self._model()
        if handles and model is not None:
            with _harmless("this model"):
                self._found(model)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # a copy of the model gets a hook that does nothing


_trained_eagerly = _disable_dynamo(Pin.trained)


def _owners(parameters: set[int]) -> list[nn.Module]:
    """The modules that are in no other and hold some of the parameters, given by id."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    inner = {id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()}
    outer = [module for module in modules if id(module) not in inner]
    return [module for module in outer if any(id(p) in parameters for p in module.parameters())]


def _inside(model: nn.Module) -> nn.Module:
    """Attached to inside, torch.compile has not compiled anything yet."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    return model


class Attacher:
    """Attaches to one model after another: the first is recorded in ``out``, the next in ``out-2`` and so on.

    Args:
        options: those of ``launch.Options``; ``out`` and ``fallback`` (a file or None) must be among them.
        tell: takes a line for the launcher.
        known: the models that are or will be trained, as far as they are known.
    """

    def __init__(
        self,
        options: dict[str, Any],
        tell: Callable[[str], None],
        known: Callable[[], list[nn.Module]] = list,
    ) -> None:
        self._options, self._tell, self._known, self._attached = options, tell, known, 0
        self._planned_before: set[str] = set()

    def __call__(self, model: nn.Module) -> None:
        """Apply the plan, if there is one, and attach; a model without a layer that can be recorded is passed over.

        Raises:
            SystemExit: the plan cannot be applied; whoever asks for one wants no training without it.
        """
        model = _inside(model)
        adapters = import_module("fp8dbg.hooks").adapters()
        if not any(adapter.claims(module) for module in model.modules() for adapter in adapters):
            return
        applied = self._planned(model)
        self._attached += 1
        try:
            self._attach(model, self._options["out"] + (f"-{self._attached}" if self._attached > 1 else ""), applied)
        except Exception as error:
            self._tell("failed " + " ".join(f"{type(error).__name__}: {error}".split()))
            raise

    def _planned(self, model: nn.Module) -> Applied | None:
        file = self._options["fallback"]
        if not file:
            return None
        try:
            applied = planned.apply(file, model, self._known, self._planned_before)
        except Exception as error:
            detail = " ".join(f"The fallback plan {file} cannot be applied, so nothing is trained: {error}".split())
            self._tell(f"failed {detail}")
            logger.error("fp8dbg: %s", detail, exc_info=os.environ.get("FP8DBG_DEBUG") == "1")
            raise SystemExit(UsageError.exit_code) from error
        self._planned_before.update(applied.layers)
        for word in applied.words():
            self._tell(word)
        return applied

    def _attach(self, model: nn.Module, path: str, applied: Applied | None) -> None:
        from fp8dbg.recording.attach import attach

        names = ("recipe", "every", "layers", "first_step", "limits", "trigger_dump")
        asked = {name: self._options[name] for name in names if name in self._options}
        session = attach(model, path, **asked)
        for event in applied.events() if applied else ():
            session.recorder.event(*event)
        # With its model gone a session ends, and the layers it holds go too; multiprocessing's children that were
        # forked run no atexit.
        Finalize(None, weakref.finalize(model, session.close), exitpriority=0)
        self._tell(f"attached {path}")


@contextlib.contextmanager
def _harmless(what: str) -> Any:
    """An exception of ours is one line of the log."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  whatever it is, it is ours and must not reach training
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        logger.warning("fp8dbg: %s is not recorded (%s)", what, detail, exc_info=os.environ.get("FP8DBG_DEBUG") == "1")
