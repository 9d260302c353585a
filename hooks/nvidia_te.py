"""Transformer Engine: Linear, LayerNormLinear, LayerNormMLP (fc1 and fc2 apart), GroupedLinear, and te.ops' linears.

The default route needs no debug mode: a forward hook sees what goes in and comes out in high precision, reads the
scale in force before Transformer Engine updates it (an outermost autocast updates when it is left, after the module's
hooks), and the cast is emulated by the kernels' formula. What fusion hides is left out and said once in ``events``:
the input of fc2 and the gradient at fc1 never leave LayerNormMLP's kernels. The norm inside LayerNormLinear and
LayerNormMLP is computed once more; on a GPU its last bit may differ from the fused kernel's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8dbg.hooks import Handle, Handles, attach_each, nvidia_inspect
from fp8dbg.hooks import nvidia_te_state as state
from fp8dbg.hooks.megatron_names import global_names
from fp8dbg.hooks.nvidia_inspect_tap import WARNING, inspect
from fp8dbg.hooks.nvidia_te_apply import apply_fallback
from fp8dbg.hooks.nvidia_te_fallback import write_fallback
from fp8dbg.hooks.nvidia_te_fuser import OPERATIONS, basic_linear
from fp8dbg.hooks.nvidia_te_layers import HOST, TeLayer, Told
from fp8dbg.hooks.nvidia_te_modules import layers_of
from fp8dbg.hooks.nvidia_te_ops import OperationLayer, attach_operation
from fp8dbg.hooks.nvidia_te_state import layer_names
from fp8dbg.hooks.versions import tell_version
from fp8dbg.recording.guard import guarded
from fp8dbg.recording.layer import ScaleInForce
from fp8dbg.recording.names import named_layers

if TYPE_CHECKING:
    from fp8dbg.recording.recorder import Recorder
    from fp8dbg.recording.watch import Watch

__all__ = ["HOST", "apply_fallback", "attach", "claims", "layer_names", "write_fallback"]

_HIDDEN = (
    "LayerNormMLP keeps the input of fc2 and the gradient at fc1 inside its kernels: neither is measured on this "
    "route; Transformer Engine's debug mode shows them: fp8dbg.hooks.nvidia_inspect.start()."
)

_GROUPED = "A grouped linear of te.ops is run by its fuser, which calls no hooks: it is not recorded."


def claims(module: nn.Module) -> bool:
    """Whether the module is one of Transformer Engine's GEMM modules. Imports nothing."""
    return state.kind_of(module) is not None


def attach(model: nn.Module, recorder: Recorder) -> Handles:
    """Watch every Transformer Engine GEMM module of the model; the handle undoes it."""
    rename = global_names(model)
    inner = {id(op) for m in model.modules() if (op := basic_linear(m)) is not None and op is not m}

    told = Told(recorder)

    def one(name: str, path: str, module: nn.Module) -> Handle:
        return _attach_one(module, layers_of(rename(name), path, module), told)

    handles = attach_each(model, recorder, lambda module: claims(module) and id(module) not in inner, one)
    unseen = [name for name, _, module in named_layers(model) if _is_grouped_operation(module)]
    for name in unseen:
        recorder.event("gap", rename(name), _GROUPED)
    if handles and nvidia_inspect.running():
        recorder.event("route", None, WARNING)
    if handles or unseen:
        tell_version(recorder, "Transformer Engine", state.te_version())
    return Handles(handles)


def _is_grouped_operation(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "GroupedLinear" and kind.__module__.startswith(OPERATIONS)


def _attach_one(module: nn.Module, layers: Sequence[TeLayer], told: Told) -> Handle:
    recorder = told.recorder
    if isinstance(layers[0], OperationLayer):
        return attach_operation(layers[0], told)
    exact = nvidia_inspect.running()
    if state.kind_of(module) == "LayerNormMLP" and not exact:
        recorder.event("gap", layers[0].name.removesuffix(".fc1"), _HIDDEN)
    tap = _Tap(layers, [recorder.watch(layer) for layer in layers], told)
    handle = module.register_forward_hook(tap.on_forward, with_kwargs=True, prepend=True)
    return Handles([handle, inspect(module, layers, recorder)]) if exact else handle


class _Tap:
    """The forward hook of one module, which may hold several layers.

    Under Transformer Engine's reentrant checkpointing the pass that is recorded is the second, and by the time its
    hooks run the scales of the first are gone again; so the first pass, which is seen here too, puts them aside.
    Transformer Engine itself takes them back first in, first out.
    """

    def __init__(self, layers: Sequence[TeLayer], watches: Sequence[Watch], told: Told) -> None:
        self.layers, self.watches, self.recorder, self.told = layers, watches, told.recorder, told
        self.off: set[str] = set()
        self.owed: deque[list[dict[str, ScaleInForce]]] = deque(maxlen=1024)

    def lost(self, what: str, error: Exception) -> None:
        """Record that something of this module is no longer seen."""
        self.recorder.lost_at(self.layers[0].name, what, error)

    @guarded("its calls")
    def on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """A call of the module, of whatever pass."""
        if not torch.is_grad_enabled() and module.training:
            self.owed.append([layer.scales_now() for layer in self.layers])
            remembered = None
        elif state.recompute_phase():
            remembered = self.owed.popleft() if self.owed else None
        else:
            self.owed.clear()
            remembered = None
        if self.recorder.sampled:
            for layer in self.layers:
                self.told.of(layer)
        for i, (layer, watch) in enumerate(zip(self.layers, self.watches, strict=True)):
            layer.remembered = remembered[i] if remembered is not None else None
            layer.call(watch, args, kwargs, output)
            if layer.shown is not None:
                layer.shown.forward.clear()
