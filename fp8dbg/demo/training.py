"""The demo's training loop: an ordinary one, with fp8dbg attached and two faults on the way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8dbg
from fp8dbg.demo.faults import amplified, plant_outliers
from fp8dbg.demo.model import Layer, Transformer
from fp8dbg.demo.text import batch, read_text, split

RECIPE = "delayed:history=16"

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the demo does, and when.

    Args:
        steps: training steps.
        rows, length: windows per batch, and codes per window.
        learning_rate: its peak.
        every: every how many steps fp8dbg measures in full.
        seed: of the weights and the batches.
        planted_layer: the layer that gets the outliers; neither the first nor the last.
        neurons: which of its neurons.
        jump: by what factor the inputs of all layers jump for one batch.
    """

    steps: int = 300
    rows: int = 4
    length: int = 128
    learning_rate: float = 3e-3
    every: int = 10
    seed: int = 0
    planted_layer: int = 1
    neurons: tuple[int, ...] = (5, 77)
    jump: float = 16.0

    @property
    def planted_at(self) -> int:
        """The step before which the outliers are planted: the model has learned something by then."""
        return self.steps * 3 // 5

    @property
    def jump_at(self) -> int:
        """The step of the batch whose activations jump; on purpose none that is measured in full."""
        return self.steps * 17 // 20 + 3


def train(out: Path, settings: Settings, tell: Callable[[int, float], None]) -> Weights:
    """Train the demo's model in simulated FP8, recorded in ``out``.

    Args:
        out: the run folder.
        settings: what to do.
        tell: called after each step with the number of steps done and the loss.

    Returns:
        the weights just after the outliers were planted.
    """
    torch.manual_seed(settings.seed)
    text, _ = split(read_text())
    model = fp8dbg.simulate(Transformer(), RECIPE)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, settings.steps, pct_start=0.1)
    batches = torch.Generator().manual_seed(settings.seed)
    planted: Weights = {}
    # saved whole (0.1 MB a sampled step), it answers the tutorial's question what MXFP8 would have done to it
    faulty = f"layers.{settings.planted_layer}.mlp.up:weight"
    with fp8dbg.attach(model, out, optimizer=optimizer, every=settings.every, dump=[faulty]) as run:
        for step in range(settings.steps):
            if step == settings.planted_at:
                plant_outliers(_layer(model, settings.planted_layer).mlp, optimizer, settings.neurons)
                planted = {name: p.detach().clone() for name, p in model.named_parameters()}
            norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
            with amplified(norms, settings.jump) if step == settings.jump_at else nullcontext():
                loss = loss_of(model, *batch(text, settings.rows, settings.length, batches))
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            run.log(loss=loss.item(), grad_norm=norm.item())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            tell(step + 1, loss.item())
    return planted


def loss_of(model: nn.Module, codes: Tensor, following: Tensor) -> Tensor:
    """Mean cross-entropy in nats per code, computed under BF16 autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(codes)
    return F.cross_entropy(logits.float().flatten(0, 1), following.flatten())


def _layer(model: nn.Module, index: int) -> Layer:
    layer = model.get_submodule(f"layers.{index}")
    assert isinstance(layer, Layer)
    return layer
