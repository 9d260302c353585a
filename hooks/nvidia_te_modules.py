"""The GEMM layers of each kind of Transformer Engine module: one, two, or as many as there are experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fp8dbg.hooks import nvidia_te_state as state
from fp8dbg.hooks.nvidia_te_fuser import basic_linear
from fp8dbg.hooks.nvidia_te_layers import NormedLinear, TeLayer
from fp8dbg.hooks.nvidia_te_ops import OperationLayer
from fp8dbg.recording.layer import Layer

if TYPE_CHECKING:
    from fp8dbg.recording.watch import Watch


def layers_of(name: str, path: str, module: nn.Module) -> Sequence[TeLayer]:
    """The GEMM layers of one Transformer Engine module."""
    kind, names = state.kind_of(module), state.layer_names(name, module)
    operation = basic_linear(module)
    if operation is not None:
        return (OperationLayer(name, operation, path),)
    if kind == "LayerNormMLP":
        return Fc1(names[0], module, path, state.FC1), Fc2(names[1], module, path, state.FC2)
    if kind == "GroupedLinear":
        version = state.te_version()
        slots = [state.grouped_slots(i, len(names), version) for i in range(len(names))]
        return [Expert(names[i], module, path, slots[i], i) for i in range(len(names))]
    return ((NormedLinear if kind == "LayerNormLinear" else TeLayer)(name, module, path, state.LINEAR),)


_MLP_NODES = ("_LayerNormMLPBackward",)


class Fc1(NormedLinear):
    """The first GEMM of ``te.LayerNormMLP``: its output and its gradient stay inside."""

    nodes: tuple[str, ...] = ()
    weight_names = ("fc1_weight",)
    bias_name = "fc1_bias"
    from_debug = ("activation", "output", "gradient", "dgrad", "wgrad")
    kept_as = "fc1_weight"

    def parallel_mode(self) -> str | None:
        """Where the module is split over ranks, this is its part by columns."""
        return "column" if getattr(self.module, "set_parallel_mode", False) else None

    def call(self, watch: Watch, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Hand a call over; what debug mode shows of its backward finds it."""
        if self.shown is None or self.shown_in_forward("output") is None:
            super().call(watch, args, kwargs, output)
            return
        self.notice_first(args, kwargs)
        self.notice_cast(watch)
        made = watch.forward(*self.pick(args, kwargs, output))
        if made is not None:
            self.shown.follow(made, Layer.pick(self, args, kwargs, output)[1], _MLP_NODES)

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> tuple[Any, Any]:
        """The normalised input, or its amax, and no output but what debug mode shows."""
        return super().pick(args, kwargs, output)[0], self.shown_in_forward("output")


class Fc2(TeLayer):
    """The second GEMM of ``te.LayerNormMLP``: its input stays inside."""

    nodes = _MLP_NODES
    shows_grad_input = False
    weight_names = ("fc2_weight",)
    bias_name = "fc2_bias"
    from_debug = ("activation", "dgrad")
    kept_as = "fc2_weight"

    def parallel_mode(self) -> str | None:
        """Where the module is split over ranks, this is its part by rows."""
        return "row" if getattr(self.module, "set_parallel_mode", False) else None

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> tuple[Any, Any]:
        """The module's output, and no input but what debug mode shows."""
        x = self.shown_in_forward("activation")
        return None if x is None else x.requires_grad_(), super().pick(args, kwargs, output)[1]


class Expert(TeLayer):
    """One GEMM of ``te.GroupedLinear``: a slice of the rows; one without rows in a call is not a call."""

    nodes = ()
    place_of_first = 2

    def __init__(self, name: str, module: nn.Module, path: str, slots: state.Slots, index: int) -> None:
        super().__init__(name, module, path, slots)
        self.index, self.weight_names, self.kept_as = index, (f"weight{index}",), f"weight{index}"

    def call(self, watch: Watch, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Hand this expert's rows over, and follow their part of the gradient."""
        self.notice_first(args, kwargs)
        given, out = Layer.pick(self, args, kwargs, output)
        splits = kwargs.get("m_splits", args[1] if len(args) > 1 else None)
        if splits is None or not isinstance(given, Tensor) or not isinstance(out, Tensor):
            raise ValueError("GroupedLinear was called without m_splits")
        sizes = [int(n) for n in splits]
        start, rows = sum(sizes[: self.index]), sizes[self.index]
        if not rows:
            return
        made = watch.forward(self.gemm_input(given[start : start + rows]), None)
        if made is not None and out.grad_fn is not None:
            _follow(out, start, rows, made.gradient)

    def bias(self) -> Tensor | None:
        """No output is compared, so none is needed."""
        return None


def _follow(out: Tensor, start: int, rows: int, gradient: Any) -> None:
    """Call ``gradient`` with these rows of the gradient of ``out``, when it has been computed."""
    slot = out.output_nr

    def prehook(grads: tuple[Tensor | None, ...]) -> None:
        grad = grads[slot]
        if grad is not None:
            gradient((grad[start : start + rows],))

    assert out.grad_fn is not None
    out.grad_fn.register_prehook(prehook)
