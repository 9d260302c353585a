"""A test of one's own that fails where FP8 training is unwell: ``pytest -p fp8dbg.pytest_plugin examples/ci``.

The model, its data and the recipe are stand-ins for yours; `-p` is not needed where fp8dbg is installed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import fp8dbg
from fp8dbg.pytest_plugin import RecordedRun

RULES = Path(__file__).with_name("fp8dbg.toml")


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Sixty steps towards a function that the model can learn."""
    data = torch.Generator().manual_seed(0)
    target = torch.randn(64, 64, generator=data)
    for _ in range(60):
        x = torch.randn(256, 64, generator=data)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        loss = (y.float() - x @ target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_training_is_healthy(fp8dbg_run: RecordedRun) -> None:
    """Every default gate, and those of fp8dbg.toml."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    fp8dbg.simulate(model, "delayed:history=16")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with fp8dbg_run.attach(model, optimizer=optimizer, every=5):
        train(model, optimizer)
    fp8dbg_run.assert_healthy(rules=RULES)
