"""Everything about one host library in one place. This docstring is the contract of an adapter.

An adapter is a file of this folder with

``HOST``
    The name that rows carry: "pytorch", "nvidia_te", "torchao_float8", ...

``claims(module) -> bool``
    Whether this host's own knowledge is needed to record the module. Cheap; imports no host: a module of a library
    that is not imported cannot exist.

``attach(model, recorder) -> handle``
    Announce the layers and hook them; ``handle.remove()`` takes everything off. See below.

``apply_fallback(model, plan) -> list[str]``
    Make a plan (``fp8dbg.analysis.plan.Plan``) hold in a live model; a sentence for each thing that this host cannot
    do. A layer that is none of this host's raises UnknownNameError before anything is changed.

``write_fallback(plan) -> str``
    The same as the host's own configuration, for a machine that lacks the host.

``layer_names(name, module) -> tuple[str, ...]`` (optional)
    Where one module holds several layers: their names.

A host library is imported inside functions only. Files without ``claims`` (trainer callbacks, helpers) are no adapters.
Adapters are asked in alphabetical order, ``pytorch``, which fits every linear layer, last.

How an adapter attaches
-----------------------
For each module that it claims (``attach_each``) it makes a ``Layer`` (``fp8dbg.recording.layer``): a subclass that says
what its host does differently: ``recipe`` and ``recipe_of(gemm)`` in force, ``scale(role)``, ``weight()``, ``bias()``,
``pick(args, kwargs, output)`` and, to see grad_input and grad_weight, ``nodes`` and ``results(node, gradients)``. Then
either

- ``handle = recorder.hook(layer)``: the module's call is the layer's call, ``pick`` finds its tensors; or
- ``watch = recorder.watch(layer)``, and hooks of its own that call ``watch.forward(input, output, weight=None)`` for
  each call of each layer: several layers in one module, inputs that have to be recomputed, weights that are arguments.
  It returns the ``Call``, or None when this pass is not recorded. Where the output carries no autograd node, the
  adapter brings the gradient itself: ``call.gradient((grad_output,))``.

What an adapter never has to do: tell training from evaluation, recomputation from a first pass, guard itself against
its own exceptions inside ``Layer`` methods, count steps or calls. What it may do, where the host knows better:
``recorder.begin_microbatch(index)`` (pipeline schedules), ``recorder.end_step()`` (its own optimizer), and
``recorder.event(kind, layer, detail)`` to say what is not seen. It never calls a collective, never draws a random
number, and never keeps a tensor.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from fp8dbg.errors import UnknownNameError, UsageError
from fp8dbg.hooks.plans import GEMMS
from fp8dbg.numerics.recipes import recipe_named

if TYPE_CHECKING:
    from torch import nn

    from fp8dbg.hooks.plans import Plan
    from fp8dbg.recording.recorder import Recorder


class Handle(Protocol):
    """What ``attach`` returns."""

    def remove(self) -> None:
        """Take every hook off; twice does nothing."""


class Handles:
    """Several handles as one."""

    def __init__(self, handles: Iterable[Handle] = ()) -> None:
        self._handles = list(handles)

    def remove(self) -> None:
        """Remove all, the last first."""
        while self._handles:
            self._handles.pop().remove()


def attach_each(
    model: nn.Module,
    recorder: Recorder,
    claims: Callable[[nn.Module], bool],
    one: Callable[[str, str, nn.Module], Handle],
) -> list[Handle]:
    """``one(name, path, module)`` for each unclaimed module that fits: it announces and hooks the module's layers.

    A module at which it raises costs itself alone: an event says so, and no other adapter takes it for something else.
    """
    handles: list[Handle] = []
    for name, path, module in list(recorder.unclaimed(model, claims)):
        try:
            handles.append(one(name, path, module))
        except Exception as error:  # noqa: BLE001  a layer we cannot read must not stop the training
            recorder.give_up(name, module, error)
    return handles


class Adapter(Protocol):
    """An adapter, as the module's docstring describes it."""

    HOST: str

    def claims(self, module: nn.Module) -> bool:
        """Whether the module is this host's."""

    def attach(self, model: nn.Module, recorder: Recorder) -> Handle:
        """Announce and hook the layers."""

    def apply_fallback(self, model: nn.Module, plan: Plan) -> list[str]:
        """Make a plan hold in a live model; what it cannot do, in sentences."""

    def write_fallback(self, plan: Plan) -> str:
        """The plan as the host's own configuration."""


