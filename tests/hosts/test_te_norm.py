"""Fused norms on unsampled steps: the amax that the host's own cast left behind, wherever it is certain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dbg
from fp8dbg.hooks import nvidia_te_layers, nvidia_te_norm
from tests.hosts import te_nets
from tests.hosts.runs import figures, rows
from tests.hosts.test_nvidia_te import expected_of, spying, train

STEPS, MICROBATCHES = 4, 2


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modules whose norm fp8dbg computes once more, in order."""
    seen: list[Any] = []
    original = nvidia_te_norm.normed

    def counted(module: Any, x: Tensor, recipe: str) -> Tensor:
        seen.append(module)
        return original(module, x, recipe)

    monkeypatch.setattr(nvidia_te_layers, "normed", counted)
    return seen


def amaxes(te: Any, folder: Path, every: int, recipe: str, spoilt: int | None = None, evaluate: bool = False) -> Any:
    """Rows of amax of a training; the input of one microbatch may hold a NaN, another may follow an evaluation."""
    net, fp8_recipe = te_nets.four_layers(te), te_nets.recipe(recipe)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    with fp8dbg.attach(net, folder, every=every):
        for index in range(STEPS * MICROBATCHES):
            x = te_nets.batch(index) * (1.0 + index % 3)
            if index == spoilt:
                x[3, 5] = float("nan")
            with te_nets.autocast(te, fp8_recipe):
                if evaluate and index % 2:
                    with torch.no_grad():
                        net(te_nets.batch(99) * 50)
                y = net(x)
            y.float().pow(2).mean().backward()
            if index % MICROBATCHES:
                optimizer.step()
                optimizer.zero_grad()
    return rows(folder, "select layer, step, microbatch, tensor, amax, scale, nan, inf from amax order by all")


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("case", [{}, {"spoilt": 5}, {"evaluate": True}])
def test_unsampled_steps_record_what_sampled_ones_do(
    te: Any, tmp_path: Path, norms: list[Any], recipe: str, case: dict[str, Any]
) -> None:
    """Amax, scale and counts to the last bit: with a NaN too, and after evaluations within the same autocast."""
    expected = amaxes(te, tmp_path / "sampled", 1, recipe, **case)
    norms.clear()
    assert amaxes(te, tmp_path / "not", 0, recipe, **case) == expected
    if recipe == "current":
        assert len(norms) >= 2 * STEPS * MICROBATCHES  # it keeps no amax
    elif not case:
        assert len(norms) == 2  # of the first call of each module, before which nothing is known
    else:
        assert 2 < len(norms) < 2 * STEPS * MICROBATCHES


def test_checkpointing_ends_it(te: Any, tmp_path: Path, norms: list[Any]) -> None:
    """Histories are put aside and back: from the first recomputation on each norm is computed again."""
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=0):
        for index in range(3):
            x = te_nets.batch(index).requires_grad_()
            with te_nets.autocast(te, te_nets.recipe("delayed")):
                y = te.checkpoint(net, x, use_reentrant=False)
            y.float().pow(2).mean().backward()
    assert len(norms) == 2 * 3


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_float32_parameters_are_read_in_the_dtype_of_the_autocast(te: Any, tmp_path: Path, recipe: str) -> None:
    """Under torch's autocast a norm rounds its own weight and bias to BF16, too: figures are those of the bytes."""
    torch.manual_seed(0)
    rms: dict[str, Any] = {"normalization": "RMSNorm", "zero_centered_gamma": True}
    net = nn.Sequential(*(te.LayerNormLinear(128, 128, params_dtype=torch.float32, **a) for a in ({}, rms)))
    for name, parameter in net.named_parameters():
        if "layer_norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return net(x.float().view(4, 16, 128))  # type: ignore[no-any-return]

    with fp8dbg.attach(net, tmp_path, every=1), spying(net) as seen:
        train(te, net, recipe, steps=2, forward=forward, lr=1e-4)
    assert figures(tmp_path) == {key: expected_of(casts, key[1], 2) for key, casts in seen.items()}
