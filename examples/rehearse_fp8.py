"""Rehearse FP8 training where there are no FP8 units: one small model, one text, several recipes.

    python examples/rehearse_fp8.py

Every recipe starts from the same weights and sees the same batches, so what differs in the loss is the recipe's doing.
"""

from __future__ import annotations

import argparse
import copy
import inspect

import torch
from torch import Tensor, nn

import fp8dbg

STEPS, BATCH, CONTEXT = 80, 256, 16
RECIPES = ("bf16", "delayed", "current", "rowwise", "block", "mxfp8", "nvfp4")


def text() -> Tensor:
    """Bytes of real text that every Python has: the source of argparse."""
    return torch.frombuffer(bytearray(inspect.getsource(argparse), "utf-8"), dtype=torch.uint8).long()


def build() -> nn.Module:
    """The next byte from the 16 before it: an embedding and four linear layers."""
    hidden = [nn.Linear(CONTEXT * 16, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU()]
    return nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), *hidden, nn.Linear(256, 256))


def train(model: nn.Module, data: Tensor, seed: int = 1) -> float:
    """Mean loss of the last 20 steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        at = torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator)
        windows = data[at[:, None] + torch.arange(CONTEXT + 1)]
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def main() -> None:
    """Train once per recipe and print the losses; the last line keeps the output layer in BF16."""
    torch.manual_seed(0)
    start, data = build(), text()
    plain = train(copy.deepcopy(start), data)
    print(f"{'recipe':24} {'loss':>8} {'against BF16':>14}")
    for recipe, fallback in [*((r, None) for r in RECIPES), ("nvfp4", ["8"])]:
        loss = train(fp8dbg.simulate(copy.deepcopy(start), recipe, fallback), data)
        name = recipe if fallback is None else f"{recipe}, layer {fallback[0]} in BF16"
        print(f"{name:24} {loss:8.4f} {loss - plain:+14.4f}")


if __name__ == "__main__":
    main()
