"""``fp8dbg control``: what a live run is told, and what is in force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8dbg.errors import RunFolderError, UsageError
from fp8dbg.recording import sampling
from fp8dbg.recording.control import Control
from fp8dbg.recording.sampling import Sampling, Settings
from fp8dbg.runs.writer import RunWriter
from tests.command_line import Run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A live run that was attached to with every=50."""
    writer = RunWriter(tmp_path, 0, {"options": {"every": 50, "windows": [], "dump": [], "layers": ["*"]}})
    writer.flush()
    return tmp_path


def values(folder: Path) -> dict[str, tuple[Any, str]]:
    """Setting -> value in force, who set it."""
    return {row["setting"]: (row["value"], row["set_by"]) for row in Control(folder).in_force()}


def test_without_a_control_file_the_options_of_attach_are_in_force(folder: Path) -> None:
    """And defaults, where attach was not asked for anything."""
    assert values(folder)["every"] == (50, "attach")
    assert values(folder)["stop"] == (False, "default")


def test_a_live_run_follows_what_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file, read by the code that samples; names with quotes and accents arrive as they are."""
    monkeypatch.setattr(sampling, "LOOK_SECONDS", 0.0)
    told: list[tuple[str, str]] = []
    run = Sampling(Settings(every=50), folder, lambda kind, detail: told.append((kind, detail)))
    Control(folder).change({"every": 2, "layers": ['a"b\\é.*']})
    assert [run.decide(step) for step in (1, 2)] == [None, "every"]
    assert run.settings.layers == ('a"b\\é.*',)
    Control(folder).change({"stop": True})
    assert run.decide(4) is None
    assert run.settings.every == 2
    Control(folder).reset()
    assert [run.decide(step) for step in (2, 50)] == [None, "every"]
    assert [kind for kind, _ in told] == ["config"] * 3


def test_tensors_are_saved_once(folder: Path) -> None:
    """The next change does not ask for them again."""
    Control(folder).change({"dump": ["a:input"]})
    assert values(folder)["dump"] == (("a:input",), "control")
    Control(folder).change({"every": 3})
    assert values(folder)["dump"] == ((), "default")


def test_a_value_that_does_not_fit_is_refused_before_it_is_written(folder: Path) -> None:
    """A live run would only say that it does not follow it."""
    with pytest.raises(UsageError, match="cadence"):
        Control(folder).change({"every": -1})
    assert not (folder / "control.toml").exists()


def test_a_broken_file_is_said_and_can_be_reset(folder: Path) -> None:
    """Somebody edited it by hand."""
    (folder / "control.toml").write_text("every = ")
    with pytest.raises(UsageError, match="--reset"):
        Control(folder).in_force()
    Control(folder).reset()
    assert values(folder)["every"] == (50, "attach")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    """Nothing is written into it."""
    with pytest.raises(RunFolderError, match=tmp_path.name):
        Control(tmp_path).change({"every": 1})
    assert not list(tmp_path.iterdir())


def test_the_command_changes_and_shows(folder: Path, fp8dbg: Run) -> None:
    """Options in, what is in force out."""
    result = fp8dbg("control", folder, "--every", "5", "--dump", "a:input", "--stop", "--json")
    assert result.code == 0
    shown = json.loads(result.out)
    assert shown["finished"] is False
    assert {"setting": "every", "value": 5, "set_by": "control"} in shown["settings"]
    assert {"setting": "stop", "value": True, "set_by": "control"} in shown["settings"]
    assert (folder / "control.toml").read_text() == 'every = 5\ndump = ["a:input"]\nstop = true\n'
