"""Linears of ``te.ops`` (``Linear``, ``BasicLinear``), alone or within a ``Sequential``, as their fuser runs them.

What a GEMM reads is seen as it arrives. Where the operation before has cast it to FP8 already, a norm, an activation or
an activation's gradient is computed once more, on measured steps (on a GPU its last bit may differ from the fused
kernel's); a bias hands its gradient on. What stays inside a fusion all the same is left out and said in ``events``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8dbg.hooks import Handle
from fp8dbg.hooks import nvidia_te_fuser as fuser
from fp8dbg.hooks import nvidia_te_state as state
from fp8dbg.hooks.nvidia_te_layers import TeLayer, Told, dense
from fp8dbg.hooks.nvidia_te_norm import norm
from fp8dbg.recording.guard import guarded

if TYPE_CHECKING:
    from fp8dbg.recording.calls import Call
    from fp8dbg.recording.layer import Gradients
    from fp8dbg.recording.watch import Watch

SLOTS = state.Slots(0, 1, 0)

_PRODUCTS = ("BasicLinear", "ForwardLinearBiasActivation")
"""What hands on the GEMM's own product, plus at most a bias: the operation, and one fusion."""

_ADDS_UP = {"BackwardLinearAdd"}
"""A fusion whose grad_weight is the GEMM's, and whose grad_input holds another gradient too."""

_AGAIN = "Its {} is cast to FP8 inside {}: it is computed once more on measured steps, and has no amax on the others."

_HIDDEN = "Its {} is cast to FP8 inside {}, which hands nothing else on: it is not measured."

_OUTPUT = "Its output is what {} hands on, not the FP8 GEMM's own result: that is not compared."

_RESULTS = "The products of its backward are not handed on by {}: they are not compared."


class OperationLayer(TeLayer):
    """The GEMM layer of one ``BasicLinear``."""

    def __init__(self, name: str, operation: nn.Module, path: str) -> None:
        super().__init__(name, operation, path, SLOTS)
        self.called = self.hands_on = False
        self._bias: Tensor | None = None
        own: Any = operation
        if own.tensor_parallel_size > 1:
            self.share(own.tensor_parallel_mode, own.sequence_parallel)
        self._reduced = not self.shows_product

    def facts(self) -> dict[str, Any]:
        """Before its first forward nobody knows which GEMMs will run in BF16."""
        return super().facts() | ({} if self.called else {"bf16_gemms": []})

    def reduces(self) -> bool:
        """Version 2.8 asks its quantizers to reduce; 2.20 only where it is given a group."""
        own: Any = self.module
        if own.tensor_parallel_group is not None:
            return True
        quantizer = own.get_quantizer("forward" if self.gathered == "input" else "backward", 0)
        return bool(getattr(quantizer, "with_amax_reduction", False))

    def run_by(self, operation: Any, output: Any) -> None:
        """Notice what runs this call, which may add a bias, and whether what it hands on is the product."""
        self.called = True
        others = operation.basic_ops[1:] if type(operation).__name__ in _PRODUCTS and operation.is_fused_op else ()
        self._bias = next((op.bias for op in others if type(op).__name__ == "Bias"), None)
        self.hands_on = type(operation).__name__ in _PRODUCTS and fuser.plain(output)
        self.shows_product = self.hands_on and not self._reduced

    def bias(self) -> Tensor | None:
        """The bias that the fusion which runs this call adds."""
        return self._bias

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> tuple[Any, Any]:
        """Input and output as the fuser's wrapper gave them."""
        return args[0], output


