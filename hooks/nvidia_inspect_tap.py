"""What debug mode shows of one Transformer Engine module, put where its layers find it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8dbg.hooks import Handles, nvidia_inspect
from fp8dbg.hooks import nvidia_te_state as state
from fp8dbg.numerics.census import amax_of
from fp8dbg.recording.extents import extent_of
from fp8dbg.recording.guard import guarded
from fp8dbg.recording.tensors import gemm_node, undisturbed

if TYPE_CHECKING:
    from fp8dbg.hooks.nvidia_te_layers import TeLayer
    from fp8dbg.numerics.recipes import Recipe
    from fp8dbg.recording.calls import Call
    from fp8dbg.recording.layer import Gradients
    from fp8dbg.recording.recorder import Recorder

ROLES = {
    "activation": "input",
    "weight": "weight",
    "gradient": "grad_output",
    "output": "output",
    "dgrad": "grad_input",
    "wgrad": "grad_weight",
}
"""Debug mode's names of tensors, and fp8dbg's."""

READERS = {"activation": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "gradient": ("dgrad", "wgrad")}
"""Which GEMM reads a tensor along rows, and which along columns."""

WARNING = (
    "Measured steps run in Transformer Engine's debug mode (the exact route). There norms, activations and casts are "
    "not fused, and a norm's output is rounded to BF16 before it is cast: those steps do not compute exactly what the "
    "steps between them do. No CUDA graphs, no userbuffer overlap in them."
)


class Shown:
    """What debug mode has shown of one layer: in the forward that runs, and in the backward that runs."""

    def __init__(self) -> None:
        self.forward: dict[str, Tensor] = {}
        self.backward: dict[str, Tensor] = {}
        self.scales: dict[str, Tensor] = {}
        self.in_high_precision: set[str] = set()
        self.call: Call | None = None
        self.told = self.gradient_seen = False

    def follow(self, call: Call, output: Any, nodes: tuple[str, ...]) -> None:
        """Bring a call the gradient and the results that only debug mode shows.

        Args:
            call: of a layer whose output never leaves its module.
            output: the module's output; the gradient and the results come by while its node runs.
            nodes: names of that node.
        """
        found = gemm_node(output.grad_fn, nodes) if getattr(output, "grad_fn", None) is not None else None
        if found is None:
            return

        def begin(_: Any) -> None:
            self.call, self.gradient_seen = call, False
            self.backward.clear()

        def end(_: Any, __: Any) -> None:
            self.call, call.read = None, _as_they_are
            call.results((self.backward.pop("dgrad", None), self.backward.pop("wgrad", None)), None)

        found[0].register_prehook(begin)
        if call.probe is not None:
            call.probe.shadows.real_to_come = True
            found[0].register_hook(end)


def _as_they_are(gradients: tuple[Tensor | None, ...]) -> Gradients:
    return gradients[0], gradients[1]


class Inspection:
    """Wakes debug mode for a module on measured steps, and takes what it shows."""

    def __init__(self, module: nn.Module, layers: Sequence[TeLayer], recorder: Recorder) -> None:
        self.module, self.layers, self.recorder = module, layers, recorder
        self.off: set[str] = set()
        for layer in layers:
            layer.shown = Shown()

    def lost(self, what: str, error: Exception) -> None:
        """Record that something of this module is no longer seen."""
        self.recorder.lost_at(self.layers[0].name, what, error)

    def place_of(self, debug_name: str) -> int | None:
        """Which of the layers that is; an unnamed module is given its name in its first call."""
        name = getattr(self.module, "name", None)
        if not isinstance(name, str) or not debug_name.startswith(name):
            return None
        names = state.layer_names(name, self.module)
        return names.index(debug_name) if debug_name in names else None

    def wanted(self) -> bool:
        """On measured steps, in training."""
        recorder = self.recorder
        return recorder.sampled and not recorder.paused and self.module.training and not self.off

    @guarded("debug mode on its measured steps")
    def before(self, module: Any, _: Any) -> None:
        """A forward pre-hook: in which iteration debug mode runs next is asked of features only while it runs."""
        for layer in self.layers:
            if layer.shown is not None:
                layer.shown.forward.clear()
                layer.shown.scales.clear()
                layer.shown.in_high_precision.clear()
        if self.wanted():
            module.next_iter_when_debug_should_be_run = 0
        if self.wanted() or module.next_iter_when_debug_should_be_run is None:  # and no other feature wants it
            module.debug_last_iteration = None  # have it decided anew: its own count may stand still

    @guarded("what debug mode shows")
    def inspected(self, place: int, tensor_name: str, tensor: Tensor | None, casts: tuple[Any, Any]) -> None:
        """A tensor of a layer and its casts; it is kept until the end of the module's forward or backward."""
        layer = self.layers[place]
        shown, wanted = layer.shown, layer.from_debug
        if shown is None or not self.wanted() or tensor is None:
            return
        self._tell(layer, shown)
        with undisturbed(tensor):
            self._note_scale(layer, shown, ROLES[tensor_name], tensor, casts[0])
        for gemm, cast in zip(READERS.get(tensor_name, ()), casts, strict=False):
            if isinstance(cast, Tensor) and not hasattr(cast, "_quantizer"):  # another feature keeps this GEMM exact
                shown.in_high_precision.add(gemm)
        if tensor_name not in wanted:
            return
        if tensor_name in ("activation", "output"):
            shown.forward[tensor_name] = tensor.detach()
        elif tensor_name == "gradient":
            shown.gradient_seen = True
            if shown.call is not None:
                shown.call.gradient((tensor,))
        elif tensor_name == "dgrad" or not getattr(self.module, "fuse_wgrad_accumulation", False):
            self._shown_as(place, tensor_name).backward[tensor_name] = tensor.detach()

    def _shown_as(self, place: int, tensor_name: str) -> Shown:
        """Whose result it is: LayerNormMLP calls the dgrad of fc2 one of fc1's; it comes before fc1's gradient."""
        first, last = self.layers[place].shown, self.layers[-1].shown
        assert first is not None
        assert last is not None
        misnamed = tensor_name == "dgrad" and place == 0 and not first.gradient_seen
        return last if misnamed and state.kind_of(self.module) == "LayerNormMLP" else first

    def _note_scale(self, layer: TeLayer, shown: Shown, role: str, tensor: Tensor, quantized: Any) -> None:
        """Keep the cast's own scale where it is not the tensor's own choice: its amax was reduced over ranks."""
        inverse, recipe = getattr(quantized, "_scale_inv", None), layer.recipe
        if not isinstance(inverse, Tensor) or inverse.numel() != 1 or recipe is None or recipe.name == "delayed":
            return
        own = recipe.current_scale(extent_of(amax_of(tensor), tensor.dtype).seen_by(recipe), role)
        if not _is_inverse(inverse, own):
            shown.scales[role] = _scale_behind(inverse, tensor.dtype, recipe, role)

    def _tell(self, layer: TeLayer, shown: Shown) -> None:
        if shown.told:
            return
        shown.told = True
        exact = ", ".join(ROLES[name] for name in layer.from_debug)
        detail = f"Exact route: {exact}. Default route: the rest." if exact else "Both routes see the same tensors."
        self.recorder.event("route", layer.name, detail)


