"""Compacting a run that was resumed: sessions are merged, and which rows count stays what it was."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fp8dbg.runs.compact import compact
from fp8dbg.runs.folder import RunWriter, open_folder
from tests.recorded import answers

WRITTEN = ("amax", "events", "steps")


def session(path: Path, steps: range, mark: int, every: int = 3) -> None:
    """A session whose rows say which one it is; a part after every few steps, and a loss that is logged late."""
    writer = RunWriter(path, 0, part_bytes=1 << 30)
    for step in steps:
        row = {"step": step, "rank": 0, "layer": "l", "tensor": "input", "microbatch": 0, "amax": float(mark)}
        writer.append("amax", [row])
        writer.append("steps", [{"step": step, "rank": 0, "loss": mark + 0.25, "sampled": True}])
        writer.event(step + 2 if step % 5 == 0 else step, "trigger", None, f"{mark}")  # an event may be ahead
        writer.flush()
        if step % every == every - 1:
            for store in writer._stores.values():
                store.finish()
        writer.append("steps", [{"step": step, "rank": 0, "loss": mark + 0.5}])
    writer.close()


def parts(path: Path, table: str) -> int:
    return len(list((path / table).rglob("*.parquet")))


def test_sessions_that_go_on_become_one_part(tmp_path: Path) -> None:
    """As of a job that was preempted nine times and resumed where it was."""
    for mark in range(10):
        session(tmp_path, range(6 * mark, 6 * mark + 6), mark)
    before = answers(tmp_path)
    assert len(before["steps"]) == len(before["amax"]) == 60
    compact(tmp_path)
    assert answers(tmp_path) == before
    assert [parts(tmp_path, table) for table in ("amax", "steps")] == [1, 1]
    assert compact(tmp_path).rows == 0


def test_one_more_session_joins_those_that_were_merged(tmp_path: Path) -> None:
    """Compacting now and then keeps few parts."""
    for mark in range(5):
        session(tmp_path, range(6 * mark, 6 * mark + 6), mark)
        compact(tmp_path)
    assert len(answers(tmp_path)["steps"]) == 30
    assert parts(tmp_path, "steps") == 1


def test_a_later_session_goes_back_into_merged_ones(tmp_path: Path) -> None:
    """From its first step on it counts, and before it all that was merged; as if nothing had been."""
    merged, plain = tmp_path / "merged", tmp_path / "plain"
    for path in (merged, plain):
        for mark in range(3):
            session(path, range(6 * mark, 6 * mark + 6), mark)
        if path is merged:
            compact(path)
            assert parts(path, "steps") == 1
        session(path, range(9, 21), 3)
    assert answers(merged) == answers(plain)
    with open_folder(merged) as run:
        marks = [row["amax"] for row in run.rows("SELECT amax FROM amax ORDER BY step")]
    assert marks == [0.0] * 6 + [1.0] * 3 + [3.0] * 12
    compact(merged)
    assert answers(merged) == answers(plain)


def test_what_is_left_apart_keeps_its_place(tmp_path: Path) -> None:
    """A part that fits with no neighbour stays newer than the merged ones before it: what was logged late wins."""
    session(tmp_path, range(6), 0)
    before = answers(tmp_path)
    first, second, late = sorted((tmp_path / "steps").rglob("*.parquet"))
    assert pq.read_table(late, columns=["step"], partitioning=None)["step"].to_pylist() == [5]
    both = sum(pq.read_metadata(path).row_group(0).total_byte_size for path in (first, second))
    compact(tmp_path, group_bytes=both)
    assert parts(tmp_path, "steps") == 2
    assert answers(tmp_path) == before


@pytest.mark.parametrize("seed", [1, 2, 5, 10])
def test_whenever_it_is_compacted_the_rows_that_count_are_the_same(seed: int, tmp_path: Path) -> None:
    """Chains of sessions that go on, go back and leave gaps, compacted between them or not, in groups of any size."""
    draw = random.Random(seed)
    merged, plain = tmp_path / "merged", tmp_path / "plain"
    last = 0
    for mark in range(6):
        first = max(0, last + draw.choice([0, 0, 0, 2, -1, -4, -9]))
        last = first + draw.randrange(1, 9)
        for path in (merged, plain):
            session(path, range(first, last), mark)
        if draw.random() < 0.6:
            compact(merged, group_bytes=draw.choice([400, 1500, 1 << 30]))
            assert answers(merged) == answers(plain)
    compact(merged)
    assert answers(merged) == answers(plain)
    assert sum(parts(merged, table) for table in WRITTEN) < sum(parts(plain, table) for table in WRITTEN)
