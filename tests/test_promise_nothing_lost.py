"""Promise 4: nothing recorded is lost, whatever kills the process or fills the disk."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fp8dbg.errors import RunFolderError
from fp8dbg.runs.folder import RunWriter, open_folder
from tests.recorded import LAYERS, rows_of, step_row, tensor_rows

ROOT = Path(__file__).parents[1]
PER_STEP = {"steps": 1, "amax": len(LAYERS), "tensors": 6 * len(LAYERS)}
CHAINS, KILLS = 4, 13


def _killed_at_random(recorder: subprocess.Popen[str], job: str, seconds: float) -> list[int]:
    """Have a child record, kill -9 it after a while; the steps it acknowledged."""
    assert recorder.stdin is not None
    assert recorder.stdout is not None
    print(job, file=recorder.stdin, flush=True)
    child = int(recorder.stdout.readline())
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    lines = []
    while (line := recorder.stdout.readline()) != "dead\n":
        lines.append(line)
    return [int(line) for line in lines[:-1] if line.strip()]  # the last may be cut by the kill: no acknowledgement


def _check(folder: Path, last: int) -> None:
    with open_folder(folder) as run:
        for table, rows in PER_STEP.items():
            found = dict(run.sql(f"SELECT step, count(*) FROM {table} GROUP BY step").fetchall())
            wrong = {step: found.get(step, 0) for step in range(last + 1) if found.get(step, 0) != rows}
            assert not wrong, f"{table} of {folder}: rows by finished step {wrong}, not {rows}"
            assert max(found, default=-1) <= last + 1
        figures = "SELECT layer, tensor, mse, underflow FROM tensors WHERE step = ? ORDER BY ALL"
        written = sorted((r["layer"], r["tensor"], r["mse"], r["underflow"]) for r in tensor_rows(last))
        assert last < 0 or run.sql(figures, [last]).fetchall() == written
        assert run.state == "killed"


def _chain(folder: Path, seed: int) -> None:
    """A run that is killed and resumed again and again."""
    draw = random.Random(seed)
    last = -1
    command = [sys.executable, "-m", "tests.kill_me"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as recorder:
        for _ in range(KILLS):
            part_bytes = draw.choice([20_000, 200_000, 32 << 20])
            job = f"{folder} {last + 1} {part_bytes}"
            acknowledged = _killed_at_random(recorder, job, draw.uniform(0, 0.15))
            last = max(acknowledged, default=last)
            _check(folder, last)
        assert recorder.stdin is not None
        recorder.stdin.close()
    assert last > 0


def test_kill_at_random_moments_loses_no_row_of_a_finished_step(tmp_path: Path) -> None:
    """52 kills, in chains of resumed runs, with journals that become parts often, rarely and never."""
    with ThreadPoolExecutor(2) as pool:
        for chain in [pool.submit(_chain, tmp_path / f"run{i}", i) for i in range(CHAINS)]:
            chain.result()


def test_a_reader_beside_a_live_writer_sees_every_finished_step_once(tmp_path: Path) -> None:
    """Another process records as fast as it can, a part every few steps, while this one opens the folder repeatedly."""
    command = [sys.executable, "-m", "tests.kill_me"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as recorder:
        assert recorder.stdin is not None
        assert recorder.stdout is not None
        print(f"{tmp_path / 'run'} 0 100000", file=recorder.stdin, flush=True)
        child = int(recorder.stdout.readline())
        try:
            for _ in range(12):
                finished = int(recorder.stdout.readline())
                with open_folder(tmp_path / "run") as run:
                    assert run.problems == []
                    assert run.state == "alive"
                    for table, rows in PER_STEP.items():
                        counts = run.sql(f"SELECT step, count(*) FROM {table} GROUP BY step ORDER BY step").fetchall()
                        last = counts[-1][0]
                        assert last >= finished
                        assert counts[:-1] == [(step, rows) for step in range(last)]
        finally:
            os.kill(child, signal.SIGKILL)
            recorder.stdin.close()
            recorder.stdout.read()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _record(writer: RunWriter, steps: range) -> int:
    """Record steps as a training loop would; the last one flushed before recording stopped."""
    last = -1
    for step in steps:
        for table, rows in rows_of(step).items():
            writer.append(table, rows)
        writer.flush()
        if not writer.stopped:
            last = step
    return last


def test_a_full_disk_stops_recording_and_nothing_else(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every call goes on returning, one warning is given, and all that fitted is there."""
    writer = RunWriter(small_disk / "run", part_bytes=200_000)
    last = _record(writer, range(400))
    assert 0 < last < 399
    assert "No space left" in writer.stopped
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    with open_folder(small_disk / "run") as run:
        assert run.sql("SELECT count(DISTINCT step), max(step) FROM tensors WHERE step <= ?", [last]).fetchall() == [
            (last + 1, last)
        ]
    writer.close()
    assert len(caplog.records) == 1
    with open_folder(small_disk / "run") as run:
        counts = run.sql("SELECT count(*) FROM tensors WHERE step <= ? GROUP BY step", [last]).fetchall()
        assert counts == [(PER_STEP["tensors"],)] * (last + 1)


