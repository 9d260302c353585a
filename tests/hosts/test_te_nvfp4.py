"""NVFP4 in Transformer Engine's own modules on a CPU: recorded figures against the codes and scales really made."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fp8dbg
from fp8dbg.numerics.casting import prepare
from fp8dbg.numerics.formats import format_named
from fp8dbg.numerics.recipes import recipe_named
from tests.hosts import te_cpu, te_nets
from tests.hosts.runs import owner_of, rows
from tests.hosts.te_cpu import nvfp4
from tests.hosts.te_cpu.quantizers import Cast

HIDDEN = {("2.fc2", "input"), ("2.fc1", "grad_output")}
"""What LayerNormMLP's kernels keep to themselves."""

FIGURES = ("amax", "underflow", "at_max", "saturated")


def train(te: Any, net: torch.nn.Module, **recipe: Any) -> list[torch.Tensor]:
    """Losses of three steps of two microbatches, followed by the weights."""
    fp8_recipe, optimizer, losses = te_nets.recipe("nvfp4", **recipe), torch.optim.SGD(net.parameters(), lr=1e-2), []
    for step in range(3):
        for microbatch in range(2):
            with te_nets.autocast(te, fp8_recipe):
                y = net(te_nets.batch(2 * step + microbatch).requires_grad_())
            loss = y.float().pow(2).mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(p.detach().clone() for p in net.parameters())]


def figures_of(cast: Cast) -> tuple[dict[str, float], float]:
    """The figures of a cast, and its relative error, from the codes along rows and their scales."""
    x, data = cast.dense.detach().float(), cast.inner["_rowwise_data"]
    scales, amax = cast.inner["_rowwise_scale_inv"], cast.inner["_amax_rowwise"]
    values = nvfp4.dense(data.reshape(-1, data.shape[-1]), scales, amax).reshape(x.shape)
    underflow, at_max = int(((x != 0) & (values == 0)).sum()), int(((cast.data & 7) == 7).sum())
    counts = {"amax": float(x.abs().max()), "underflow": underflow, "at_max": at_max, "saturated": 0}
    return counts, float((values - x).double().norm() / x.double().norm())


@pytest.fixture
def seen(te: Any) -> Any:
    """Starts listening to a network's casts: layer and operand -> the figures of each."""
    found: dict[tuple[str, str], list[tuple[dict[str, Any], float]]] = {}
    nets: list[torch.nn.Module] = []

    def observer(cast: Cast) -> None:
        if nets:
            found.setdefault(owner_of(nets[0], cast), []).append(figures_of(cast))

    def start(net: torch.nn.Module) -> dict[tuple[str, str], list[tuple[dict[str, Any], float]]]:
        nets.append(net)
        return found

    te_cpu.OBSERVERS.append(observer)
    yield start
    te_cpu.OBSERVERS.remove(observer)


def test_figures_are_those_of_the_codes(te: Any, tmp_path: Path, seen: Any) -> None:
    """amax, underflow, at_max and saturation of every operand equal those of the codes made; so do the errors."""
    net = te_nets.four_layers(te)
    made = seen(net)
    with fp8dbg.attach(net, tmp_path, every=1):
        train(te, net)
    query = "select layer, tensor, amax, underflow, at_max, saturated, rel_l2 from tensors where recipe is not null"
    recorded: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows(tmp_path, f"{query} order by step, microbatch, call"):
        recorded.setdefault((row["layer"], row["tensor"]), []).append(row)
    assert set(made) - set(recorded) == HIDDEN
    assert len(recorded) == 13
    for key, found in recorded.items():
        expected = made[key][::2] if key[1] == "weight" else made[key]
        assert [{name: row[name] for name in FIGURES} for row in found] == [counts for counts, _ in expected], key
        assert [row["rel_l2"] for row in found] == pytest.approx([error for _, error in expected], rel=1e-5)
    told = rows(tmp_path, "select detail from events where layer is null")
    assert told == []


def test_real_gemms_are_compared_with_the_shadow(te: Any, tmp_path: Path) -> None:
    """FP4's own errors, and nothing unexplained beyond the rounding of a BF16 result."""
    net = te_nets.four_layers(te, bias=False)
    with fp8dbg.attach(net, tmp_path, every=1):
        train(te, net)
    found = rows(tmp_path, "select rel_l2, error_unexplained as rest from gemms")
    assert len([row for row in found if row["rest"] is not None]) == 6 * 8
    for row in found:
        assert 0.08 < row["rel_l2"] < 0.25
        assert row["rest"] is None or row["rest"] < 0.004


@pytest.mark.parametrize("square", [False, True])
def test_training_is_bit_identical(te: Any, tmp_path: Path, square: bool) -> None:
    """Same losses and weights with and without fp8dbg; what the recipe does beyond what is measured is said once."""
    results = []
    for attached in (False, True):
        net = te_nets.four_layers(te)
        with fp8dbg.attach(net, tmp_path, every=1) if attached else nullcontext():
            results.append(train(te, net, disable_2d_quantization=not square))
    assert all(map(torch.equal, *results))
    told = [row["detail"] for row in rows(tmp_path, "select detail from events where layer is null")]
    assert [("16 x 16" in detail, "Hadamard" in detail) for detail in told] == [(True, False)] * square


def test_layers_train(te: Any) -> None:
    """Twenty steps bring the loss down, less far than BF16 does."""
    exact = te_nets.train(te, te_nets.four_layers(te), None, steps=20)
    losses = te_nets.train(te, te_nets.four_layers(te), te_nets.recipe("nvfp4"), steps=20)
    assert exact[-1] < losses[-1] < 0.15 * losses[0]


def test_the_casts_agree_with_fp8dbgs_own(te: Any) -> None:
    """Scales and codes of blocks over 40 binades, zeros, ties and a subnormal among them: bit for bit."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 64, generator=generator) * (8 * torch.randn(256, 1, generator=generator)).exp2()
    x[0], x[1, :8], x[2] = 0.0, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]), 1e-41
    x = x.bfloat16().float()
    whole = nvfp4.tensor_scale(x.abs().max())
    codes, decode = nvfp4.blocks(x, whole.reshape(1), square=False)
    p = prepare(x, recipe_named("nvfp4"), "input", "1x16", -1, None)
    fp8 = decode.view(torch.float8_e4m3fn).float()
    assert torch.equal(p.cast.inverses.reshape(fp8.shape), fp8)
    mine = format_named("e2m1").round((x.reshape(256, 4, 16) * p.cast.scales.reshape(256, 4, 1)).numpy())
    kept = (fp8 != 0).repeat_interleave(16, 1)  # where a block's scale is zero its codes multiply nothing
    np.testing.assert_array_equal(nvfp4.values_of(codes)[kept].numpy(), mine.reshape(256, 64)[kept.numpy()])


def test_what_is_not_played_is_refused(te: Any) -> None:
    """Random Hadamard transforms, stochastic rounding: a sentence instead of plain NVFP4 under their name."""
    net = te_nets.four_layers(te)
    with pytest.raises(RuntimeError, match="NVFP4 without with_rht"):
        train(te, net, disable_rht=False)
