"""Run folders that are damaged or hostile, and surroundings that are: a sentence, the right exit code, nothing lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8dbg.errors import RunFolderError, UsageError
from fp8dbg.recording import sampling
from fp8dbg.recording.sampling import Sampling, Settings, read_control
from fp8dbg.runs.folder import RunWriter, open_folder
from tests.command_line import in_a_process
from tests.recorded import rows_of


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A run folder of three steps whose layer names no ASCII holds."""
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        for step in range(3):
            for table, rows in rows_of(step, layers=("é🙂", "b")).items():
                writer.append(table, rows)
    return path


@pytest.mark.parametrize("kind", ["pipe", "device", "huge", "folder", "nested", "not text"])
def test_a_control_file_of_any_kind_holds_nobody_up(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at inside a training step: what cannot be read at once is refused, and the settings stay."""
    path = tmp_path / sampling.CONTROL
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "huge":
        path.touch()
        os.truncate(path, 1 << 32)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"every = " + b"[" * 100_000 if kind == "nested" else b"\xff\xfe")
    monkeypatch.setattr(sampling, "LOOK_SECONDS", 0.0)
    told: list[tuple[str, str]] = []
    chosen = Sampling(Settings(every=2), tmp_path, lambda *said: told.append(said))
    assert [chosen.decide(step) for step in range(3)] == ["every", None, "every"]
    assert [said[0] for said in told] == ["error"]
    with pytest.raises(UsageError, match=r"control\.toml"):
        read_control(path)


@pytest.mark.parametrize("values", [{"stop": "no"}, {"layers": [3]}, {"dump": ["a:inptu"]}, {"dump": 3}])
def test_a_setting_of_the_wrong_type_is_refused(values: dict[str, Any]) -> None:
    """A text in place of false would have stopped the recording."""
    with pytest.raises(UsageError):
        Settings().changed(values)


@pytest.mark.parametrize("table", ["amax", "tensors", "steps"])
def test_rows_of_nothing_are_left_out_and_said(table: str, recorded: Path) -> None:
    """A part whose rows name no step is reported, and the rest is read."""
    path = recorded / table / "rank=00000" / "part-000001.parquet"
    old = pq.read_table(path)
    pq.write_table(pa.table([pa.nulls(len(old), f.type) for f in old.schema], schema=old.schema), path)
    with open_folder(recorded) as run:
        assert run.rows(f"select count(*) as n from {table}") == [{"n": 0}]
        assert [problem for problem in run.problems if path.name in problem and "holds rows without" in problem]
    assert in_a_process("report", recorded, "--no-html").code == (3 if table == "tensors" else 0)


@pytest.mark.parametrize("column", ["layer", "tensor"])
def test_rows_of_no_layer_or_tensor_break_no_report(column: str, recorded: Path) -> None:
    """Nothing is said of them; the page is written too."""
    for table in ("amax", "tensors"):
        path = recorded / table / "rank=00000" / "part-000001.parquet"
        old = pq.read_table(path)
        place = old.schema.get_field_index(column)
        pq.write_table(old.set_column(place, old.schema.field(place), pa.nulls(len(old), pa.string())), path)
    done = in_a_process("report", recorded)
    assert done.code in (0, 3)
    assert "could not be done" not in done.err
    assert (recorded / "report.html").exists()


def test_an_answer_from_a_part_of_the_files_says_so(recorded: Path) -> None:
    """query and tensors name on stderr what could not be read; stdout stays JSON."""
    path = recorded / "amax" / "rank=00000" / "part-000001.parquet"
    path.write_bytes(path.read_bytes()[:-40])
    for arguments in (("query", recorded, "select count(*) as n from amax", "--json"), ("tensors", recorded, "--json")):
        done = in_a_process(*arguments)
        assert done.code == 0
        assert "part-000001.parquet is cut, damaged or not Parquet" in done.err
        assert done.out[:1] in "[{"


def test_a_terminal_without_the_characters_shows_escapes(recorded: Path) -> None:
    """Python would give up with a traceback, and with exit code 1, which means that a gate failed."""
    for arguments in (
        ("report", recorded, "--no-html"),
        ("query", recorded, "select distinct layer from amax", "--csv"),
    ):
        done = in_a_process(*arguments, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
        assert (done.code, "Traceback" in done.err) == (0, False)
    assert r"\xe9\U0001f642" in done.out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
@pytest.mark.parametrize("rows", [1, 100_000])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_a_sentence(recorded: Path, rows: int, unbuffered: str) -> None:
    """Exit code 2, no traceback, whether it is noticed on the way or as the last words leave the buffer."""
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "fp8dbg", "query", str(recorded), f"from range({rows})", "--json"]
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (2, False)
    assert b"No space left" in done.stderr


def test_a_closed_stdout_is_no_error(recorded: Path) -> None:
    """As after ``>&-``: what is written to files is written."""
    report = 'exec "$0" -m fp8dbg report "$1" >&-'
    done = subprocess.run(["sh", "-c", report, sys.executable, str(recorded)], capture_output=True, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    assert (recorded / "report.html").exists()


def test_a_name_too_long_for_any_file_is_a_sentence(tmp_path: Path) -> None:
    """In every verb that takes a run folder."""
    for verb in (("report",), ("tensors",), ("control",)):
        done = in_a_process(*verb, tmp_path / ("x" * 300))
        assert (done.code, done.out) == (2, "")
        assert "cannot be opened: File name too long" in done.err


def test_an_error_nobody_foresaw_is_no_failed_gate(recorded: Path) -> None:
    """A page that cannot be a file: exit code 2, one sentence."""
    shutil.rmtree(recorded / "journal")
    done = in_a_process("report", recorded, "--html", recorded / ("x" * 300))
    assert done.code == 2
    assert "Traceback" not in done.err
    assert done.err.count("fp8dbg: ") == 1


def test_a_layer_that_is_named_like_a_glob_is_found_by_its_name(tmp_path: Path) -> None:
    """As simulate finds it; and a name of 200 kB does not fill the sentence that lists the names."""
    with RunWriter(tmp_path / "run") as writer:
        for table, rows in rows_of(0, layers=("[a-z]", "x" * 200_000)).items():
            writer.append(table, rows)
    found = in_a_process("tensors", tmp_path / "run", "--layer", "[a-z]")
    assert (found.code, "[a-z]" in found.out) == (0, True)
    refused = in_a_process("tensors", tmp_path / "run", "--layer", "nope")
    assert refused.code == 2
    assert len(refused.err) < 1000


def test_an_interrupt_that_duckdb_answers_ends_as_an_interrupt() -> None:
    """DuckDB turns Ctrl-C into a RuntimeError; the exit code is a shell's for it, not that of a wrong usage."""
    code = "import fp8dbg.cli as cli\ndef app(**_): raise RuntimeError('Query interrupted')\ncli.app = app; cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


def test_a_pipe_in_place_of_the_lock_holds_nobody_up(recorded: Path) -> None:
    """Reading the folder passes over it; recording into it is refused."""
    lock = recorded / "journal" / "rank-00000.lock"
    lock.unlink()
    os.mkfifo(lock)
    with open_folder(recorded) as run:
        assert run.state == "finished"
    with pytest.raises(RunFolderError, match="not a regular file"):
        RunWriter(recorded)
