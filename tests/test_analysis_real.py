"""The verdicts on figures of real training: a small SwiGLU model in simulated FP8, healthy and with a fault planted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fp8dbg
from fp8dbg.analysis.run import Run, open_run
from fp8dbg.demo.faults import amplified
from fp8dbg.demo.text import batch, read_text
from tests.comparable import ACTS, Small, learn

STEPS, PLANTED, JUMP = 60, 33, 52

pytestmark = pytest.mark.slow


def train(path: Path, recipe: str, *, plant: bool = False, jump: bool = False) -> Run:
    torch.manual_seed(0)
    model = fp8dbg.simulate(Small(width=48), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    text, batches = read_text(), torch.Generator().manual_seed(0)
    with fp8dbg.attach(model, path, optimizer=optimizer, every=10) as run:
        for step in range(STEPS):
            if plant and step == PLANTED:
                ACTS["outlier"](model, optimizer)
            norms = [m for m in model.modules() if isinstance(m, nn.RMSNorm)] if jump and step == JUMP else []
            codes, following = batch(text, 4, 64, batches)
            with amplified(norms, 16.0):
                learn(run, model, optimizer, codes, following)
    return open_run(path)


@pytest.mark.parametrize("recipe", ["delayed:history=16", "current", "block"])
def test_healthy_training_has_no_finding(recipe: str, tmp_path: Path) -> None:
    """Promise 6, on real figures: nothing to act on, nothing to watch, no plan."""
    run = train(tmp_path / "run", recipe)
    assert run.findings() == []
    assert not run.plan()


def test_planted_outlier_and_jump_are_found_and_dated(tmp_path: Path) -> None:
    """Both planted layers first and nothing else in the plan, from the very step; then the jump, between samples."""
    run = train(tmp_path / "run", "delayed:history=16", plant=True, jump=True)
    findings = run.findings()
    assert [(f.code, f.layer, f.tensor) for f in findings[:2]] == [
        ("outlier", "blocks.1.mlp.up", "weight"),
        ("outlier", "blocks.1.mlp.down", "input"),
    ]
    assert [f.first_step in (PLANTED, PLANTED + 1) for f in findings[:2]] == [True, True]
    assert ("saturation", JUMP) in [(f.code, f.first_step) for f in findings]
    assert set(run.plan().as_fallback()) == {"blocks.1.mlp.up", "blocks.1.mlp.down"}
