"""``fp8dbg bisect``: trials that are run folders, state that survives a kill, and a planted fault found."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8dbg.bisecting import Asked, Bisection
from fp8dbg.errors import Fp8dbgError, NothingRecordedError, RunFolderError, UnknownNameError, UsageError
from fp8dbg.runs.folder import open_folder
from tests.command_line import ROOT, started


def bisecting(out: Path, count: Path) -> subprocess.Popen[str]:
    """A bisection of tests/bisected.py over whole layers."""
    options = ["--out", str(out), "--plan-space", "layers", "--last", "4", "--repeats", "1", "--json"]
    return started("bisect", *options, "--", sys.executable, ROOT / "tests" / "bisected.py", count, stderr=None)


def wait_until(happened: Callable[[], bool]) -> None:
    """Look twenty times a second, for five minutes."""
    deadline = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_planted_fault_is_found_across_a_kill(tmp_path: Path) -> None:
    """Killed after two trials it goes on with the third; the two layers that hold the fault are the plan."""
    out, count = tmp_path / "out", tmp_path / "count"
    first = bisecting(out, count)
    wait_until(lambda: count.exists() and count.stat().st_size >= 3)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert first.stdout is not None
    first.stdout.close()
    done = json.loads((out / "bisect.json").read_text())["trials"]
    assert [len(trial["in_bf16"]) for trial in done] == [0, 4]

    second = bisecting(out, count)
    said, _ = second.communicate(timeout=300)
    answer = json.loads(said)
    assert second.returncode == 0
    assert answer["trials"][:2] == done
    assert [entry["layer"] for entry in answer["found"]["plan"]["entries"]] == ["0", "2"]
    assert json.loads((out / "plan.json").read_text())["entries"][0]["gemms"] == ["fprop", "dgrad", "wgrad"]
    assert count.stat().st_size == len(answer["trials"]) + 1  # the one that was killed was begun twice
    losses = [trial["loss"] for trial in answer["trials"]]
    assert losses[1] < 0.05 * losses[0]
    for trial in answer["trials"]:
        with open_folder(out / "trials" / trial["folder"]) as folder:
            assert [row["step"] for row in folder.rows("select step from steps order by step")] == list(range(6))
        assert len((out / "trials" / f"{trial['folder']}.log").read_text().splitlines()) >= 6


SLEEPERS = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
"""Says its number and its child's; both would sleep for ten minutes."""


def is_alive(number: int) -> bool:
    """Whether a process runs; one that has ended, and that nobody has asked for its exit code, does not."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True, check=False)
    return done.stdout.strip()[:1] not in ("", "Z")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_bisection_that_ends_takes_its_trial_with_it(tmp_path: Path, sent: signal.Signals) -> None:
    """The program and what it started, however the bisection ends; no further trial is begun."""
    said = tmp_path / "said"
    options = ["--out", str(tmp_path / "out"), "--", sys.executable, "-c", SLEEPERS, str(said)]
    bisection = started("bisect", *options, stderr=subprocess.DEVNULL)
    wait_until(said.exists)
    numbers = [int(word) for word in said.read_text().split()]
    assert [is_alive(number) for number in numbers] == [True, True]
    bisection.send_signal(sent)
    assert bisection.wait(60) == (-sent if sent == signal.SIGKILL else 128 + sent)
    wait_until(lambda: not any(map(is_alive, numbers)))
    assert [path.name for path in (tmp_path / "out" / "trials").iterdir() if path.suffix == ".log"] == ["0000.log"]


def test_what_a_trial_leaves_behind_is_ended(tmp_path: Path) -> None:
    """It would train on beside the next one."""
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    with pytest.raises(NothingRecordedError):
        Bisection(tmp_path / "out", Asked((sys.executable, "-c", code))).run()
    assert not is_alive(int((tmp_path / "out" / "trials" / "0000.log").read_text()))


@pytest.mark.parametrize(
    ("options", "error"),
    [({"space": "pairs"}, UnknownNameError), ({"last": 0}, UsageError), ({"repeats": 0}, UsageError)],
)
def test_what_is_asked_is_checked(options: dict[str, object], error: type[Fp8dbgError]) -> None:
    """Before anything is run."""
    with pytest.raises(error):
        Asked(("true",), **options)  # type: ignore[arg-type]


def test_a_folder_of_another_question_is_not_continued(tmp_path: Path) -> None:
    """Its trials would not be comparable; nor is a folder of something else written into."""
    state = {"version": 1, "asked": {"command": ["a"], "space": "gemms", "last": 20, "repeats": 2}, "trials": []}
    (tmp_path / "bisect.json").write_text(json.dumps(state))
    assert Bisection(tmp_path, Asked(("a",))).trials == []
    with pytest.raises(UsageError, match="another question"):
        Bisection(tmp_path, Asked(("b",)))
    (tmp_path / "bisect.json").write_text("{")
    with pytest.raises(RunFolderError):
        Bisection(tmp_path, Asked(("a",)))
    (tmp_path / "bisect.json").rename(tmp_path / "thesis.tex")
    with pytest.raises(UsageError, match="something else"):
        Bisection(tmp_path, Asked(("a",)))


def test_a_program_that_trains_nothing_says_so(tmp_path: Path) -> None:
    """Exit 3, with the log of what it printed."""
    with pytest.raises(NothingRecordedError, match=r"0000\.log"):
        Bisection(tmp_path / "out", Asked((sys.executable, "-c", "print('nothing')"))).run()
    assert (tmp_path / "out" / "trials" / "0000.log").read_text() == "nothing\n"


RENAMED = """
import os, torch, fp8dbg
from torch import nn
name = "renamed" if os.environ["FP8DBG_REPEAT"] == "1" else "layer"
model = nn.Sequential()
model.add_module(name, nn.Linear(16, 16))
model = fp8dbg.simulate(model, "current")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_trial_that_did_not_follow_its_plan_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is called otherwise in the second repeat, on a rank that cannot know: no loss, and no answer from it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    bisection = Bisection(tmp_path / "out", Asked((sys.executable, "-c", RENAMED), last=1))
    with pytest.raises(UsageError, match="Not everything can be put in BF16: No model has layer"):
        bisection.run()
    assert [trial.unplanned for trial in bisection.trials] == ["", "", "", "No model has layer."]
    assert [trial.loss is None for trial in bisection.trials] == [False, False, False, True]
