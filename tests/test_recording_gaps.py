"""What cannot be attached to costs itself alone, and what is asked for but not done is said."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import fp8dbg
from fp8dbg.errors import UsageError
from fp8dbg.hooks import versions
from fp8dbg.recording.control import Control
from tests.nets import table


class Unhookable(nn.Linear):
    """A layer of a library that has its own idea of hooks."""

    def register_forward_hook(self, *_: Any, **__: Any) -> Any:
        """Refuses."""
        raise RuntimeError("no hooks here")


def step(model: nn.Module, optimizer: SGD) -> None:
    """One step of training."""
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_layer_that_cannot_be_hooked_costs_itself_alone(tmp_path: Path) -> None:
    """Its neighbours on both sides are recorded; an event and the findings name it."""
    model = nn.Sequential(nn.Linear(8, 8), Unhookable(8, 8), nn.Linear(8, 8))
    optimizer = SGD(model.parameters(), 0.1)
    with fp8dbg.attach(model, tmp_path, optimizer, every=1):
        step(model, optimizer)
    assert [row["layer"] for row in table(tmp_path, "select distinct layer from amax order by layer")] == ["0", "2"]
    (event,) = table(tmp_path, "select kind, layer, detail from events")
    assert (event["kind"], event["layer"]) == ("error", "1")
    assert "no hooks here" in event["detail"]
    with fp8dbg.open_run(tmp_path) as run:
        assert [finding.code for finding in run.findings()] == ["coverage"]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_that_is_still_to_be_compiled_is_no_gap(tmp_path: Path, in_place: bool) -> None:
    """Compiled but never called: everything will be recorded, and nothing is said."""
    torch._dynamo.reset()  # compiled code belongs to a class: another model's would count
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    optimizer = SGD(model.parameters(), 0.1)
    with fp8dbg.attach(model, tmp_path, optimizer, every=0):
        step(model, optimizer)
    torch._dynamo.reset()
    assert not [row for row in table(tmp_path, "select detail from events") if "compiled before" in row["detail"]]
    assert len(table(tmp_path, "select distinct layer from amax")) == 2


def test_a_cadence_that_no_run_can_reach_is_refused(tmp_path: Path) -> None:
    """By attach and by control, before anything is written."""
    with pytest.raises(UsageError, match="no cadence"):
        fp8dbg.attach(nn.Linear(2, 2), tmp_path / "none", every=10**40)
    assert not (tmp_path / "none").exists()
    fp8dbg.attach(nn.Linear(2, 2), tmp_path / "run").close()
    with pytest.raises(UsageError, match="no cadence"):
        Control(tmp_path / "run").change({"every": 10**40})
    with pytest.raises(UsageError, match="no window"):
        Control(tmp_path / "run").change({"windows": [[0, 10**40]]})
    assert not (tmp_path / "run" / "control.toml").exists()


class Config:
    """Looks like a Megatron configuration to what only looks."""

    fp8 = "hybrid"


Config.__module__ = "megatron.core.transformer.transformer_config"


def test_fp8_that_was_asked_for_and_is_not_done_is_a_finding(tmp_path: Path) -> None:
    """A configuration of Megatron's says fp8, and every layer is a plain one."""
    model: Any = nn.Sequential(nn.Linear(8, 8))
    model.config = Config()
    optimizer = SGD(model.parameters(), 0.1)
    with fp8dbg.attach(model, tmp_path, optimizer, every=1):
        step(model, optimizer)
    with fp8dbg.open_run(tmp_path) as run:
        assert run.meta["fp8_asked"] == "Megatron's configuration says fp8='hybrid'"
        assert run.findings()[0].code == "fp8_ignored"


def test_accelerates_precision_is_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mixed_precision="fp8" is kept in a state that all of a process shares; a simulated FP8 layer answers it."""
    fake: Any = ModuleType("accelerate.state")
    fake.AcceleratorState = type("AcceleratorState", (), {"_shared_state": {"_mixed_precision": "fp8"}})
    monkeypatch.setitem(sys.modules, "accelerate.state", fake)
    model = fp8dbg.simulate(nn.Sequential(nn.Linear(8, 8)), "current")
    optimizer = SGD(model.parameters(), 0.1)
    with fp8dbg.attach(model, tmp_path, optimizer, every=1):
        step(model, optimizer)
    with fp8dbg.open_run(tmp_path) as run:
        assert run.meta["fp8_asked"] == "Accelerate's mixed_precision is fp8"
        assert "fp8_ignored" not in [finding.code for finding in run.findings()]


@pytest.mark.parametrize("host", versions.KNOWN)
def test_versions_that_were_not_read_are_warned_of(tmp_path: Path, host: str) -> None:
    """With the version and what still works, as a warning and an event; a known one in silence."""
    first, last = versions.KNOWN[host]
    with fp8dbg.attach(nn.Linear(2, 2), tmp_path) as run:
        versions.tell_version(run.recorder, host, first)
        versions.tell_version(run.recorder, host, last)
        with pytest.warns(UserWarning, match=rf"{host} 99\.1 is not one .* seen|recorded"):
            versions.tell_version(run.recorder, host, (99, 1))
    (event,) = table(tmp_path, "select detail from events")
    assert event["detail"].startswith(f"{host} 99.1")
