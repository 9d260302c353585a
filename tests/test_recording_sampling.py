"""When and what is measured in full: cadence, windows, the control file, dumps, limits."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8dbg
from fp8dbg.errors import UsageError
from fp8dbg.recording import sampling
from fp8dbg.recording.dumps import Dumps
from fp8dbg.recording.names import canonical_name
from fp8dbg.recording.sampling import Sampling, Settings
from fp8dbg.runs.folder import open_folder
from tests.nets import Case, Net, attached, build, table, train_step


def _decisions(tmp_path: Path, steps: int, **settings: Any) -> dict[int, str]:
    """Step -> reason, of the steps measured."""
    chosen = Sampling(Settings().changed(settings), tmp_path, lambda kind, detail: None)
    return {step: why for step in range(steps) if (why := chosen.decide(step)) is not None}


def test_every_nth_step_and_every_step_of_a_window(tmp_path: Path) -> None:
    """Windows are inclusive; 0 is never."""
    assert _decisions(tmp_path, 7, every=3) == {0: "every", 3: "every", 6: "every"}
    assert _decisions(tmp_path, 7, every=0) == {}
    assert _decisions(tmp_path, 7, every=5, windows=[(2, 3)]) == {0: "every", 2: "window", 3: "window", 5: "every"}


def test_a_trigger_lasts_three_steps_and_does_not_start_again_meanwhile(tmp_path: Path) -> None:
    """A loss that stays NaN does not measure the rest of the run."""
    chosen = Sampling(Settings(every=0), tmp_path, lambda kind, detail: None)
    assert chosen.trigger(4)
    assert not chosen.trigger(5)
    assert [chosen.decide(step) for step in range(5, 9)] == ["trigger", "trigger", "trigger", None]


@pytest.mark.parametrize(
    "values",
    [{"every": "often"}, {"every": -3}, {"cadence": 3}, {"windows": [[3]]}, {"tensors": ["inputs"]}, {"windows": 3}],
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, Any]) -> None:
    """Unknown keys list the known ones."""
    with pytest.raises(UsageError):
        Settings().changed(values)


def _write_control(run_dir: Path, text: str, stamp: list[int] = [0]) -> None:  # noqa: B006  a clock for all tests
    """Write control.toml with a time of its own: two writes may fall into one tick of the file system's clock."""
    path = run_dir / sampling.CONTROL
    path.write_text(text, encoding="utf-8")
    stamp[0] += 1
    os.utime(path, (time.time(), 1_000_000_000 + stamp[0]))


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the control file at every step."""
    monkeypatch.setattr(sampling, "LOOK_SECONDS", 0.0)


@pytest.mark.usefixtures("_impatient")
def test_a_live_run_follows_its_control_file(tmp_path: Path) -> None:
    """Cadence, layers and tensors change at the next step boundary; taking the file away restores attach's options."""
    with attached(tmp_path, every=0) as (run, step):
        step()
        _write_control(run.path, 'every = 1\nlayers = ["*.up"]\ntensors = ["input"]\n')
        step()
        step()
        (run.path / sampling.CONTROL).unlink()
        step()
        step()
    rows = table(tmp_path / "run", "select step, layer, tensor from tensors order by all")
    expected = [{"step": 2, "layer": f"blocks.{b}.up", "tensor": "input"} for b in range(2)]
    assert rows == [*expected, *({**row, "step": 3} for row in expected)]
    events = table(tmp_path / "run", "select kind, detail from events order by step")
    assert [row["kind"] for row in events] == ["config", "config"]
    assert "every = 1" in events[0]["detail"]


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("text", ["every = ", "every = 'x'", "speed = 3", "\x00"])
def test_a_control_file_that_makes_no_sense_changes_nothing(text: str, tmp_path: Path) -> None:
    """The settings in force stay; one event says what is wrong."""
    with attached(tmp_path, every=2) as (run, step):
        _write_control(run.path, text)
        for _ in range(4):
            step()
    assert [r["sampled"] for r in table(tmp_path / "run", "select sampled from steps order by step")] == [1, 0, 1, 0]
    (event,) = table(tmp_path / "run", "select kind, detail from events")
    assert event["kind"] == "error"
    assert "control.toml is not followed" in event["detail"]