class Writer(Protocol):
    """A file that writes plans; it imports no torch."""

    def write_fallback(self, plan: Plan, **recipe: str) -> str:
        """The plan as the host's own configuration; some hosts' name the run's ``recipe``."""


WRITERS = {
    "huggingface": "huggingface_fallback",
    "megatron": "megatron_fallback",
    "nemo_lightning": "nemo_fallback",
    "nvidia_te": "nvidia_te_fallback",
    "pytorch": "pytorch_fallback",
    "torchao_float8": "torchao_float8_fallback",
}
"""Host -> the file that writes a plan for it: every adapter's, and those of trainers that have no own layers."""


def writer(host: str) -> Writer:
    """What writes a plan for a host, without torch, which takes longer to import than a plan to be made.

    Raises:
        UnknownNameError: nothing does; the message lists the hosts.
    """
    if host not in WRITERS:
        raise UnknownNameError("host", host, list(WRITERS))
    found: Any = import_module(f"{__name__}.{WRITERS[host]}")
    written: Writer = found
    return written


def adapters() -> list[Adapter]:
    """Every adapter, the general one last."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "pytorch")
    modules: list[Any] = [import_module(f"{__name__}.{name}") for name in [*names, "pytorch"]]
    return [m for m in modules if hasattr(m, "claims")]


def adapter(host: str) -> Adapter:
    """The adapter of a host.

    Raises:
        UnknownNameError: there is none of that name; the message lists them.
    """
    found = {a.HOST: a for a in adapters()}
    if host not in found:
        raise UnknownNameError("host", host, list(found))
    return found[host]


def apply_fallback(model: nn.Module, plan: Plan) -> list[str]:
    """Make a plan hold in a live model, without a change to its code; before its first step or between steps.

    Each layer's own host applies what the plan says of it. Layers that run in BF16 already stay as they are.

    Returns:
        A sentence for each thing that a host cannot do.

    Raises:
        UnknownNameError: a layer of the plan is not in the model, or a GEMM or recipe does not exist; nothing has been
            changed.
        UsageError: this is no model or no plan.
    """
    from fp8dbg.numerics.arguments import a_module  # brings torch, which writing a plan does without

    found, owner = adapters(), layers_of(a_module(model))
    for entry in _entries(plan):
        if entry.layer not in owner:
            raise UnknownNameError("layer", entry.layer, list(owner))
        for gemm in entry.gemms:
            if gemm not in GEMMS:
                raise UnknownNameError("GEMM", gemm, list(GEMMS))
        recipe_named(entry.recipe)
    parts = {a.HOST: _Part([entry for entry in plan.entries if owner[entry.layer] == a.HOST]) for a in found}
    return [said for a in found if parts[a.HOST].entries for said in a.apply_fallback(model, parts[a.HOST])]


def _entries(plan: object) -> list[Any]:
    entries: Any = getattr(plan, "entries", None)
    if not isinstance(entries, (list, tuple)):
        raise UsageError(f"A {type(plan).__name__} is no plan.", "Give run.plan() or Plan.from_json(text).")
    return list(entries)


def layers_of(model: nn.Module) -> dict[str, str]:
    """Every layer of a model by the name it is recorded under, and its host."""
    from fp8dbg.hooks.megatron_names import global_names
    from fp8dbg.recording.names import named_layers

    found, rename, owner = adapters(), global_names(model), dict[str, str]()
    for name, _, module in named_layers(model):
        host = next((a for a in found if a.claims(module)), None)
        if host is not None:
            several: Any = getattr(host, "layer_names", None)
            names = several(rename(name), module) if several else (rename(name),)
            owner |= dict.fromkeys(names, host.HOST)
    return owner


class _Part:
    """The entries of a plan that are one host's."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries = entries
