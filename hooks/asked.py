"""Whether a program has asked for FP8, and where: so that a run in which no layer computes in it can say so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from fp8dbg.recording.names import named_layers


def asked_for_fp8(model: nn.Module) -> str | None:
    """Where FP8 is asked for, in words; None if it is not. Imports no host; to be called in the model's forward."""
    return next((said for said in (*_megatron(model), *_autocast(), *_accelerate(), *_lightning(model)) if said), None)


def _megatron(model: nn.Module) -> Iterator[str]:
    """Megatron's configuration, which a model and its layers carry."""
    for _, _, module in named_layers(model):
        config = getattr(module, "config", None)
        for name in ("fp8", "fp4"):
            value = getattr(config, name, None)
            if value and any(kind.__module__.startswith("megatron.") for kind in type(config).__mro__):
                yield f"Megatron's configuration says {name}={value!r:.50}"


def _autocast() -> Iterator[str]:
    """Transformer Engine's autocast, where this is called inside it."""
    for name in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):
        manager = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if manager is not None and manager.is_fp8_enabled():
            yield "the model runs inside Transformer Engine's FP8 autocast"


def _accelerate() -> Iterator[str]:
    """Accelerate's mixed_precision, the Trainer's too."""
    state: Any = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    if state is not None and state._shared_state.get("_mixed_precision") == "fp8":
        yield "Accelerate's mixed_precision is fp8"


def _lightning(model: nn.Module) -> Iterator[str]:
    """Lightning's precision, by the trainer that its module is attached to."""
    for _, _, module in named_layers(model):
        precision = getattr(getattr(module, "_trainer", None), "precision", None)
        if isinstance(precision, str) and precision.startswith("transformer-engine"):
            yield f"Lightning's precision is {precision}"
