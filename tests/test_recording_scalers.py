"""Gradient scalers: what is recorded is the loss, not its multiple; and a step that is left out is a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import fp8dbg
from tests.nets import table

SCALE = 4096.0


def training() -> tuple[nn.Linear, torch.optim.Optimizer, GradScaler]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    return layer, torch.optim.SGD(layer.parameters(), 0.01), GradScaler("cpu", init_scale=SCALE)


def loss_of(layer: nn.Module) -> Tensor:
    loss: Tensor = layer(torch.randn(3, 4)).square().mean()
    return loss


def backward(root: Tensor) -> None:
    root.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def losses(run_dir: Path) -> list[float | None]:
    return [row["loss"] for row in table(run_dir, "select loss from steps order by step")]


def trained(layer: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> list[float]:
    """Three steps of two microbatches as PyTorch's manual has them; the mean loss of each."""
    means = []
    for _ in range(3):
        both = [loss_of(layer) for _ in range(2)]
        for loss in both:
            backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        means.append(sum(loss.item() for loss in both) / 2)
    return means


def test_the_loss_is_the_one_before_the_scaler(tmp_path: Path) -> None:
    """To the bit; weights, losses and scale are what they are without fp8dbg."""
    bare, layer = training(), training()
    expected = trained(*bare)
    layer = training()
    with fp8dbg.attach(layer[0], tmp_path, layer[1], every=1):
        assert trained(*layer) == expected
    assert losses(tmp_path) == expected
    assert torch.equal(bare[0].weight, layer[0].weight)
    assert bare[2].get_scale() == layer[2].get_scale()
    assert table(tmp_path, "select * from events") == []


def harms(layer: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, run_dir: Path) -> list[float]:
    """Impact and sensitivity of each fprop of a training."""
    with fp8dbg.attach(layer, run_dir, optimizer, every=1):
        trained(layer, optimizer, scaler)
    rows = table(run_dir, "select impact, sensitivity from gemms where gemm = 'fprop' order by step, microbatch")
    return [row[name] for row in rows for name in ("impact", "sensitivity")]


def test_what_an_error_does_to_the_loss_is_in_the_losses_units(tmp_path: Path) -> None:
    """The scaler multiplies every gradient; impact and sensitivity are what they are without it."""
    layer, optimizer, _ = training()
    expected = harms(layer, optimizer, GradScaler("cpu", enabled=False), tmp_path / "off")
    assert len(expected) == 12
    assert all(expected)
    assert harms(*training(), tmp_path / "on") == pytest.approx(expected, rel=1e-4)


def test_several_losses_that_are_scaled_at_once(tmp_path: Path) -> None:
    """Their sum is the root's value, as without a scaler."""
    layer, optimizer, scaler = training()
    with fp8dbg.attach(layer, tmp_path, optimizer):
        both = [loss_of(layer), loss_of(layer)]
        torch.autograd.backward(scaler.scale(both))
        scaler.step(optimizer)
    assert losses(tmp_path) == [both[0].item() + both[1].item()]


def test_a_scaler_that_is_off_changes_nothing(tmp_path: Path) -> None:
    """It hands the loss back as it is."""
    layer, optimizer, _ = training()
    scaler = GradScaler("cpu", enabled=False)
    with fp8dbg.attach(layer, tmp_path, optimizer):
        loss = loss_of(layer)
        backward(scaler.scale(loss))
        scaler.step(optimizer)
    assert losses(tmp_path) == [loss.item()]


def test_what_was_made_of_a_scaled_loss_is_no_loss(tmp_path: Path) -> None:
    """Nobody knows what it is: NULL, and one event that says what to do; a loss that is logged is recorded."""
    layer, optimizer, scaler = training()
    with fp8dbg.attach(layer, tmp_path, optimizer, every=1) as run:
        for step in range(3):
            backward(scaler.scale(loss_of(layer)) / 2 + 1.0)
            if step == 2:
                run.log(loss=0.5)
            scaler.step(optimizer)
            scaler.update()
    assert losses(tmp_path) == [None, None, 0.5]
    harm = "select count(*) as rows, count(impact) as impacts, count(sensitivity) as sensitivities from gemms"
    assert table(tmp_path, f"{harm} where gemm = 'fprop'") == [{"rows": 3, "impacts": 0, "sensitivities": 0}]
    (event,) = table(tmp_path, "select step, kind, detail from events")
    assert (event["step"], event["kind"]) == (0, "gap")
    assert "run.log(loss=...)" in event["detail"]


def test_a_loss_that_is_not_scaled_counts_beside_one_that_is(tmp_path: Path) -> None:
    """Each root is looked at by itself, however deep the model is behind it."""
    layer, optimizer, scaler = training()
    with fp8dbg.attach(layer, tmp_path, optimizer):
        one, other = loss_of(layer), loss_of(layer)
        for _ in range(50):
            other = other + 0.0
        backward(scaler.scale(one))
        backward(other)
        scaler.step(optimizer)
    assert losses(tmp_path) == [(one.item() + other.item()) / 2]


class Doubling(GradScaler):
    """Scales by itself, as FSDP's does."""

    def scale(self, outputs: Any) -> Any:
        """Twice as much."""
        return outputs * 2.0


