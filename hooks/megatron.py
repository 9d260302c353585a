"""Megatron-Core: its own parallel linear layers, the global names of pipeline stages, and how the run is laid out.

Its Transformer Engine layers are Transformer Engine's own classes, and recorded as such under the names given here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fp8dbg.hooks import Handle, Handles, attach_each, plans
from fp8dbg.hooks.megatron_fallback import write_debug_features, write_fallback
from fp8dbg.hooks.megatron_names import global_names
from fp8dbg.hooks.versions import tell_version, version_of
from fp8dbg.recording.layer import Gradients, Layer

if TYPE_CHECKING:
    from fp8dbg.recording.recorder import Recorder

__all__ = [
    "HOST",
    "apply_fallback",
    "attach",
    "claims",
    "global_names",
    "write_debug_features",
    "write_fallback",
]

HOST = "megatron"

_SIZES = {
    "tensor_parallel": "get_tensor_model_parallel_world_size",
    "pipeline_parallel": "get_pipeline_model_parallel_world_size",
    "data_parallel": "get_data_parallel_world_size",
    "context_parallel": "get_context_parallel_world_size",
    "expert_parallel": "get_expert_model_parallel_world_size",
}


def claims(module: nn.Module) -> bool:
    """Whether the module is one of Megatron-Core's own parallel linear layers. Imports nothing."""
    layers = sys.modules.get("megatron.core.tensor_parallel.layers")
    kinds = tuple(getattr(layers, name, ()) for name in ("ColumnParallelLinear", "RowParallelLinear"))
    return layers is not None and isinstance(module, kinds)


def attach(model: nn.Module, recorder: Recorder) -> Handles:
    """Watch Megatron-Core's own linear layers under their global names, and note the run's layout."""
    rename, layout = global_names(model), _layout()
    if layout:
        recorder.writer.update_fingerprint(megatron=layout)

    def one(name: str, path: str, module: nn.Module) -> Handle:
        return recorder.hook(ParallelLayer(rename(name), module, path))

    handles = attach_each(model, recorder, claims, one)
    if layout or handles:
        tell_version(recorder, "Megatron-Core", version_of("megatron-core"))
    return Handles(handles)


def apply_fallback(model: nn.Module, plan: plans.Plan) -> list[str]:
    """Nothing to do for BF16: Megatron-Core's own linear layers run in it. Another recipe is refused in a sentence."""
    return [
        f"{layer} is one of Megatron-Core's own linear layers: it runs in BF16; use the Transformer Engine spec."
        for layer, recipes in plans.by_layer(plan).items()
        if set(recipes.values()) != {"bf16"}
    ]


def _layout() -> dict[str, int]:
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return {}
    return {name: int(getattr(state, getter)()) for name, getter in _SIZES.items() if hasattr(state, getter)}


class ParallelLayer(Layer):
    """A column- or row-parallel linear layer: this rank's part of the weight, a tuple out, sometimes a tied weight."""

    host = HOST
    nodes = ("LinearWithGradAccumulationAndAsyncCommunicationBackward", *Layer.nodes)
    passing = ("_ReduceFromModelParallelRegion",)

    def __init__(self, name: str, module: nn.Module, path: str = "") -> None:
        super().__init__(name, module, path)
        self._given: Tensor | None = None
        if getattr(module, "sequence_parallel", False):
            self.gemms = ()  # input and output hold different tokens: gathered, or scattered, inside the layer

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> tuple[Any, Any]:
        """Input and output; an output layer that shares the embedding's weight is given it here."""
        given = kwargs.get("weight", args[1] if len(args) > 1 else None)
        self._given = given if isinstance(given, Tensor) else None
        return super().pick(args, kwargs, output)

    def weight(self) -> Tensor | None:
        """This rank's part, [out, in]."""
        return super().weight() if self._given is None else self._given

    def bias(self) -> Tensor | None:
        """None where Megatron adds it later (``skip_bias_add``)."""
        return None if getattr(self.module, "skip_bias_add", False) else super().bias()

    def results(self, node: str, gradients: tuple[Tensor | None, ...]) -> Gradients:
        """Megatron's function takes input and weight; a gradient that it adds to ``main_grad`` is not shown."""
        if node in Layer.nodes:
            return super().results(node, gradients)
        return gradients[0], None if getattr(self.module, "gradient_accumulation_fusion", False) else gradients[1]
