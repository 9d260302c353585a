"""What makes a live run look closer: spikes, NaN, limits; and what is saved of the steps before and after."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8dbg
from fp8dbg.errors import UsageError
from fp8dbg.recording import sampling, triggers
from fp8dbg.recording.control import Control
from fp8dbg.recording.launch import Options
from fp8dbg.recording.sampling import REST, Sampling, Settings
from fp8dbg.recording.triggers import Losses, Ring, figure_limit, past_limit
from fp8dbg.runs.dumps import find_dumps
from fp8dbg.runs.folder import RunWriter
from tests.nets import Outcome, attached, outcome, table

# The loss.


def unusual(losses: list[float], spike: float = 10.0) -> list[int]:
    """Steps whose loss is worth a closer look."""
    seen = Losses()
    return [step for step, loss in enumerate(losses) if seen.unusual(step, loss, spike)]


def noisy(steps: int, noise: float = 0.05, seed: int = 0) -> list[float]:
    """A loss that falls and is noisy."""
    draw = random.Random(seed)
    return [2.0 + 3.0 * math.exp(-step / 50) + draw.gauss(0.0, noise) for step in range(steps)]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2])
def test_a_loss_that_falls_noisily_has_no_spikes(noise: float) -> None:
    """No false alarm in 20 runs of 1,000 steps, whatever the noise."""
    assert [unusual(noisy(1000, noise, seed)) for seed in range(20)] == [[]] * 20


@pytest.mark.parametrize("step", [20, 100, 499])
def test_a_spike_is_seen_on_its_step(step: int) -> None:
    """A doubled loss, early and late; a smaller score sees smaller ones, and 0 none."""
    losses = noisy(500)
    losses[step] *= 2.0
    assert unusual(losses) == [step]
    assert unusual(losses, spike=0.0) == []


@pytest.mark.parametrize(("height", "seen"), [(4.0, [150]), (1.0, [])])
def test_a_loss_that_none_came_near_needs_a_lower_score(height: float, seen: list[int]) -> None:
    """Losses of small batches wander by a sixth: 6 after 2 is a spike all the same, and a hard batch is none."""
    draw = random.Random(0)
    losses = [draw.gauss(2.0, 0.33) for _ in range(200)]
    losses[150] = 2.0 + height
    assert unusual(losses) == seen
    assert unusual(losses, spike=30.0) == []


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_not_finite_is_always_unusual(loss: float) -> None:
    """From the first step on, and however high the score."""
    assert unusual([loss, 1.0, loss], spike=0.0) == [0, 2]


def test_what_is_logged_late_is_compared_with_what_was_logged() -> None:
    """The backward root, multiplied by a loss scaler, and then the loss itself: neither is a spike beside the other."""
    seen = Losses()
    for step in range(40):
        assert seen.unusual(step, 65536.0 * (1.0 + 0.01 * (step % 3)), 10.0) is None
        assert seen.unusual(step, 1.0 + 0.01 * (step % 3), 10.0) is None
    assert seen.unusual(40, 65536.0, 10.0) is None
    assert seen.unusual(40, 3.0, 10.0)


# Limits.


@pytest.mark.parametrize(
    ("text", "row", "past"),
    [
        ("underflow_ratio > 0.5", {"underflow": 60, "numel": 110, "zeros": 10}, True),
        ("underflow_ratio > 0.5", {"underflow": 50, "numel": 110, "zeros": 10}, False),
        ("underflow_ratio > 0.5", {"underflow": None}, False),
        ("saturated_ratio>1e-3", {"saturated": 1}, True),
        ("b*:input amax > 3", {"amax": 4.0}, False),
        ("a*:input amax > 3", {"amax": 4.0}, True),
        ("*:weight amax > 3", {"amax": 4.0}, False),
        ("cosine < 0.9", {"cosine": 0.5}, True),
        ("cosine < 0.9", {"cosine": None}, False),
    ],
)
def test_a_limit_is_broken_by_its_own_tensors(text: str, row: dict[str, Any], past: bool) -> None:
    """Shares of the non-zero and of the finite elements; a figure that does not exist breaks nothing."""
    whole = {"layer": "a", "tensor": "input", "numel": 100, "zeros": 0, "nan": 0, "inf": 0} | row
    found = past_limit([whole], [figure_limit(text)])
    assert (found is not None) == past
    assert found is None or (found[0] == "a" and text in found[1])


@pytest.mark.parametrize("text", ["underflow", "speed > 3", "amax > much", "a:bias amax > 3", "amax = 3", ""])
def test_what_is_no_limit_is_refused(text: str) -> None:
    """With what one looks like."""
    with pytest.raises(UsageError):
        Settings().changed({"limits": [text]})


@pytest.mark.parametrize("values", [{"trigger_steps": -1}, {"trigger_steps": 1.5}, {"spike": -1}, {"spike": math.inf}])
def test_settings_of_triggers_are_checked(values: dict[str, Any]) -> None:
    """As all others are."""
    with pytest.raises(UsageError):
        Settings().changed(values)


def test_after_a_trigger_nothing_triggers_for_a_while(tmp_path: Path) -> None:
    """K steps are measured, ten times K pass: what stays broken costs 1 step in 11 at most."""
    chosen = Sampling(Settings(every=0, trigger_steps=2), tmp_path, lambda kind, detail: None)
    measured = []
    for step in range(100):
        measured += [step] if chosen.decide(step) == "trigger" else []
        chosen.trigger(step)
    assert measured[:4] == [1, 2, 24, 25]
    assert 2 * (REST + 1) == 22
    assert len(measured) <= 100 // (REST + 1) + 2


def test_zero_steps_turn_triggers_off(tmp_path: Path) -> None:
    """Then nothing triggers."""
    assert not Sampling(Settings(trigger_steps=0), tmp_path, lambda kind, detail: None).trigger(3)


# The ring.


def test_the_ring_holds_the_last_tensors_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded in bytes: the oldest go, one that is too large never comes in; saved, it is empty."""
    monkeypatch.setattr(triggers, "RING_BYTES", 4 * 400)
    ring = Ring()
    for step in range(10):
        ring.open(("a:input",))
        ring.keep(step, "a", "input", torch.full((100,), float(step)))
        ring.keep(step, "a", "input", torch.zeros(100))  # the step's second one
        ring.keep(step, "a", "weight", torch.zeros(100))
    ring.open(("a:input",))
    ring.keep(10, "a", "input", torch.zeros(101))
    with RunWriter(tmp_path / "run") as writer:
        ring.save(writer)
        ring.save(writer)
    found = find_dumps(tmp_path / "run")
    assert [(d.step, float(d.load()[0])) for d in found] == [(6, 6.0), (7, 7.0), (8, 8.0), (9, 9.0)]