def test_a_scaler_with_a_method_of_its_own_is_seen(tmp_path: Path) -> None:
    """Below torch's own class there are others; afterwards both are as they were."""
    original, own = GradScaler.scale, Doubling.scale
    layer, optimizer, _ = training()
    scaler = Doubling("cpu")
    with fp8dbg.attach(layer, tmp_path, optimizer):
        loss = loss_of(layer)
        backward(scaler.scale(loss))
        optimizer.step()
    assert losses(tmp_path) == [loss.item()]
    assert (GradScaler.scale, Doubling.scale) == (original, own)


def test_whoever_wraps_scale_in_turn_keeps_it(tmp_path: Path) -> None:
    """Ours stays below theirs, as with the backward function."""
    original = GradScaler.scale
    layer, optimizer, scaler = training()
    run = fp8dbg.attach(layer, tmp_path, optimizer)
    ours = GradScaler.scale

    def theirs(self: GradScaler, outputs: Any) -> Any:
        return ours(self, outputs)

    try:
        GradScaler.scale = theirs  # type: ignore[method-assign]  # what others do
        loss = loss_of(layer)
        backward(scaler.scale(loss))
        optimizer.step()
        run.close()
        assert GradScaler.scale is theirs
    finally:
        GradScaler.scale = original  # type: ignore[method-assign]  # back to torch's
    assert losses(tmp_path) == [loss.item()]


class Cautious(GradScaler):
    """Steps by itself, as far as it can."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """As its parent."""
        return super().step(optimizer, *args, **kwargs)


class Ahead(torch.optim.Optimizer):
    """Wraps another; its constructor calls nobody's, so torch knows nothing of its steps, nor of hooks on it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        """As the one within."""
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the one within."""
        self.inner.zero_grad(set_to_none)


def sgd(layer: nn.Linear) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(layer.parameters(), 0.01)]


def one_each(layer: nn.Linear) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([parameter], 0.01) for parameter in layer.parameters()]


def fused(layer: nn.Linear) -> list[torch.optim.Optimizer]:
    """Steps always; its kernel looks at the scaler's flag."""
    return [torch.optim.AdamW(layer.parameters(), 0.01, fused=True)]


def ahead(layer: nn.Linear) -> list[torch.optim.Optimizer]:
    return [Ahead(torch.optim.SGD(layer.parameters(), 0.01))]


@pytest.mark.parametrize("kind", [GradScaler, Cautious])
@pytest.mark.parametrize(("made", "given"), [*itertools.product([sgd, one_each, fused], [True, False]), (ahead, False)])
def test_a_step_that_is_left_out_has_its_own_rows(
    made: Callable[[nn.Linear], list[torch.optim.Optimizer]], given: bool, kind: type[GradScaler], tmp_path: Path
) -> None:
    """It is counted as the training loop counts it, and an event says so; the weights are those without fp8dbg."""

    def run(attached: bool) -> Tensor:
        torch.manual_seed(0)
        layer, scaler = nn.Linear(4, 2), kind("cpu", init_scale=4.0)
        optimizers = made(layer)
        run = fp8dbg.attach(layer, tmp_path, optimizers if given else None, every=1) if attached else None
        for factor in (1.0, math.inf, 1.0, 1.0):
            backward(scaler.scale(layer(torch.ones(3, 4)).square().mean() * factor))
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
        if run is not None:
            run.close()
        return layer.weight.detach()

    assert torch.equal(run(attached=True), run(attached=False))
    found = table(tmp_path, "select step, count(distinct microbatch) as n from amax group by step order by step")
    assert found == [{"step": step, "n": 1} for step in range(4)]
    told = table(tmp_path, "select step, detail from events where kind = 'left_out'")
    assert [row["step"] for row in told] == [1]
    assert "left the optimizer's step out" in told[0]["detail"]


def test_what_a_scaler_leaves_out_is_only_watched(tmp_path: Path) -> None:
    """Finding the largest scale that holds takes steps: no weight ever sees their gradients."""
    layer, optimizer, _ = training()
    scaler = GradScaler("cpu", init_scale=2.0**127)
    with fp8dbg.attach(layer, tmp_path, optimizer, every=1) as run:
        for _ in range(8):
            backward(scaler.scale(loss_of(layer) * 64))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    with fp8dbg.open_run(tmp_path) as run:
        left_out = run.rows("select step from events where kind = 'left_out'")
        found = [finding for finding in run.findings() if finding.code == "non_finite"]
    assert 3 <= len(left_out) < 8
    assert [finding.severity for finding in found] == ["watch"]
    assert "left every such step out" in found[0].basis


def test_a_training_that_a_scaler_holds_for_good_is_acted_on(tmp_path: Path) -> None:
    """Its loss stays finite as nothing is learned any more."""
    layer, optimizer, scaler = training()
    with fp8dbg.attach(layer, tmp_path, optimizer, every=1):
        for _ in range(30):
            output = layer(torch.randn(3, 4))
            output.register_hook(lambda grad: grad * math.nan)
            backward(scaler.scale(output.square().mean()))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    with fp8dbg.open_run(tmp_path) as run:
        assert run.rows("select count(*) as n from events where kind = 'left_out'") == [{"n": 30}]
        found = [finding for finding in run.findings() if finding.code == "non_finite"]
    assert [finding.severity for finding in found] == ["act"]
