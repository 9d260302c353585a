"""Shadow GEMMs of layers too wide for every output feature of wgrad to be compared, and of inputs that are shared."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import Tensor, nn

import fp8dbg
from fp8dbg.numerics.gemm import gemm_figures, shadow
from fp8dbg.numerics.recipes import recipe_named
from fp8dbg.recording import sampling
from tests.nets import table

FEATURES, WIDE, TOKENS = 48, 1100, 256


def _layer(seed: int = 0) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A wide bfloat16 layer, its input, and the gradient of its output, whose columns differ in size."""
    draw = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, WIDE, bias=False)).bfloat16()
    x = torch.randn(TOKENS, FEATURES, generator=draw).bfloat16()
    sizes = torch.logspace(0, -6, WIDE)[torch.randperm(WIDE, generator=draw)]
    return model, x, (torch.randn(TOKENS, WIDE, generator=draw) * sizes).bfloat16()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "block", "mxfp8", "nvfp4"])
def test_wgrad_of_a_wide_layer_is_estimated_without_bias(recipe: str, tmp_path: Path) -> None:
    """Each step looks at four blocks of 128 output features; the mean over steps is the whole matrix's error."""
    model, x, grad = _layer()
    with fp8dbg.attach(model, tmp_path, every=1, recipe=recipe, rows=FEATURES) as run:
        for _ in range(60):
            model(x).backward(grad)
            run.step()
    found = [row["mse"] for row in table(tmp_path, "select mse from gemms where gemm = 'wgrad' order by step")]
    assert len(set(found)) > 20
    whole = gemm_figures(*shadow("wgrad", grad, x, recipe_named(recipe)))
    assert fmean(found) == pytest.approx(whole.mse, rel=0.1)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "block", "mxfp8"])
def test_the_real_gradient_is_compared_on_the_same_features(recipe: str, tmp_path: Path) -> None:
    """A simulated FP8 layer's own grad_weight is what the shadow says, up to how a float32 sum is rounded."""
    model, x, grad = _layer()
    fp8dbg.simulate(model, recipe)
    with fp8dbg.attach(model, tmp_path, every=1) as run:
        for _ in range(5):
            model(x.clone().requires_grad_()).backward(grad)
            run.step()
    found = table(tmp_path, "select error_unexplained as rest, rel_l2, n from gemms where gemm = 'wgrad'")
    assert len(found) == 5
    for row in found:
        assert row["n"] == WIDE
        assert row["rest"] < 0.005 < row["rel_l2"]


def test_layers_that_share_an_input_share_its_copy_until_it_changes(tmp_path: Path) -> None:
    """Written to in place, or another tensor in its memory, it is cast again."""
    q, k, v = (nn.Linear(32, 16) for _ in range(3))
    model = nn.ModuleList([q, k, v])
    x = torch.randn(64, 32)
    with fp8dbg.attach(model, tmp_path, every=1) as run, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = q(x).sum() + k(x).sum()
        with torch.no_grad():
            x.mul_(4)
        (loss + v(x).sum()).backward()
        run.step()
    first, second, third = (
        row["rms"] for row in table(tmp_path, "select rms from tensors where tensor = 'input' order by layer")
    )
    assert first == second == pytest.approx(third / 4, rel=1e-6)


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_buffer_that_batches_are_put_into_past_autograd_is_read_anew(
    every: int, autocast: bool, tmp_path: Path
) -> None:
    """Neither numpy nor ``tensor.data`` counts as a write: from pass to pass the same tensor may hold other values."""
    layer, batch = nn.Linear(8, 4), torch.zeros(16, 8)
    amaxes = []
    with fp8dbg.attach(layer, tmp_path, every=every, recipe="current") as run:
        for step in range(3):
            batch.data.copy_(torch.randn(16, 8) * 10.0**step)
            amaxes.append(batch.to(torch.bfloat16 if autocast else torch.float32).abs().max().item())
            with torch.autocast("cpu", torch.bfloat16, autocast):
                layer(batch).float().square().mean().backward()
            run.step()
    for name in ("amax", "tensors") if every else ("amax",):
        found = table(tmp_path, f"select amax from {name} where tensor = 'input' order by step")
        assert [row["amax"] for row in found] == amaxes


def test_a_large_copy_of_an_input_goes_with_its_last_user(tmp_path: Path) -> None:
    """Memory that nobody uses again is not held, neither between steps nor when the session is closed."""
    from fp8dbg.numerics.memory import LARGEST_SCRATCH
    from fp8dbg.recording.copies import _copied

    layer, tokens = nn.Linear(64, 4), LARGEST_SCRATCH // 64
    for rows, held in ((16, True), (tokens, False)):
        with fp8dbg.attach(layer, tmp_path / str(rows), every=1) as run, torch.autocast("cpu", torch.bfloat16):
            layer(torch.randn(rows, 64)).float().square().mean().backward()
            run.step()
        assert (_copied.copy is not None) is held


def test_two_sessions_do_not_share_the_memory_of_a_copied_input(tmp_path: Path) -> None:
    """Two models recorded in one thread by turns: a layer gets no copy that the other session has written over."""
    one, other = (nn.ModuleDict({"q": nn.Linear(32, 32), "k": nn.Linear(32, 32)}) for _ in range(2))
    small, large = torch.randn(16, 32), 1000 * torch.randn(16, 32)
    recipe = recipe_named("current")
    folders = tmp_path / "one", tmp_path / "other"
    with (
        fp8dbg.attach(one, folders[0], every=1, recipe=recipe, rows=16) as run,
        fp8dbg.attach(other, folders[1], every=1, recipe=recipe, rows=16),
        torch.autocast("cpu", torch.bfloat16),
    ):
        outputs = [one["q"](small), other["q"](large), one["k"](small), other["k"](large)]
        sum(out.float().sum() for out in outputs).backward()
        run.step()
    for model, x, folder in ((one, small, folders[0]), (other, large, folders[1])):
        rows = table(folder, "select layer, rel_l2 from gemms where gemm = 'fprop' order by layer")
        for row, layer in zip(rows, ("k", "q"), strict=True):
            weight = model[layer].weight
            whole = gemm_figures(*shadow("fprop", x.bfloat16(), weight.detach().bfloat16(), recipe))  # type: ignore[operator]
            assert row == {"layer": layer, "rel_l2": pytest.approx(whole.rel_l2, rel=1e-3)}


def test_wgrad_takes_the_whole_gradients_scale_where_no_gradient_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensors = ["input"] in control.toml, blocks of output features are not scaled by their own amax."""
    monkeypatch.setattr(sampling, "LOOK_SECONDS", 0.0)
    model, x, grad = _layer()
    fp8dbg.simulate(model, "tensorwise")
    with fp8dbg.attach(model, tmp_path, every=1) as run:
        (tmp_path / "control.toml").write_text('tensors = ["input"]\n')
        for _ in range(8):
            model(x).backward(grad)
            run.step()
    measured = table(tmp_path, "select distinct tensor from tensors where step > 4")
    assert [row["tensor"] for row in measured] == ["input"]
    found = table(tmp_path, "select error_unexplained as rest from gemms where gemm = 'wgrad' and step > 4")
    assert found
    assert all(row["rest"] < 0.005 for row in found)
