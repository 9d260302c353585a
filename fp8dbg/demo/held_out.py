"""What keeping some layers in BF16 buys: the same weights judged on text they were not trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import fp8dbg
from fp8dbg.demo.model import Transformer
from fp8dbg.demo.text import batch, read_text, split
from fp8dbg.demo.training import RECIPE, Settings, Weights, loss_of

FILE = "held_out.json"

_WARM_UP = 4
"""Batches that only fill the amax history, so that no cast is judged under a scale of 1."""

_BATCHES = 16

Fallback = Mapping[str, Any] | list[str]


def losses(weights: Weights, plan: Mapping[str, Any], settings: Settings) -> list[dict[str, Any]]:
    """Loss on the held-out text by what is kept in BF16.

    Args:
        weights: of the demo's model.
        plan: the recommended fallback, as ``fp8dbg.simulate`` takes it; empty: that row is left out.
        settings: what the demo was trained with.

    Returns:
        rows with ``in_bf16`` (what was kept in BF16) and ``loss`` (nats per code).
    """
    ends = [f"layers.{index}.*" for index in (0, len(Transformer().layers) - 1)]
    cases: dict[str, Fallback | None] = {"nothing": [], "the recommended layers": dict(plan)}
    cases |= {"the first and the last layer": ends, "everything": None}
    return [
        {"in_bf16": name, "loss": _loss(weights, fallback, settings)}
        for name, fallback in cases.items()
        if name != "the recommended layers" or fallback
    ]


def save(rows: list[dict[str, Any]], step: int, out: Path) -> None:
    """Write the rows to ``out``, with the step that the weights are from."""
    (out / FILE).write_text(json.dumps({"weights_of_step": step, "rows": rows}, indent=1) + "\n", encoding="utf-8")


@torch.no_grad()
def _loss(weights: Weights, fallback: Fallback | None, settings: Settings) -> float:
    """Mean loss; ``fallback`` None: no layer is simulated."""
    model = Transformer()
    model.load_state_dict(weights)
    if fallback is not None:
        model = fp8dbg.simulate(model, RECIPE, fallback=fallback or None)
    training, held_out = split(read_text())
    generator = torch.Generator().manual_seed(settings.seed + 1)
    for _ in range(_WARM_UP):
        loss_of(model, *batch(training, settings.rows, settings.length, generator))
    model.eval()
    batches = [batch(held_out, settings.rows, settings.length, generator) for _ in range(_BATCHES)]
    return sum(loss_of(model, *each).item() for each in batches) / _BATCHES
