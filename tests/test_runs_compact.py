"""Compacting: few parts in place of many, every row once, whoever reads and whenever it is killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fp8dbg.errors import RunFolderError
from fp8dbg.runs.compact import compact
from fp8dbg.runs.folder import RunWriter, open_folder
from fp8dbg.runs.schema import TABLES
from tests.recorded import answers, rows_of

SERVER = multiprocessing.get_context("forkserver")
FILLED = ("amax", "events", "steps", "tensors")
"""Tables with rows in these tests."""

CHANGES = ("open", "os.rename", "os.remove", "os.mkdir")
"""Python's audit events of what changes a folder (``open`` is many reads too)."""


def record(path: Path, steps: range, rank: int = 0, every: int = 4, close: bool = True) -> RunWriter:
    """A session that writes a part after every few steps."""
    writer = RunWriter(path, rank, {"recipe": "delayed"}, part_bytes=1 << 30)
    for step in steps:
        for table, rows in rows_of(step, rank).items():
            writer.append(table, rows)
        writer.event(step, "trigger", None, f"step {step}")
        writer.flush()
        if step % every == every - 1:
            for store in writer._stores.values():
                store.finish()
    if close:
        writer.close()
    return writer


def parts(path: Path) -> list[Path]:
    return sorted(path.rglob("*.parquet"))


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Two ranks and a resumed session, in six parts or so of each table."""
    record(tmp_path / "run", range(24))
    record(tmp_path / "run", range(18, 30))
    record(tmp_path / "run", range(12), rank=1)
    return tmp_path / "run"


def test_few_parts_hold_what_many_held(many: Path) -> None:
    """One part for each table, rank and session; the views are what they were, to the row."""
    before, files = answers(many), len(parts(many))
    done = compact(many)
    assert answers(many) == before
    assert done.parts_before == files > 3 * done.parts_after
    assert done.parts_after == len(parts(many)) == len(FILLED) * 3
    assert done.bytes_after < done.bytes_before
    assert done.left == [p for p in before["problems"] if "resumed" not in p]


def test_a_compacted_part_is_sorted_throughout(many: Path) -> None:
    """By layer and tensor, then step: what is read together lies together."""
    compact(many)
    rows = pq.read_table(min((many / "tensors" / "rank=00000").iterdir()), partitioning=None).to_pylist()
    keys = [(r["layer"], r["tensor"], r["step"]) for r in rows]
    assert keys == sorted(keys)


def test_compacting_twice_changes_nothing(many: Path) -> None:
    """What is compact already is left as it is."""
    compact(many)
    before = {p: p.stat().st_mtime_ns for p in parts(many)}
    assert compact(many).rows == 0
    assert {p: p.stat().st_mtime_ns for p in parts(many)} == before


def test_a_part_is_only_as_large_as_asked(many: Path) -> None:
    """What does not fit together stays in several parts, and all rows are there."""
    before = answers(many)
    done = compact(many, group_bytes=40_000)
    assert len(FILLED) * 3 < done.parts_after < done.parts_before
    assert answers(many) == before


def test_a_run_goes_on_after_it_was_compacted(many: Path) -> None:
    """A new session adopts nothing twice and counts from where the run was."""
    compact(many)
    writer = record(many, range(30, 34), close=False)
    assert writer.last_step == 29
    writer.close()
    with open_folder(many) as run:
        assert run.rows("SELECT count(*) AS n, count(DISTINCT step) AS d FROM steps WHERE rank = 0") == [
            {"n": 34, "d": 34}
        ]


def test_a_live_rank_is_left_alone_and_a_killed_one_is_finished_first(tmp_path: Path) -> None:
    """The live rank's files stay to the byte; the killed one's journal becomes a part."""
    live = record(tmp_path, range(10), rank=0, close=False)
    record(tmp_path, range(10), rank=1, close=False)._forget()
    mine = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and {"rank=00000", "run.json"} & set(p.parts)}
    before = answers(tmp_path)
    done = compact(tmp_path)
    assert [s for s in done.left if "Rank 0" in s and "being recorded" in s]
    assert {p: p.read_bytes() for p in mine} == mine
    assert not list((tmp_path / "journal").glob("rank-00001.*.arrows"))
    assert answers(tmp_path) == before
    live.close()


def test_a_run_that_is_all_live_is_refused(tmp_path: Path) -> None:
    """With what to do."""
    writer = record(tmp_path, range(8), close=False)
    with pytest.raises(RunFolderError, match=r"being recorded.*when the run has ended"):
        compact(tmp_path)
    writer.close()


def test_a_damaged_part_is_left_and_said(many: Path) -> None:
    """It is not merged, so nothing of it is lost for good; the others are."""
    bad = many / "tensors" / "rank=00000" / "part-000002.parquet"
    bad.write_bytes(bad.read_bytes()[:500])
    before = answers(many)
    done = compact(many)
    assert [s for s in done.left if "part-000002" in s]
    assert bad.exists()
    assert answers(many) == before


def test_a_part_copied_from_another_rank_hides_nothing(many: Path) -> None:
    """What a part replaces counts in the place it was written for only."""
    before = answers(many)
    other = shutil.copytree(many, many.with_name("other"))
    compact(other)
    merged = max((other / "steps" / "rank=00001").iterdir())
    shutil.copy(merged, many / "steps" / "rank=00000" / "part-000099.parquet")
    with open_folder(many) as run:
        assert len(run.rows("SELECT * FROM tensors")) == len(before["tensors"])
        assert len(run.rows("SELECT * FROM steps")) >= len(before["steps"])


def _compact_and_die(path: str, after: int) -> None:
    """In a process of its own: kill -9 at the n-th file that is opened, renamed or removed."""
    left = after

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event in CHANGES:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    compact(path)


def _killed_at(original: Path, scratch: Path, after: int) -> bool:
    """Whether a kill at this point came before the end; what is left reads the same and compacts to the end."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(original, scratch)
    child = SERVER.Process(target=_compact_and_die, args=(str(scratch), after))
    child.start()
    child.join()
    return child.exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_killed_at_any_moment_it_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """kill -9 at file operations from the first to the last; every reader, and the next call, see the same rows."""
    SERVER.set_forkserver_preload(["fp8dbg.runs.compact"])
    original = tmp_path / "run"
    record(original, range(9), close=False)._forget()
    expected = answers(original)
    points = [*range(1, 400, 29), *random.Random(0).sample(range(1, 300), 4)]
    killed = 0
    for after in sorted(points):
        if not _killed_at(original, tmp_path / "copy", after):
            break
        killed += 1
        assert answers(tmp_path / "copy") == expected, after
        compact(tmp_path / "copy")
        assert answers(tmp_path / "copy") == expected, after
        assert len(parts(tmp_path / "copy")) == len(FILLED), after
    assert killed >= 8


@pytest.fixture
def reader(many: Path) -> Iterator[list[Any]]:
    """Answers of a thread that opens and reads all the time; each entry one that was not as at first."""
    expected, wrong, ended = answers(many), [], threading.Event()

    def read() -> None:
        while not ended.is_set():
            found = answers(many)
            if found != expected:
                wrong.append({name: len(found[name]) for name in TABLES})

    thread = threading.Thread(target=read)
    thread.start()
    yield wrong
    ended.set()
    thread.join()


def test_who_reads_meanwhile_sees_every_row_once(many: Path, reader: list[Any], tmp_path: Path) -> None:
    """While parts are merged step by step, again and again; and a folder opened before still answers after."""
    saved = shutil.copytree(many, tmp_path / "saved")
    opened = open_folder(many)
    count = opened.rows("SELECT count(*) AS n FROM tensors")
    for size in (30_000, 60_000, 1 << 30):
        compact(many, group_bytes=size)
        time.sleep(0.1)
    assert opened.rows("SELECT count(*) AS n FROM tensors") == count
    assert opened.sql("SELECT count(*) FROM tensors").fetchall() == [(count[0]["n"],)]
    assert reader == []
    assert answers(saved)["tensors"] == answers(many)["tensors"]
