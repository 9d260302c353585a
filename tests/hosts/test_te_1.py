"""Transformer Engine 1.x: its state, laid out as it was then, read by the same code. No 1.x runs on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fp8dbg.hooks import nvidia_te_state as state
from tests.hosts.te_cpu.enums import FP8TensorMeta


def module_of_1_x(scales: list[float], history: int = 4) -> nn.Module:
    """A module with ``fp8_meta`` as 1.x kept it: one scale and one column of the history per slot; no quantizers."""
    module, meta = nn.Linear(2, 2), FP8TensorMeta()
    meta.scale = torch.tensor(scales)
    meta.scale_inv = meta.scale.reciprocal()
    meta.amax_history = torch.zeros(history, len(scales))
    recipe = type("DelayedScaling", (), {})()
    recipe.amax_compute_algo, recipe.amax_history_len, recipe.margin = "max", history, 0
    recipe.fp8_format = SimpleNamespace(name="HYBRID")
    found: Any = module
    found.fp8, found.fp8_meta = True, {"recipe": recipe, "scaling_fwd": meta, "scaling_bwd": meta}
    return module


def test_each_slot_has_its_own_scale() -> None:
    """Input, weight and gradient of both GEMMs of a LayerNormMLP, out of scale by their slots."""
    module = module_of_1_x([2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    for slots, expected in ((state.FC1, [2.0, 4.0, 2.0]), (state.FC2, [16.0, 32.0, 8.0])):
        found = [state.live_scale(module, role, getattr(slots, role)) for role in ("input", "weight", "grad_output")]
        assert found == [(scale, "live") for scale in expected]


def test_a_scale_is_initial_until_an_amax_was_seen() -> None:
    """1.0 with an empty history is what a state is born with; 1.0 after an amax is a scale like any other."""
    module: Any = module_of_1_x([1.0, 1.0])
    module.fp8_meta["scaling_fwd"].amax_history[-1, 1] = 448.0
    assert state.live_scale(module, "input", 0) == (1.0, "initial")
    assert state.live_scale(module, "weight", 1) == (1.0, "live")


def test_the_recipe_is_read_from_the_module() -> None:
    """Delayed scaling with its history, algorithm and margin; 1.x had no other recipe."""
    module: Any = module_of_1_x([1.0, 1.0], history=16)
    recipe = state.recipe_of(module.fp8_meta["recipe"])
    assert (recipe.name, recipe.parameters["history"], recipe.parameters["algorithm"]) == ("delayed", 16, "max")
    assert state.in_fp8(module)


@pytest.mark.parametrize(("version", "slots"), [((1, 13), (1, 4, 1)), ((2, 3), (1, 4, 1)), ((2, 4), (3, 4, 2))])
def test_experts_slots_changed_with_2_4(version: tuple[int, int], slots: tuple[int, int, int]) -> None:
    """The second of three experts: side by side by kind before 2.4, interleaved from then on."""
    assert tuple(state.grouped_slots(1, 3, version)) == slots
