"""Faults that host libraries can really have, reproduced while they train, and what the findings say of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dbg
from fp8dbg.analysis.evidence import Evidence
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.verdicts import gain_error
from tests.hosts import te_nets
from tests.hosts.conftest import need
from tests.hosts.runs import rows
from tests.hosts.test_megatron import LAYERS, run


def train(
    te: Any,
    net: nn.Module,
    recipe: Any,
    steps: range,
    spoil: Callable[[int, Tensor], Tensor] = lambda step, x: x,
    forward: Callable[[Tensor], Tensor] | None = None,
    lr: float = 1e-6,
) -> None:
    """Steps on noise; ``spoil`` changes a step's input."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for step in steps:
        with te_nets.autocast(te, recipe):
            y = (forward or net)(spoil(step, te_nets.batch(step)))
        y.float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def findings(folder: Path) -> list[Finding]:
    """Worst first, but for what the host's fusion hides."""
    with fp8dbg.open_run(folder) as opened:
        return [finding for finding in opened.findings() if finding.code != "coverage"]


@pytest.mark.parametrize("history", [1, 1024])
def test_a_spike_of_activations_under_delayed_scaling(te: Any, tmp_path: Path, history: int) -> None:
    """50 times larger in one step: over 90 % of the values clip, 28 dB fall below 1; where and when is named."""
    recipe = te_nets.recipe("delayed", amax_history_len=history, amax_compute_algo="max")
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=1):
        train(te, net, recipe, range(12), lambda step, x: x * 50 if step == 8 else x)
    query = "select step, saturated / numel as clipped, sqnr_db from tensors where layer = '0' and tensor = 'input'"
    found = {row["step"]: row for row in rows(tmp_path, query)}
    assert found[8]["clipped"] > 0.9
    assert found[7]["sqnr_db"] > 28
    assert found[8]["sqnr_db"] < 1
    worst = findings(tmp_path)[0]
    assert (worst.code, worst.severity) == ("saturation", "act")
    assert (worst.layer, worst.tensor, worst.first_step, worst.last_step) == ("0", "input", 8, 8)


EIGHT_STEPS = ("--steps", "8", "--lr", "1e-3", "--microbatches", "1")


@pytest.fixture(scope="module")
def bf16_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What Megatron's model of the stale weights' test loses without FP8."""
    return list(run(tmp_path_factory.mktemp("bf16"), *EIGHT_STEPS, "--bare")[0]["losses"])


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_weights_in_fp8_that_are_never_renewed(tmp_path: Path, recipe: str, bf16_losses: list[float]) -> None:
    """Megatron without set_is_first_microbatch: no error, a loss of 4.13 and not 3.72, every weight is named."""
    right = run(tmp_path / "right", "--recipe", recipe, *EIGHT_STEPS)[0]["losses"]
    stale = run(tmp_path / "stale", "--recipe", recipe, *EIGHT_STEPS, "--stale")[0]["losses"]
    assert right == pytest.approx(bf16_losses, abs=0.02)
    assert stale[0] == right[0]
    assert all(s > r + 0.1 for s, r in zip(stale[1:], right[1:], strict=True))
    assert (right[-1], stale[-1]) == pytest.approx((3.72, 4.13), abs=0.03)
    assert findings(tmp_path / "right") == []
    worst = findings(tmp_path / "stale")[0]
    assert (worst.code, worst.severity, worst.tensor, worst.first_step) == ("gain_error", "act", "weight", 1)
    assert "FP8 copy" in worst.summary
    with fp8dbg.open_run(tmp_path / "stale") as opened:
        assert {finding.layer for finding in gain_error.judge(Evidence(opened))} == LAYERS


def test_weights_that_are_never_renewed_are_found_in_debug_mode(tmp_path: Path) -> None:
    """The exact route, where the copy that is kept is held in another form."""
    need("nvdlfw_inspect")
    run(tmp_path, "--recipe", "delayed", *EIGHT_STEPS, "--stale", "--exact")
    worst = findings(tmp_path)[0]
    assert (worst.code, worst.severity, worst.tensor, worst.first_step) == ("gain_error", "act", "weight", 1)
    assert rows(tmp_path, "select * from events where kind in ('error', 'gap')") == []


def test_a_resume_without_the_amax_state(te: Any, tmp_path: Path) -> None:
    """Weights reloaded without _extra_state: gradient scales are 1 again on the first step after it, and are named."""
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=1):
        train(te, net, te_nets.recipe("delayed"), range(8))
    weights = {name: value for name, value in net.state_dict().items() if not name.endswith("_extra_state")}
    resumed = te_nets.four_layers(te, seed=1)
    resumed.load_state_dict(weights, strict=False)
    with fp8dbg.attach(resumed, tmp_path, every=1, first_step=8):
        train(te, resumed, te_nets.recipe("delayed"), range(8, 14))
    worst = findings(tmp_path)[0]
    assert (worst.code, worst.severity, worst.tensor, worst.first_step) == ("frozen_scale", "act", "grad_output", 8)
    assert "the state had been lost" in worst.summary


def test_fp8_that_begins_in_mid_run_has_lost_no_state(te: Any, tmp_path: Path) -> None:
    """After a warm-up in BF16 the first FP8 step has a scale of 1, as the first of any delayed scaling."""
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=1):
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        for step in range(10):
            with te_nets.autocast(te, te_nets.recipe("delayed"), enabled=step >= 4):
                y = net(te_nets.batch(step))
            y.float().pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    scales = {row["scale"] for row in rows(tmp_path, "select distinct scale from amax where step = 4")}
    assert scales == {1.0}
    begun = rows(tmp_path, "select layer, step from events where kind = 'fp8' order by layer")
    layers = rows(tmp_path, "select distinct layer, 4 as step from amax order by layer")
    assert begun == layers
    assert findings(tmp_path) == []


def test_a_resume_with_the_amax_state_is_healthy(te: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with _extra_state: nothing is found."""
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=1):
        train(te, net, te_nets.recipe("delayed"), range(8))
    resumed = te_nets.four_layers(te, seed=1)
    resumed.load_state_dict(net.state_dict())
    with fp8dbg.attach(resumed, tmp_path, every=1, first_step=8):
        train(te, resumed, te_nets.recipe("delayed"), range(8, 14))
    assert findings(tmp_path) == []


