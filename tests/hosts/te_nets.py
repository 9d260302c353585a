"""Small Transformer Engine networks and recipes, under the names of either version."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

RECIPES = ("delayed", "current", "block", "mxfp8")

PLAIN_NVFP4 = {"disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True}
"""Blocks of 16 along a row, rounded to nearest: NVFP4 without what its recipe adds by default."""


def recipe(name: str, **arguments: Any) -> Any:
    """A Transformer Engine recipe by fp8dbg's name for it."""
    from transformer_engine.common import recipe as recipes

    made = {
        "delayed": recipes.DelayedScaling,
        "current": recipes.Float8CurrentScaling,
        "current_pow2": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
        "nvfp4": recipes.NVFP4BlockScaling,
    }[name]
    if name == "nvfp4":
        arguments = {**PLAIN_NVFP4, **arguments}
    if name == "delayed":
        arguments.setdefault("amax_history_len", 4)
    found = made(**arguments)
    if name == "current_pow2":
        for cast in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            setattr(found, cast, recipes.QParams(power_2_scale=True))
    return found


def autocast(te: Any, fp8_recipe: Any, enabled: bool = True) -> AbstractContextManager[Any]:
    """``te.autocast``, or ``te.fp8_autocast`` before TE 2.9."""
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=fp8_recipe)  # type: ignore[no-any-return]
    return te.fp8_autocast(enabled=enabled, fp8_recipe=fp8_recipe)  # type: ignore[no-any-return]


def calibration(te: Any, fp8_recipe: Any) -> AbstractContextManager[Any]:
    """An autocast that computes in BF16 and only collects amaxes."""
    if hasattr(te, "autocast"):
        return te.autocast(enabled=False, calibrating=True, recipe=fp8_recipe)  # type: ignore[no-any-return]
    return te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=fp8_recipe)  # type: ignore[no-any-return]


def four_layers(te: Any, seed: int = 0, **arguments: Any) -> torch.nn.Sequential:
    """Linear, LayerNormLinear, LayerNormMLP (two GEMM layers), Linear; 128 features in and out, BF16."""
    torch.manual_seed(seed)
    arguments = {"params_dtype": torch.bfloat16, **arguments}
    return torch.nn.Sequential(
        te.Linear(128, 256, **arguments),
        te.LayerNormLinear(256, 128, **arguments),
        te.LayerNormMLP(128, 256, activation="swiglu", normalization="RMSNorm", **arguments),
        te.Linear(128, 128, **arguments),
    )


def batch(seed: int, tokens: int = 64) -> torch.Tensor:
    """[tokens, 128] BF16 noise, its own generator."""
    return torch.randn(tokens, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()


def train(te: Any, net: torch.nn.Module, fp8_recipe: Any, steps: int, microbatches: int = 1) -> list[float]:
    """Losses of learning one batch by heart (its features turned by one); ``fp8_recipe`` None trains in BF16."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    losses = []
    for _ in range(steps):
        for microbatch in range(microbatches):
            x = batch(microbatch)
            with autocast(te, fp8_recipe, fp8_recipe is not None):
                y = net(x)
            loss = (y.float() - x.float().roll(1, -1)).pow(2).mean()
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_spread(
    model: torch.nn.Module,
    casting: Callable[[], Any],
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
    part: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> list[torch.Tensor]:
    """Losses of three steps of two microbatches on inputs of four decades' spread, followed by the weights.

    ``casting`` makes the autocast of each forward; ``part`` cuts a rank's tokens out of the batch.
    """
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for step in range(3):
        for microbatch in range(2):
            x = part(batch(2 * step + microbatch).float() * 10.0 ** torch.linspace(-3, 1, 128))
            with casting():
                y = (forward or model)(x.bfloat16().requires_grad_())
            loss = y.float().pow(2).mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(p.detach().clone() for p in model.parameters())]
