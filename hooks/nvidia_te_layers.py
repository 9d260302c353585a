"""What Transformer Engine's modules do differently from ``nn.Linear``: a ``Layer`` class per kind of GEMM layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8dbg.hooks import nvidia_te_state as state
from fp8dbg.hooks.nvidia_te_norm import CastAmax, normed
from fp8dbg.recording.layer import Gradients, Layer, ScaleInForce

if TYPE_CHECKING:
    from fp8dbg.numerics.recipes import Recipe
    from fp8dbg.recording.watch import Watch

HOST = "nvidia_te"


def layers_of(name: str, path: str, module: nn.Module) -> Sequence[TeLayer]:
    """The GEMM layers of one Transformer Engine module."""
    kind, names = state.kind_of(module), state.layer_names(name, module)
    if kind == "LayerNormMLP":
        return Fc1(names[0], module, path, state.FC1), Fc2(names[1], module, path, state.FC2)
    if kind == "GroupedLinear":
        version = state.te_version()
        slots = [state.grouped_slots(i, len(names), version) for i in range(len(names))]
        return [Expert(names[i], module, path, slots[i], i) for i in range(len(names))]
    return ((NormedLinear if kind == "LayerNormLinear" else TeLayer)(name, module, path, state.LINEAR),)


class TeLayer(Layer):
    """One GEMM layer of a Transformer Engine module; as it is, ``te.Linear``'s."""

    host = HOST
    as_given = True
    nodes: tuple[str, ...] = ("_LinearBackward",)
    gradients: tuple[int | None, int | None] = (1, 0)
    """Where among the input gradients of that node grad_input and grad_weight are."""
    weight_names: tuple[str, ...] = ()
    kept_as = "weight"
    """Name of the weight's FP8 copy among those that the module keeps from microbatch to microbatch."""
    place_of_first = 1
    """Where among the forward's arguments ``is_first_microbatch`` is."""

    def __init__(self, name: str, module: nn.Module, path: str, slots: state.Slots) -> None:
        super().__init__(name, module, path)
        self.slots = slots
        self.remembered: dict[str, ScaleInForce] | None = None
        self.keeps = False
        self._theirs: Any = None
        self._recipe: Recipe | None = None
        if int(getattr(module, "tp_size", 1)) > 1:  # type: ignore[arg-type, unused-ignore] # an int of theirs
            # Reduced over ranks after the GEMM; and under sequence parallelism input and output hold other tokens.
            self.shows_product = getattr(module, "parallel_mode", None) != "row"
            self.gemms = () if getattr(module, "sequence_parallel", False) else self.gemms

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the module's last forward; None if it ran in BF16 (calibration and a disabled autocast do)."""
        if not state.in_fp8(self.module):
            return None
        meta: Any = self.module.fp8_meta
        if meta["recipe"] is not self._theirs:
            self._theirs, self._recipe = meta["recipe"], state.recipe_of(meta["recipe"])
        return self._recipe

    def call(self, watch: Watch, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Hand a call of the module to this layer's watch."""
        self.notice_first(args, kwargs)
        watch.called(args, kwargs, output)

    def notice_first(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notice whether this call was told which microbatch it is of: then it reads, or makes, the kept copy.

        Megatron's modules tell themselves, from an attribute.
        """
        place, own = self.place_of_first, self.module.__dict__  # getattr takes microseconds to find nothing there
        told = kwargs.get("is_first_microbatch", args[place] if len(args) > place else None)
        if told is None and not own.get("disable_parameter_transpose_cache", False):
            told = own.get("is_first_microbatch")
        self.keeps = told is not None

    def kept_weight(self) -> Tensor | None:
        """The FP8 copy's values; None for a call that casts the weight anew."""
        copy = self._copy()
        return None if copy is None else _dense(copy)

    def _copy(self) -> Any:
        return self.module.__dict__.get("_fp8_workspaces", {}).get(self.kept_as) if self.keeps else None

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> tuple[Any, Any]:
        """Input and output of the GEMM."""
        given, made = super().pick(args, kwargs, output)
        return self.gemm_input(given), made

    def gemm_input(self, given: Any) -> Any:
        """What the GEMM reads, from what the module was given: its copy in the activation dtype."""
        dtype = getattr(self.module, "activation_dtype", None)
        fits = dtype is None or not isinstance(given, Tensor) or given.dtype == dtype
        return given if fits else given.to(dtype)

    def weight(self) -> Tensor | None:
        """The weight, [out, in]; one that is held in FP8 alone is there only as its FP8 values."""
        parts = [_dense(getattr(self.module, name)) for name in self._weights()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _weights(self) -> Sequence[str]:
        return self.weight_names or self.module.__dict__.get("weight_names") or ("weight",)

    def bias(self) -> Tensor | None:
        """The bias that the module adds to its output itself, or None."""
        if getattr(self.module, "apply_bias", True) and not getattr(self.module, "return_bias", False):
            found = getattr(self.module, "bias", None)
            return found if isinstance(found, Tensor) and found.numel() else None
        return None

    def results(self, node: str, gradients: tuple[Tensor | None, ...]) -> Gradients:
        """grad_input and grad_weight; a weight gradient that the GEMM adds to ``main_grad`` is not among them."""
        places = [None if place is None else gradients[place] for place in self.gradients]
        return places[0], None if getattr(self.module, "fuse_wgrad_accumulation", False) else places[1]

    def scales_now(self) -> dict[str, ScaleInForce]:
        """The forward operands' scales."""
        if not state.in_fp8(self.module):
            return {}
        return {role: state.live_scale(self.module, role, getattr(self.slots, role)) for role in ("input", "weight")}

    def scale(self, role: str) -> ScaleInForce:
        """Under delayed scaling, and for a weight held in FP8 alone, the live scale; other recipes store none."""
        weight = self.module._parameters.get(self._weights()[0]) if role == "weight" else None
        if weight is not None and type(weight) is not nn.Parameter:
            held = getattr(weight, "_scale_inv", None)
            if isinstance(held, Tensor) and held.numel() == 1:
                return held.detach().float().reciprocal().reshape(()), "live"
        if self.remembered is not None and role in self.remembered:
            found = self.remembered[role]
        else:
            found = state.live_scale(self.module, role, getattr(self.slots, role))
        return state.scale_of_copy(found, self._copy()) if role == "weight" else found


def _dense(weight: Tensor) -> Tensor:
    if not hasattr(weight, "_quantizer"):
        return weight
    values: Tensor = weight.dequantize(dtype=torch.float32)  # type: ignore[call-arg] # a tensor class of theirs
    return values


class NormedLinear(TeLayer):
    """``te.LayerNormLinear``: the GEMM reads the normalised input."""

    nodes: tuple[str, ...] = ("_LayerNormLinearBackward",)
    gradients = (None, 3)  # the gradient of the module's input has gone through the norm

    def __init__(self, name: str, module: nn.Module, path: str, slots: state.Slots) -> None:
        super().__init__(name, module, path, slots)
        self.cast_amax, self._sampled = CastAmax(), True

    def call(self, watch: Watch, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """As any other, but on unsampled steps the norm need not be computed again where its amax is at hand."""
        self._sampled = watch.recorder.sampled
        self.cast_amax.notice(self.module, self.slots.input)
        super().call(watch, args, kwargs, output)

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> tuple[Any, Any]:
        """The normalised input, or its amax alone."""
        given, made = Layer.pick(self, args, kwargs, output)
        known = None if self._sampled else self.cast_amax.of(self.module, given)
        return (self.gemm_input(given) if known is None else known), made

    def gemm_input(self, given: Any) -> Any:
        """The norm of the input, computed once more; a gradient reaches it if the norm has anything to learn."""
        norm_weight: Any = self.module.layer_norm_weight
        y = normed(self.module, super().gemm_input(given), self.recipe.name if self.recipe is not None else "")
        return y.requires_grad_(bool(given.requires_grad or norm_weight.requires_grad))


class Fc1(NormedLinear):
    """The first GEMM of ``te.LayerNormMLP``: its output and its gradient stay inside."""

    nodes: tuple[str, ...] = ()
    weight_names = ("fc1_weight",)
    kept_as = "fc1_weight"

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> tuple[Any, Any]:
        """The normalised input, or its amax, and no output."""
        return super().pick(args, kwargs, output)[0], None


class Fc2(TeLayer):
    """The second GEMM of ``te.LayerNormMLP``: its input stays inside."""

    nodes = ("_LayerNormMLPBackward",)
    gradients = (None, 5)
    weight_names = ("fc2_weight",)
    kept_as = "fc2_weight"

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> tuple[Any, Any]:
        """No input; the module's output."""
        return None, super().pick(args, kwargs, output)[1]


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
