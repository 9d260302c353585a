"""What Transformer Engine's linear modules do differently from ``nn.Linear``, as classes of ``Layer``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from fp8dbg.hooks import nvidia_te_state as state
from fp8dbg.hooks.nvidia_te_norm import CastAmax, normed
from fp8dbg.recording.layer import Gradients, Layer, ScaleInForce

if TYPE_CHECKING:
    from fp8dbg.hooks.nvidia_inspect_tap import Shown
    from fp8dbg.numerics.recipes import Recipe
    from fp8dbg.recording.recorder import Recorder
    from fp8dbg.recording.watch import Watch

HOST = "nvidia_te"


class TeLayer(Layer):
    """One GEMM layer of a Transformer Engine module; as it is, ``te.Linear``'s."""

    host = HOST
    as_given = True
    nodes: tuple[str, ...] = ("_LinearBackward",)
    shows_grad_input = True
    """Whether the gradient of the module's input is the dgrad GEMM's result: not where a norm comes before it."""
    weight_names: tuple[str, ...] = ()
    bias_name = "bias"
    from_debug: tuple[str, ...] = ()
    """What is taken from debug mode where that runs, by its names: what fusion hides from the module's hooks."""
    kept_as = "weight"
    """Name of the weight's FP8 copy among those that the module keeps from microbatch to microbatch."""
    place_of_first = 1
    """Where among the forward's arguments ``is_first_microbatch`` is."""

    def __init__(self, name: str, module: nn.Module, path: str, slots: state.Slots) -> None:
        super().__init__(name, module, path)
        self.slots = slots
        self.remembered: dict[str, ScaleInForce] | None = None
        self.shown: Shown | None = None
        self.keeps = False
        self.gathered: str | None = None
        """The operand of which other ranks hold tokens too."""
        self._theirs: Any = None
        self._recipe: Recipe | None = None
        if int(getattr(module, "tp_size", 1)) > 1:  # type: ignore[arg-type, unused-ignore] # an int of theirs
            self.share(self.parallel_mode(), bool(getattr(module, "sequence_parallel", False)))

    def parallel_mode(self) -> str | None:
        """How the weight is split over ranks: "row" or "column"."""
        mode: Any = getattr(self.module, "parallel_mode", None)
        return mode or None

    def share(self, mode: str | None, sequence_parallel: bool) -> None:
        """Note that the layer is one of several ranks': ``mode`` is "row" or "column".

        A product of rows, and the gradient that columns hand on, are summed up over ranks after the GEMM; under
        sequence parallelism input and output hold other tokens, and what is gathered, current scaling casts with a
        scale for all ranks' tokens.
        """
        self.shows_product = mode != "row"
        self.shows_dgrad = mode != "column" or not self.shows_grad_input
        if sequence_parallel:
            self.gemms = ()
            self.gathered = {"column": "input", "row": "grad_output"}.get(mode or "")

    def reduces(self) -> bool:
        """Whether ranks whose parts of an operand are gathered agree on the scale of its cast."""
        return True

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the module's last forward; None if it ran in BF16 (calibration and a disabled autocast do)."""
        if not state.in_fp8(self.module):
            return None
        meta = state.meta_of(self.module, "input")
        if meta["recipe"] is not self._theirs:
            self._theirs, self._recipe = meta["recipe"], state.recipe_of(meta["recipe"])
        return self._recipe

    def left_out(self) -> str | None:
        """What the recipe in force does that the measured casts do not; None: nothing."""
        return state.left_out(self._theirs) if self.recipe is not None else None

    def facts(self) -> dict[str, Any]:
        """Before its first forward nobody knows which GEMMs will run in BF16."""
        unknown: dict[str, Any] = {} if state.has_run(self.module) else {"bf16_gemms": []}
        return super().facts() | unknown

    def recipe_of(self, gemm: str) -> Recipe | None:
        """The recipe; None for a GEMM that the recipe, or debug mode as it was seen, keeps in high precision."""
        if self.shown is not None and gemm in self.shown.in_high_precision:
            return None
        found = self.recipe
        if gemm != "fprop" and found is not None and getattr(self._theirs, "backward_override", None) is not None:
            return None
        return found

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
        return None if copy is None else dense(copy)

    def _copy(self) -> Any:
        copy = self.module.__dict__.get("_fp8_workspaces", {}).get(self.kept_as) if self.keeps else None
        return getattr(copy, "rowwise_gemm_tensor", copy)  # in debug mode it holds one for each direction

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> tuple[Any, Any]:
        """Input and output of the GEMM."""
        given, made = super().pick(args, kwargs, output)
        return self.gemm_input(given), made

    def gemm_input(self, given: Any) -> Any:
        """What the GEMM reads, from what the module was given: its copy in the activation dtype."""
        dtype = getattr(self.module, "activation_dtype", None)
        fits = dtype is None or not isinstance(given, Tensor) or given.dtype == dtype
        return given if fits else given.to(dtype)

    def shown_in_forward(self, tensor_name: str) -> Tensor | None:
        """A tensor that debug mode has shown in this forward, or None."""
        return None if self.shown is None else self.shown.forward.get(tensor_name)

    def weight(self) -> Tensor | None:
        """The weight, [out, in]; one that is held in FP8 alone is there only as its FP8 values."""
        parts = [dense(getattr(self.module, name)) for name in self._weights()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _weights(self) -> Sequence[str]:
        return self.weight_names or self.module.__dict__.get("weight_names") or ("weight",)

    def bias(self) -> Tensor | None:
        """The bias that the module adds to its output itself, or None."""
        if getattr(self.module, "apply_bias", True) and not getattr(self.module, "return_bias", False):
            found = getattr(self.module, self.bias_name, None)
            return found if isinstance(found, Tensor) and found.numel() else None
        return None

    def reader(self, node: Node) -> Callable[[tuple[Tensor | None, ...]], Gradients]:
        """Which gradient is whose is found by the parameters behind the node: its arguments differ with the version.

        Within a version they also differ with the norm, the bias and cached weights: what is no tensor is not counted.
        """
        mine = [getattr(self.module, name) for name in self._weights()]
        behind = [getattr(edge, "variable", None) for edge, _ in node.next_functions]
        place = next((i for i, held in enumerate(behind) if len(mine) == 1 and held is mine[0]), None)
        own = [id(parameter) for parameter in self.module._parameters.values()]
        return functools.partial(self._results, place, [held is not None and id(held) in own for held in behind])

    def _results(self, place: int | None, held: list[bool], gradients: tuple[Tensor | None, ...]) -> Gradients:
        """grad_input and grad_weight; a weight gradient that the GEMM adds to ``main_grad`` is not among them."""
        fused = place is None or getattr(self.module, "fuse_wgrad_accumulation", False)
        grad_weight = None if fused else gradients[place or 0]
        if self.shows_grad_input:
            others = [g for g, parameter in zip(gradients, held, strict=False) if g is not None and not parameter]
            return next((g for g in others if g.ndim > 1), None), grad_weight
        return (None if self.shown is None else self.shown.backward.pop("dgrad", None)), grad_weight

    def scales_now(self) -> dict[str, ScaleInForce]:
        """The forward operands' scales."""
        if not state.in_fp8(self.module):
            return {}
        return {role: state.live_scale(self.module, role, getattr(self.slots, role)) for role in ("input", "weight")}

    def scale(self, role: str) -> ScaleInForce:
        """Under delayed scaling, and for a weight held in FP8 alone, the live scale; other recipes store none."""
        if self.shown is not None and role in self.shown.scales:
            return self.shown.scales[role], "live"
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


def dense(tensor: Any) -> Tensor:
    """The values of a tensor, which may be one of Transformer Engine's in FP8."""
    values: Tensor = tensor.dequantize(dtype=torch.float32) if hasattr(tensor, "_quantizer") else tensor
    return values


_ONE_SCALE = ("current", "current_pow2", "nvfp4")
"""Recipes that take a tensor's scale from the tensor itself."""

_REDUCED = (
    "Its {} is gathered from several ranks, and cast with a scale for the largest amax among them: the scale and the "
    "figures here are for this rank's own. The ranks' rows together hold that amax."
)

_APART = (
    "Its {} is gathered from several ranks; each has cast its part with a scale of its own, and reads all of them with "
    "that one: no group to reduce amaxes over was given as tensor_parallel_group. What that costs is not measured."
)
"""Transformer Engine 2.20's te.ops without that argument, although its documentation says that it means all ranks."""


class Told:
    """What has been said of the run's recipes: each thing once a session, whatever the number of layers."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self._said = recorder, set[tuple[str | None, str]]()

    def of(self, layer: TeLayer) -> None:
        """Say what the recipe in force does that is not measured."""
        self._say(None, layer.left_out())
        recipe = layer.recipe
        unseen = layer.gathered is not None and (layer.shown is None or layer.gathered == "grad_output")
        if unseen and recipe is not None and recipe.name in _ONE_SCALE:
            self._say(layer.name, (_REDUCED if layer.reduces() else _APART).format(layer.gathered))

    def _say(self, layer: str | None, sentence: str | None) -> None:
        if sentence is not None and (layer, sentence) not in self._said:
            self._said.add((layer, sentence))
            self.recorder.event("gap", layer, sentence)


class NormedLinear(TeLayer):
    """``te.LayerNormLinear``: the GEMM reads the normalised input."""

    nodes: tuple[str, ...] = ("_LayerNormLinearBackward",)
    shows_grad_input = False
    from_debug: tuple[str, ...] = ("activation", "dgrad")

    def __init__(self, name: str, module: nn.Module, path: str, slots: state.Slots) -> None:
        super().__init__(name, module, path, slots)
        self.cast_amax, self._sampled = CastAmax(), True

    def call(self, watch: Watch, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """As any other, but on unsampled steps the norm need not be computed again where its amax is at hand."""
        self.notice_cast(watch)
        super().call(watch, args, kwargs, output)

    def notice_cast(self, watch: Watch) -> None:
        """Notice the amax that this call's cast has left."""
        self._sampled = watch.recorder.sampled
        self.cast_amax.notice(self.module, self.slots.input)

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> tuple[Any, Any]:
        """The normalised input, or its amax alone."""
        given, made = Layer.pick(self, args, kwargs, output)
        known = None if self._sampled else self.cast_amax.of(self.module, given)
        return (self.gemm_input(given) if known is None else known), made

    def gemm_input(self, given: Any) -> Any:
        """The norm of the input, computed once more; a gradient reaches it if the norm has anything to learn."""
        norm_weight: Any = self.module.layer_norm_weight
        y = self.shown_in_forward("activation")
        if y is None:
            y = normed(self.module, super().gemm_input(given), self.recipe.name if self.recipe is not None else "")
        return y.requires_grad_(bool(given.requires_grad or norm_weight.requires_grad))
