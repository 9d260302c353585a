"""``fp8dbg run``: programs that have never heard of fp8dbg are recorded, and end as they would have."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from fp8dbg.analysis.run import open_run
from fp8dbg.errors import UnknownNameError, UsageError
from fp8dbg.recording.launch import Options, Outcome, environment, launch
from fp8dbg.runs.plan import Plan, PlanEntry
from tests.command_line import in_a_process
from tests.nets import table

ROOT = Path(__file__).resolve().parent.parent
PLAIN = ROOT / "tests" / "launched_plain.py"


class Recorded(NamedTuple):
    """Two runs of one program, bare and by ``fp8dbg run``, and where the second was recorded."""

    bare: str
    out: str
    err: str
    folder: Path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The plain script, where the user has a sitecustomize of their own."""
    place = tmp_path_factory.mktemp("plain")
    (place / "site").mkdir()
    (place / "site" / "sitecustomize.py").write_text("import sys; print('customized', file=sys.stderr)\n")
    bare = subprocess.run([sys.executable, PLAIN], capture_output=True, text=True, check=True)
    arguments = ("run", "--out", "here", "--every", 2, sys.executable, PLAIN)
    done = in_a_process(*arguments, place=place, PYTHONPATH=str(place / "site"))
    assert done.code == 0, done.err
    return Recorded(bare.stdout, done.out, done.err, place / "here")


@pytest.mark.slow
def test_an_unmodified_script_trains_as_it_would_have(recorded: Recorded) -> None:
    """Every loss, the weights and the next random number, to the last digit."""
    assert len(recorded.bare.splitlines()) == 6
    assert recorded.out == recorded.bare


@pytest.mark.slow
def test_an_unmodified_script_is_recorded(recorded: Recorded) -> None:
    """Steps with their losses, amaxes at each step, figures at every second, a report; and where it is, is said."""
    printed = [float(line.split()[1]) for line in recorded.bare.splitlines()[:5]]
    steps = table(recorded.folder, "select step, loss, sampled from steps order by step")
    assert [row["loss"] for row in steps] == pytest.approx(printed, rel=1e-6)
    assert [row["step"] for row in steps if row["sampled"]] == [0, 2, 4]
    counts = "select layer, count(*) as n, count(distinct step) as steps from {} group by layer order by layer"
    assert [tuple(r.values()) for r in table(recorded.folder, counts.format("amax"))] == [("0", 15, 5), ("3", 15, 5)]
    figures = [tuple(r.values()) for r in table(recorded.folder, counts.format("gemms"))]
    assert [(layer, steps) for layer, _, steps in figures] == [("0", 3), ("3", 3)]
    with open_run(recorded.folder) as run:
        assert run.meta["finished"]
        assert isinstance(run.findings(), list)
    assert "Recorded in" in recorded.err
    assert "fp8dbg report" in recorded.err


@pytest.mark.slow
def test_another_sitecustomize_still_runs(recorded: Recorded) -> None:
    """The user's own, further down PYTHONPATH: once in the launcher, once in the script."""
    assert recorded.err.splitlines().count("customized") == 2


@pytest.mark.slow
def test_both_ranks_of_torchrun_are_recorded(tmp_path: Path) -> None:
    """The agent, which imports torch and trains nothing, leaves no trace."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    done = in_a_process("run", "--out", "two", "--every", 3, "--json", "--", *torchrun, PLAIN, place=tmp_path)
    assert done.code == 0, done.err
    rows = table(tmp_path / "two", "select rank, layer, count(*) as n from amax group by all order by all")
    assert [tuple(row.values()) for row in rows] == [(0, "0", 15), (0, "3", 15), (1, "0", 15), (1, "3", 15)]
    losses = table(tmp_path / "two", "select rank, count(loss) as n from steps group by rank order by rank")
    assert [tuple(row.values()) for row in losses] == [(0, 5), (1, 5)]
    assert not table(tmp_path / "two", "select * from events")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two"]
    assert '"detail": ""' in done.out


def _launched(tmp_path: Path, code: str, *flags: str, **options: object) -> Outcome:
    """How a script ends."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    return launch([sys.executable, *flags, str(script)], Options(tmp_path / "run", **options))  # type: ignore[arg-type]


def test_a_script_without_torch_is_as_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing heavy is imported, its path holds nothing of ours, its exit code is kept, and what is missing is said."""
    code = """
        import sys
        heavy = {"torch", "numpy", "pyarrow", "json", "importlib.util", "typing", "fp8dbg"}
        print(sorted(heavy & set(sys.modules)), [entry for entry in sys.path if "boot" in entry], file=sys.stderr)
        sys.exit(7)
    """
    outcome = _launched(tmp_path, code)
    bare = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False)
    assert capfd.readouterr().err == bare.stderr
    assert (outcome.code, outcome.folders) == (7, ())
    assert "no PyTorch model" in outcome.detail
    assert not (tmp_path / "run").exists()


def test_a_python_that_ignores_its_environment_is_told_of(tmp_path: Path) -> None:
    """Under -I no process looks for fp8dbg; the exit code stays the program's."""
    outcome = _launched(tmp_path, "pass", "-I")
    assert outcome.code == 0
    assert "-I, -E and -S" in outcome.detail


def test_a_program_that_a_signal_ends_is_128_and_its_number(tmp_path: Path) -> None:
    """As a shell has it."""
    assert _launched(tmp_path, "import os; os.kill(os.getpid(), 15)").code == 143