class OperationTap:
    """Records one ``BasicLinear``; a call waits for its gradient in the context that the fuser keeps for it."""

    def __init__(self, layer: OperationLayer, watch: Watch, told: Told) -> None:
        self.layer, self.watch, self.recorder, self.told = layer, watch, told.recorder, told
        self.off: set[str] = set()
        self._grad_enabled, self._told = True, set[str]()
        self._key = f"fp8dbg_call_{id(self)}"

    def lost(self, what: str, error: Exception) -> None:
        """Record that something of this layer is no longer seen."""
        self.recorder.lost_at(self.layer.name, what, error)

    def measures(self) -> bool:
        """Whether this step is measured in full."""
        return self.recorder.sampled and not self.recorder.paused

    def called(self, grad_enabled: bool) -> None:
        """Inside the fuser's autograd function gradients are off, whatever they are outside of it."""
        self._grad_enabled = grad_enabled

    @guarded("its calls")
    def forward(self, run_by: nn.Module, context: Any, given: Any, output: Any, made: fuser.Made | None) -> None:
        """A forward of the layer, of whatever pass."""
        self.layer.run_by(run_by, output)
        if self.recorder.sampled:
            self.told.of(self.layer)
        x = given if fuser.plain(given) else self._input_before_cast(made)
        if not self.layer.hands_on:
            self._tell("output", _OUTPUT.format(type(run_by).__name__))
        with torch.set_grad_enabled(self._grad_enabled):
            wanted = None if x is None else x.detach().requires_grad_(bool(context.requires_grad))
            call = self.watch.forward(wanted, dense(output).detach())
        if call is not None and context.requires_grad:
            setattr(context, self._key, call)
            if call.probe is not None:
                call.probe.shadows.real_to_come = True

    def _input_before_cast(self, made: fuser.Made | None) -> Tensor | None:
        """The input that has come in FP8, on measured steps; None where it cannot be had, which is said."""
        if not self.measures():
            return None
        found = None if made is None else _before_cast(made, self.layer)
        self._tell_of("input", "the operation before", made, found is not None)
        return found

    @guarded("its gradients")
    def gradient(self, context: Any, gradient: Any, made: fuser.Made | None) -> None:
        """The gradient is about to be read by the backward GEMMs."""
        call: Call | None = getattr(context, self._key, None)
        if call is None or call.watch.recorder.paused:
            return
        if fuser.plain(gradient):
            call.gradient((gradient,))
            return
        if made is not None and type(made.operation).__name__ == "Bias":
            call.gradient((made.given,))
        elif self.measures():
            found = None if made is None or made.context is None else _gradient_before_cast(made)
            self._tell_of("grad_output", "the operation after", made, found is not None)
            call.gradient((found,))

    @guarded("its grad_input and grad_weight")
    def results(self, run_by: nn.Module, context: Any, grad_input: Any, grad_weight: Any) -> None:
        """The backward GEMMs are done."""
        call: Call | None = vars(context).pop(self._key, None)
        if call is None or call.probe is None:
            return
        name, accumulates = type(run_by).__name__, getattr(self.layer.module, "_accumulate_into_main_grad", False)
        whole, parts = name == "BasicLinear", name == "BasicLinear" or name in _ADDS_UP
        if not parts:
            self._tell("results", _RESULTS.format(name))
        call.read = _as_they_are
        dgrad = grad_input if whole and fuser.plain(grad_input) else None
        call.results((dgrad, grad_weight if parts and not accumulates else None), None)

    def _tell_of(self, role: str, unknown: str, made: fuser.Made | None, again: bool) -> None:
        by = unknown if made is None else type(made.operation).__name__
        self._tell(role, (_AGAIN if again else _HIDDEN).format(role, by))

    def _tell(self, what: str, sentence: str) -> None:
        """Once a layer."""
        if what not in self._told:
            self._told.add(what)
            self.recorder.event("gap", self.layer.name, sentence)


def _as_they_are(gradients: tuple[Tensor | None, ...]) -> Gradients:
    return gradients[0], gradients[1]


def _before_cast(made: fuser.Made, layer: OperationLayer) -> Tensor | None:
    """What an operation has cast, computed once more; None for one that is not known.

    A norm reads everything in its dtype; under delayed scaling it casts its float32 value itself, elsewhere that is
    rounded to its dtype first.
    """
    operation: Any = made.operation
    name = type(operation).__name__
    if name in ("LayerNorm", "RMSNorm"):
        if operation.weight.ndim != 1:
            return None
        dtype = _working_dtype(operation)
        bias = operation.bias.to(dtype) if name == "LayerNorm" else None
        y = norm(made.given.to(dtype), operation.weight.to(dtype), bias, operation.eps, operation.zero_centered_gamma)
        fused = layer.recipe is not None and layer.recipe.name == "delayed"
        return y if fused else y.to(dtype)
    if fuser.is_activation(operation):
        context = type("Context", (), {"requires_grad": False})()
        with torch.no_grad():
            again = operation.op_forward(context, made.given.detach(), None, None)
        return again if fuser.plain(again) else None
    return None


def _gradient_before_cast(made: fuser.Made) -> Tensor | None:
    """What an activation's backward has cast, or that of one fused with a bias before it, computed once more."""
    operation: Any = made.operation
    activation = operation.basic_ops[-1] if operation.is_fused_op else operation
    with torch.no_grad():
        again: Tensor = activation.op_backward(made.context, made.given)[0]
    return again


def _working_dtype(operation: Any) -> torch.dtype:
    if torch.is_autocast_enabled():
        return torch.get_autocast_dtype("cuda")
    dtype: torch.dtype = operation.weight.dtype
    return dtype


class _Listening:
    """The handle of a tap that listens."""

    def __init__(self, operation: nn.Module, tap: OperationTap) -> None:
        self._operation, self._tap = operation, tap
        fuser.listen(operation, tap)

    def remove(self) -> None:
        """Listen no more."""
        fuser.unlisten(self._operation, self._tap)


def attach_operation(layer: OperationLayer, told: Told) -> Handle:
    """Record a linear of ``te.ops``; the handle undoes it."""
    return _Listening(layer.module, OperationTap(layer, told.recorder.watch(layer), told))