def _is_inverse(inverse: Tensor, scale: float) -> bool:
    return bool(torch.tensor(scale, dtype=torch.float32).reciprocal() == inverse.item())


def _scale_behind(inverse: Tensor, dtype: torch.dtype, recipe: Recipe, role: str) -> Tensor:
    """The scale of which only the inverse is kept; to the last bit where the amax was a value of few bits."""
    amax = (inverse.detach().float().reshape(()) * recipe.format(role).max).to(dtype)
    exact = recipe.current_scale(float(amax), role)
    return torch.tensor(exact) if _is_inverse(inverse, exact) else inverse.detach().float().reciprocal().reshape(())


class _Listening:
    """The handle of an inspection that listens."""

    def __init__(self, inspection: Inspection) -> None:
        self._inspection = inspection
        nvidia_inspect.listen(inspection)

    def remove(self) -> None:
        """Listen no more."""
        nvidia_inspect.unlisten(self._inspection)
        for layer in self._inspection.layers:
            layer.shown = None


def inspect(module: nn.Module, layers: Sequence[TeLayer], recorder: Recorder) -> Handles:
    """Record a module's layers on the exact route too; ``layers`` are those that its forward hook serves."""
    inspection = Inspection(module, layers, recorder)
    return Handles([module.register_forward_pre_hook(inspection.before), _Listening(inspection)])