def test_a_disk_that_is_full_at_the_start_is_a_sentence(small_disk: Path) -> None:
    """Nothing can be recorded, so attaching says so."""
    _fill(small_disk / "filler")
    with pytest.raises(RunFolderError, match=r"Cannot record into .*: No space left on device"):
        RunWriter(small_disk / "run")


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass


def test_a_file_size_limit_stops_recording_and_nothing_else(tmp_path: Path) -> None:
    """The journal cannot grow: what went down stays readable, to the last whole batch."""
    command = [sys.executable, "-m", "tests.outgrow_limit", str(tmp_path / "run"), "300000"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    last, reason = done.stdout.strip().split(" ", 1)
    assert "File too large" in reason
    assert done.stderr.count("stopped recording") == 1
    with open_folder(tmp_path / "run") as run:
        assert run.sql("SELECT count(DISTINCT step) FROM tensors").fetchall() == [(int(last) + 1,)]
        assert any("recording stopped early" in problem for problem in run.problems)
        assert run.state == "stopped"


def test_a_target_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    """A file where the folder should be."""
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(RunFolderError, match=r"Cannot record into .*run: (Not a directory|File exists)"):
        RunWriter(tmp_path / "run")


def test_a_disk_that_becomes_read_only_stops_recording(small_disk: Path) -> None:
    """The file system is remounted read-only under a running writer."""
    writer = RunWriter(small_disk / "run")
    _record(writer, range(2))
    for store in writer._stores.values():
        store.abandon()  # an open file would keep the remount from happening
    writer._lock.release()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert _record(writer, range(2, 4)) == -1
    assert "Read-only file system" in writer.stopped
    writer.close()
    with open_folder(small_disk / "run") as run:
        assert run.sql("SELECT count(*) FROM steps").fetchall() == [(2,)]
    with pytest.raises(RunFolderError, match="Read-only file system"):
        RunWriter(small_disk / "run")


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    """Data-loader workers inherit the writer: what they do must not reach the folder, nor take its lock along."""
    writer = RunWriter(tmp_path / "run")
    writer.append("steps", [step_row(0)])
    child = os.fork()
    if child == 0:
        writer.append("steps", [step_row(1)])
        writer.flush()
        writer.close()
        os._exit(0 if writer.stopped else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with open_folder(tmp_path / "run") as run:
        assert run.state == "alive"
    writer.close()
    with open_folder(tmp_path / "run") as run:
        assert run.sql("SELECT step FROM steps").fetchall() == [(0,)]
        assert run.state == "finished"


def test_a_folder_removed_while_recording_stops_recording(tmp_path: Path) -> None:
    """Someone cleans up the folder of a live run: training must not notice."""
    writer = RunWriter(tmp_path / "run", part_bytes=100_000)
    _record(writer, range(2))
    shutil.rmtree(tmp_path / "run")
    _record(writer, range(2, 40))
    writer.close()
    assert "No such file" in writer.stopped