def test_a_signal_to_us_reaches_the_program(tmp_path: Path) -> None:
    """A scheduler ends a job by its first process: the program may still save what it has, and its exit code counts."""
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    command = [sys.executable, "-m", "fp8dbg", "run", "--out", str(tmp_path / "run"), sys.executable, str(script)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.terminate()
        assert launcher.wait(60) == 9


def test_a_command_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    """As any wrong usage."""
    with pytest.raises(UsageError, match="no-such-program cannot be started: No such file"):
        launch(["no-such-program"], Options(tmp_path / "run"))


@pytest.mark.slow
def test_a_resumed_program_goes_on_counting(tmp_path: Path) -> None:
    """--first-step: its steps follow those of the run that the folder holds."""
    for first in (0, 5):
        done = in_a_process("run", "--out", "run", "--first-step", first, sys.executable, PLAIN, place=tmp_path)
        assert done.code == 0, done.err
    steps = table(tmp_path / "run", "select step from steps order by step")
    assert [row["step"] for row in steps] == list(range(10))
    assert not table(tmp_path / "run", "select * from events")


def test_options_are_checked_before_anything_starts(tmp_path: Path) -> None:
    """A recipe that does not exist would else be found out by each rank, minutes later."""
    with pytest.raises(UnknownNameError, match="delayed"):
        Options(tmp_path, recipe="fp9")
    with pytest.raises(UsageError, match="cadence"):
        Options(tmp_path, every=-1)


def test_the_environment_keeps_the_users_path_behind_ours(tmp_path: Path) -> None:
    """Without one of their own no empty entry is made, which would be the current folder."""
    options = Options(tmp_path)
    boot = str(ROOT / "fp8dbg" / "recording" / "boot")
    assert environment(options, tmp_path, {"PYTHONPATH": "a"})["PYTHONPATH"] == f"{boot}{os.pathsep}a"
    assert environment(options, tmp_path, {"PYTHONPATH": ""})["PYTHONPATH"] == boot


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code", "finished"), [("crash", 1, True), ("kill", 137, False)])
def test_what_a_program_recorded_before_it_failed_is_there(
    tmp_path: Path, ending: str, code: int, finished: bool
) -> None:
    """An exception of the program's, or a kill: its exit code and its rows."""
    outcome = launch([sys.executable, str(PLAIN), ending], Options(tmp_path / "run", every=1))
    assert (outcome.code, outcome.detail) == (code, "")
    steps = table(tmp_path / "run", "select step from steps where sampled order by step")
    assert [row["step"] for row in steps] == [0, 1, 2]
    with open_run(tmp_path / "run") as run:
        assert run.meta["finished"] is finished


@pytest.mark.slow
def test_a_plan_is_applied_to_a_simulated_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step on, without a change to the program; the run says so."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    plan = tmp_path / "plan.json"
    plan.write_text(Plan((PlanEntry("2", ("fprop", "wgrad")),)).to_json())
    code = """
        import fp8dbg, torch
        from torch import nn
        model = fp8dbg.simulate(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), "current")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.randn(8, 16)).sum().backward()
            optimizer.step()
        print(sorted(model[0].fp8_fallback), sorted(model[2].fp8_fallback))
    """
    outcome = _launched(tmp_path, code, fallback=plan, every=1)
    assert (outcome.code, outcome.detail) == (0, "")
    assert capfd.readouterr().out == "[] ['fprop', 'wgrad']\n"
    said = table(tmp_path / "run", "select detail from events where kind = 'config'")
    assert said[0]["detail"] == f"The fallback plan {plan} is applied: 1 layer."
    computed = table(tmp_path / "run", "select distinct gemm, recipe from gemms where layer = '2'")
    assert {row["gemm"]: row["recipe"] for row in computed} == {"dgrad": "current"}  # the others are not FP8


PLAIN_LAYER = """
    import torch
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(8, 16)).sum().backward()
    optimizer.step()
    print("trained")
"""


def test_a_plan_that_fits_no_model_stops_the_program(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 2 before the first step: nobody takes the run for one with the plan."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    plan = tmp_path / "plan.json"
    plan.write_text(Plan((PlanEntry("elsewhere", ("fprop",)),)).to_json())
    outcome = _launched(tmp_path, PLAIN_LAYER, fallback=plan, every=1)
    assert outcome.code == 2
    assert "No layer is called 'elsewhere'. Valid names: Linear." in outcome.detail
    assert "trained" not in capfd.readouterr().out
    assert outcome.folders == ()


@pytest.mark.slow
def test_a_layer_that_no_rank_has_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each process may hold a stage of the model, only the launcher knows; on several machines it does not."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("WORLD_SIZE", "2")
    plan = tmp_path / "plan.json"
    plan.write_text(Plan((PlanEntry("Linear", ("fprop",)), PlanEntry("elsewhere", ("fprop",)))).to_json())
    for local, missing in (("2", ("elsewhere",)), ("1", ())):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        (tmp_path / local).mkdir()
        outcome = _launched(tmp_path / local, PLAIN_LAYER, fallback=plan, every=1)
        assert (outcome.code, outcome.missing) == (0, missing)
        assert ("are in no model: elsewhere." in outcome.detail) == bool(missing)
        command = ("run", "--fallback", plan, "--out", "again", sys.executable, tmp_path / local / "script.py")
        assert in_a_process(*command, place=tmp_path / local).code == (2 if missing else 0)