# While training.


def train(path: Path | None, spoil: int | None, bad: float = 60.0, **options: Any) -> Outcome:
    """A layer learns a linear map for 30 steps; the target of step ``spoil`` is ``bad`` times as large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    losses = []
    session = fp8dbg.attach(model, path, optimizer=optimizer, **options) if path else None
    for step in range(30):
        x = torch.randn(64, 16)
        loss = (model(x) - x[:, :8] * (bad if step == spoil else 1.0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if session is not None:
        session.close()
    return outcome(losses, model)


def test_a_spike_is_measured_and_its_tensors_saved(tmp_path: Path) -> None:
    """Steps 21 to 23 in full and saved, the sampled steps before from the ring; training as without us, bit for bit."""
    bare = train(None, 20)
    bare.assert_same(train(tmp_path, 20, every=8, trigger_dump="0:input"))
    sampled = table(tmp_path, "select step, reason from steps where sampled order by step")
    assert [(r["step"], r["reason"]) for r in sampled] == [
        (0, "every"), (8, "every"), (16, "every"), (21, "trigger"), (22, "trigger"), (23, "trigger"), (24, "every"),
    ]  # fmt: skip
    (event,) = table(tmp_path, "select step, kind, detail from events")
    assert (event["step"], event["kind"]) == (20, "trigger")
    assert "Steps 21 to 23 are measured in full" in event["detail"]
    assert [(d.step, d.layer, d.tensor) for d in find_dumps(tmp_path)] == [
        (step, "0", "input") for step in (0, 8, 16, 21, 22, 23)
    ]


def test_a_figure_past_its_limit_triggers(tmp_path: Path) -> None:
    """On the measured step on which it is past; the event names layer, figure and limit."""
    train(tmp_path, None, every=8, limits=["2:input amax > 0.1"], trigger_steps=2)
    event, *_ = table(tmp_path, "select step, layer, detail from events where kind = 'trigger' order by step")
    assert (event["step"], event["layer"]) == (0, "2")
    assert "amax" in event["detail"]
    sampled = table(tmp_path, "select step from steps where reason = 'trigger' order by step")
    assert [r["step"] for r in sampled][:2] == [1, 2]


def test_a_nan_in_an_operand_triggers_before_any_loss_is_logged(tmp_path: Path) -> None:
    """Seen in the amax of the very step; still so when its rest is over, it triggers again."""
    train(tmp_path, 12, bad=math.nan, every=0, trigger_steps=1)
    event = table(tmp_path, "select step, layer, detail from events where kind = 'trigger'")[0]
    assert event["step"] == 12
    assert "NaN" in event["detail"] or "nan" in event["detail"]
    assert [r["step"] for r in table(tmp_path, "select step from steps where sampled order by step")] == [13, 25]


def test_without_a_request_nothing_is_kept(tmp_path: Path) -> None:
    """The defaults measure three steps after a spike and save nothing."""
    train(tmp_path, 20, every=0)
    assert [r["step"] for r in table(tmp_path, "select step from steps where sampled")] == [21, 22, 23]
    assert find_dumps(tmp_path) == []


def test_triggers_can_be_off(tmp_path: Path) -> None:
    """Not even a loss that is not finite is followed."""
    train(tmp_path, 12, bad=math.nan, every=0, trigger_steps=0)
    assert table(tmp_path, "select step from steps where sampled") == []


def test_a_live_run_is_told_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the control file, as by ``fp8dbg control --limit``; attach's own are listed beside them."""
    monkeypatch.setattr(sampling, "LOOK_SECONDS", 0.0)
    with attached(tmp_path, every=4, trigger_steps=1) as (run, step):
        Control(run.path).change({"limits": ["head:input amax > 0"]})
        for _ in range(6):
            step()
        settings = {row["setting"]: (row["value"], row["set_by"]) for row in Control(run.path).in_force()}
    assert settings["limits"] == (("head:input amax > 0",), "control")
    assert settings["trigger_steps"] == (1, "attach")
    (event,) = table(tmp_path / "run", "select step, layer from events where kind = 'trigger'")
    assert event == {"step": 4, "layer": "head"}


def test_limits_of_a_launched_program_are_checked_before_it_runs(tmp_path: Path) -> None:
    """A typing error must not cost a training run."""
    with pytest.raises(UsageError, match="no limit"):
        Options(tmp_path, limits=("underflow",))
    with pytest.raises(UsageError, match="names no tensor"):
        Options(tmp_path, trigger_dump=("head",))