@pytest.mark.parametrize(("recipe", "lost"), [("current", True), ("mxfp8", False)])
def test_a_tensor_too_wide_for_one_scale(te: Any, tmp_path: Path, recipe: str, lost: bool) -> None:
    """Rows over many binades: over 39 % of the input is flushed under one scale, none under blocks' scales."""

    def widen(step: int, x: Tensor) -> Tensor:
        spread = torch.randn(64, 1, generator=torch.Generator().manual_seed(50 + step)) * 6.0
        return (x.float() * spread.exp2()).bfloat16()

    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=1):
        train(te, net, te_nets.recipe(recipe), range(6), widen)
    flushed = {(f.layer, f.tensor): f for f in findings(tmp_path) if f.code in ("underflow", "outlier")}
    query = "select max(underflow_ratio) as ratio from tensor_ratios where layer = '0' and tensor = 'input'"
    assert (rows(tmp_path, query)[0]["ratio"] > 0.39) == lost
    assert (("0", "input") in flushed) == lost
    if lost:
        first = flushed["0", "input"]
        assert (first.severity, first.first_step) == ("act", 0)
        assert "block" in first.remedy


def test_a_gradient_scale_that_is_never_updated(te: Any, tmp_path: Path) -> None:
    """The first FP8 module, whose backward updates the gradients' scales, has no backward here: they stay 1."""
    net = te_nets.four_layers(te)

    def forward(x: Tensor) -> Tensor:
        return net[3](net[2](net[1](net[0](x).detach())))  # type: ignore[no-any-return]

    with fp8dbg.attach(net, tmp_path, every=1):
        train(te, net, te_nets.recipe("delayed"), range(6), forward=forward)
    worst = findings(tmp_path)[0]
    assert (worst.code, worst.severity) == ("frozen_scale", "act")
    assert (worst.layer, worst.tensor, worst.first_step, worst.last_step) == ("3", "grad_output", 0, 5)
    assert "as before any update" in worst.summary


def test_an_autocast_around_plain_layers_changes_none_of_them(te: Any, tmp_path: Path) -> None:
    """nn.Linear inside Transformer Engine's autocast stays in BF16: said; with one layer of the host's it is not."""
    for name, made in (("plain", nn.Linear), ("one", te.Linear)):
        net = nn.Sequential(nn.Linear(128, 128), made(128, 128)).bfloat16()
        with fp8dbg.attach(net, tmp_path / name, every=1):
            train(te, net, te_nets.recipe("current"), range(3))
    assert [finding.code for finding in findings(tmp_path / "plain")] == ["fp8_ignored"]
    assert "autocast" in findings(tmp_path / "plain")[0].summary
    assert findings(tmp_path / "one") == []


def test_megatrons_own_layers_ignore_its_fp8(tmp_path: Path) -> None:
    """The local specification with fp8="hybrid" trains in BF16, without a word of Megatron's."""
    run(tmp_path, "--spec", "local", "--recipe", "current")
    worst = findings(tmp_path)[0]
    assert (worst.code, worst.severity) == ("fp8_ignored", "act")
    assert "fp8='hybrid'" in worst.summary