@pytest.mark.usefixtures("_impatient")
def test_recording_can_be_stopped_and_started(tmp_path: Path) -> None:
    """While stopped, steps are counted and nothing else."""
    with attached(tmp_path, every=1) as (run, step):
        step()
        _write_control(run.path, "stop = true\n")
        step()
        step()
        step()
        _write_control(run.path, "stop = false\n")
        step()
        step()
    assert [row["step"] for row in table(tmp_path / "run", "select distinct step from amax order by step")] == [0, 1, 5]


@pytest.mark.usefixtures("_impatient")
def test_a_dump_that_the_control_file_asks_for_is_made_once(tmp_path: Path) -> None:
    """At the next step, whether or not it would have been measured; the values are those that the GEMM read."""
    with attached(tmp_path, every=0) as (run, step):
        step()
        _write_control(run.path, 'dump = ["*.down:input", "head:grad_output"]\n')
        for _ in range(3):
            step()
    found = sorted(p.name for p in (tmp_path / "run/dumps/rank=00000").rglob("*.safetensors"))
    assert found == [
        "blocks.0.down.input.safetensors",
        "blocks.1.down.input.safetensors",
        "head.grad_output.safetensors",
    ]
    assert table(tmp_path / "run", "select step, reason from steps where sampled") == [{"step": 2, "reason": "control"}]


def test_dumps_of_attach_are_made_on_every_measured_step(tmp_path: Path) -> None:
    """Of the step's first microbatch; read back they are the tensor."""
    from fp8dbg.runs.dumps import find_dumps

    case = Case(microbatches=2)
    model, optimizers = build(case)
    assert isinstance(model, Net)
    with fp8dbg.attach(model, tmp_path, every=2, dump="head:weight"):
        before = model.head.weight.detach().bfloat16()
        for _ in range(3):
            train_step(case, model, optimizers)
    dumps = find_dumps(tmp_path)
    assert [(d.step, d.layer, d.tensor) for d in dumps] == [(0, "head", "weight"), (2, "head", "weight")]
    assert torch.equal(dumps[0].load(), before)


def test_each_tensor_is_taken_once_a_step() -> None:
    """Names with a colon of their own are matched up to the last one."""
    dumps = Dumps(["a:b:input"])
    assert not dumps.take("a", "input")
    assert [dumps.take("a:b", "input") for _ in range(2)] == [True, False]


def test_only_the_layers_asked_for_are_hooked(tmp_path: Path) -> None:
    """The others cost nothing at all."""
    model = Net()
    with fp8dbg.attach(model, tmp_path, layers="*.up"):
        assert model.get_submodule("blocks.0.up")._forward_hooks
        assert not model.head._forward_hooks


def test_a_size_limit_stops_recording_not_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line of log; the rows until then are there, and the folder says that it was stopped."""
    with attached(tmp_path, every=1, max_bytes=20_000) as (_, step):
        for _ in range(4):
            step()
    assert "limit of 20000 bytes" in caplog.text
    folder = open_folder(tmp_path / "run")
    assert "limit of 20000 bytes" in folder.problems[0]
    assert 0 < len(folder.sql("select distinct step from amax").df()) < 4
    folder.close()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("module.layers.0.up", "layers.0.up"),
        ("module.module.layers.0.up", "layers.0.up"),
        ("_orig_mod.layers.0._checkpoint_wrapped_module.up", "layers.0.up"),
        ("layers.0._fsdp_wrapped_module.module.up", "layers.0.module.up"),
        ("layers.0._orig_mod", "layers.0"),
        ("module", ""),
        ("submodule.x_orig_mod.y", "submodule.x_orig_mod.y"),
    ],
)
def test_names_are_those_of_the_model_whatever_wraps_it(path: str, name: str) -> None:
    """A segment of the user's own that only looks like a wrapper's stays."""
    assert canonical_name(path) == name
