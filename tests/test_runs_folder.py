"""A run folder written and read back: what is recorded is what is read, whatever lies beside it."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8dbg.errors import RunFolderError, UnknownNameError
from fp8dbg.runs.files import escape
from fp8dbg.runs.folder import Folder, RunWriter, open_folder
from fp8dbg.runs.schema import TABLES, arrow_schema
from tests.recorded import LAYERS, rows_of, step_row, tensor_rows


def write(path: Path, steps: range, *, rank: int = 0, close: bool = True, **options: Any) -> RunWriter:
    """A recorded run."""
    writer = RunWriter(path, rank, {"recipe": "delayed"}, **options)
    for step in steps:
        for table, rows in rows_of(step, rank).items():
            writer.append(table, rows)
        writer.flush()
    if close:
        writer.close()
    return writer


def kill(writer: RunWriter) -> None:
    """Leave a run as kill -9 does: files as they are, the lock gone."""
    writer._forget()


def steps_of(run: Folder, table: str = "tensors") -> list[int]:
    """Distinct steps of a table."""
    return [row[0] for row in run.sql(f"SELECT DISTINCT step FROM {table} ORDER BY step").fetchall()]


@pytest.mark.parametrize("state", ["alive", "killed", "finished"])
def test_every_row_comes_back_as_it_was(tmp_path: Path, state: str) -> None:
    """Journal or part, alive or dead: the same values in the same types."""
    writer = write(tmp_path, range(3), close=state == "finished")
    if state == "killed":
        kill(writer)
    with open_folder(tmp_path) as run:
        assert (run.state, run.problems) == (state, [])
        expected = sorted(
            (r for s in range(3) for r in tensor_rows(s)), key=lambda r: (r["step"], r["layer"], r["tensor"])
        )
        found = run.rows("SELECT * FROM tensors ORDER BY step, layer, tensor")
        assert found == [{"histogram": None} | row for row in expected]
        assert [list(row) for row in found[:1]] == [list(TABLES["tensors"].names)]
        assert run.rows("SELECT * FROM steps ORDER BY step") == [
            dict.fromkeys(TABLES["steps"].names) | step_row(step) for step in range(3)
        ]


def test_a_large_journal_becomes_parts_while_recording(tmp_path: Path) -> None:
    """Parts appear before the run ends, and parts and journal together hold each row once."""
    writer = write(tmp_path, range(40), close=False, part_bytes=100_000)
    parts = sorted(p.name for p in (tmp_path / "tensors" / "rank=00000").iterdir())
    assert len(parts) > 2
    assert parts[0] == "part-000001.parquet"
    with open_folder(tmp_path) as run:
        assert run.sql("SELECT count(*) FROM tensors").fetchall() == [(40 * 6 * len(LAYERS),)]
    writer.close()
    with open_folder(tmp_path) as run:
        assert run.sql("SELECT count(*), count(DISTINCT (step, layer, tensor)) FROM tensors").fetchall() == [
            (40 * 6 * len(LAYERS), 40 * 6 * len(LAYERS))
        ]
    assert sorted(p.name for p in (tmp_path / "journal").iterdir()) == ["rank-00000.lock"]


def test_a_reader_beside_a_writer_sees_every_flushed_row(tmp_path: Path) -> None:
    """Opened after every flush, through many changes from journal to part."""
    writer = RunWriter(tmp_path, part_bytes=60_000)
    for step in range(30):
        writer.append("tensors", tensor_rows(step))
        writer.flush()
        with open_folder(tmp_path) as run:
            assert run.sql("SELECT count(*) FROM tensors").fetchall() == [((step + 1) * 24,)]
            assert run.problems == []


def test_an_open_reader_survives_the_end_of_the_run(tmp_path: Path) -> None:
    """A folder is as it was when it was opened: journals becoming parts change nothing for it."""
    writer = write(tmp_path, range(5), close=False)
    with open_folder(tmp_path) as run:
        writer.close()
        assert steps_of(run) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("table", list(TABLES))
def test_an_empty_run_has_every_table(tmp_path: Path, table: str) -> None:
    """Nothing recorded: the columns are there, in their types, with no row."""
    RunWriter(tmp_path).close()
    with open_folder(tmp_path) as run:
        relation = run.sql(f"SELECT * FROM {table}")
        assert tuple(relation.columns) == TABLES[table].names
        assert relation.fetchall() == []
        assert relation.to_arrow_table().schema.field("step").type == pa.int64()


def test_nan_and_infinity_are_null(tmp_path: Path) -> None:
    """From the writer, and in a part that another program wrote; DuckDB's filters must not be misled by either."""
    with RunWriter(tmp_path) as writer:
        for step, loss in enumerate([math.nan, math.inf, -math.inf, np.float32("nan"), 1.0]):
            writer.append("steps", [step_row(step) | {"loss": loss}])
    stored = pq.ParquetFile(tmp_path / "steps/rank=00000/part-000001.parquet").read()["loss"].to_pylist()
    assert stored == [None, None, None, None, 1.0]
    foreign = pa.table({"step": [5, 6], "rank": [0, 0], "loss": [math.nan, 9.0]})
    pq.write_table(foreign, tmp_path / "steps/rank=00000/part-000002.parquet")
    with open_folder(tmp_path) as run:
        assert run.sql("SELECT step, loss FROM steps WHERE loss > 0.5 ORDER BY step").fetchall() == [(4, 1.0), (6, 9.0)]
        assert run.sql("SELECT count(*) FROM steps WHERE loss IS NULL").fetchall() == [(5,)]


def test_a_late_log_adds_to_its_step(tmp_path: Path) -> None:
    """The last value of each column that is not NULL, across journal, parts and sessions."""
    with RunWriter(tmp_path) as writer:
        writer.append(
            "steps", [{"step": 7, "rank": 0, "loss": 1.0, "seconds": 0.5}, {"step": 7, "rank": 1, "loss": 5.0}]
        )
        writer.flush()
        writer.append("steps", [{"step": 7, "rank": 0, "loss": 2.0}])
    with RunWriter(tmp_path) as writer:
        writer.append("steps", [{"step": 8, "rank": 0, "loss": 3.0}])
        writer.append("steps", [{"step": 8, "rank": 0, "grad_norm": 4.0}])
        writer.flush()
        with open_folder(tmp_path) as run:
            found = run.sql("SELECT step, rank, loss, seconds, grad_norm FROM steps ORDER BY ALL").fetchall()
    assert found == [(7, 0, 2.0, 0.5, None), (7, 1, 5.0, None, None), (8, 0, 3.0, None, 4.0)]


def test_ranks_write_beside_each_other(tmp_path: Path) -> None:
    """Each its own files; run.json is rank 0's, and layers of pipeline stages come together."""
    writers = [RunWriter(tmp_path, rank, {"layers": [{"layer": f"l{rank}"}]}) for rank in range(3)]
    for rank, writer in enumerate(writers):
        writer.append("tensors", tensor_rows(0, rank))
    writers[1].close()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and "rank=00001" in str(p)}
    writers[0].close()
    writers[2].close()
    assert all(p.read_bytes() == data for p, data in before.items())
    with open_folder(tmp_path) as run:
        assert run.sql("SELECT rank, count(*) FROM tensors GROUP BY rank ORDER BY rank").fetchall() == [
            (rank, 24) for rank in range(3)
        ]
        assert [layer["layer"] for layer in run.meta["layers"]] == ["l0", "l1", "l2"]
        assert run.state == "finished"


def test_folders_of_several_ranks_open_as_one(tmp_path: Path) -> None:
    """A list of folders; one given twice counts once."""
    for rank in range(2):
        write(tmp_path / f"r{rank}", range(2), rank=rank)
    with open_folder([tmp_path / "r0", str(tmp_path / "r1"), tmp_path / "r0"]) as run:
        assert run.sql("SELECT rank, count(*) FROM steps GROUP BY rank ORDER BY rank").fetchall() == [(0, 2), (1, 2)]


# Continuing.


def test_a_killed_run_is_continued(tmp_path: Path) -> None:
    """The next session finishes the journal that the last one left, says where it ended, and goes on."""
    kill(write(tmp_path, range(3), close=False))
    writer = RunWriter(tmp_path)
    assert writer.last_step == 2
    assert list((tmp_path / "journal").glob("*.arrows")) == []
    for step in (3, 4):
        writer.append("tensors", tensor_rows(step))
    writer.close()
    with open_folder(tmp_path) as run:
        assert steps_of(run) == [0, 1, 2, 3, 4]
        assert run.sql("SELECT count(*) FROM tensors").fetchall() == [(5 * 24,)]
        assert run.meta["sessions"] == 2
        assert run.meta["recipe"] == "delayed"


def test_a_resumed_run_shows_the_later_recording(tmp_path: Path) -> None:
    """Back to a checkpoint: rows of the abandoned steps would be counted twice; the reader says what it did."""
    write(tmp_path, range(10))
    write(tmp_path, range(6, 8))
    with open_folder(tmp_path) as run:
        for table in ("steps", "amax", "tensors"):
            assert steps_of(run, table) == list(range(8))
        assert run.sql("SELECT count(*) FROM tensors").fetchall() == [(8 * 24,)]
        assert run.problems == [
            "Rank 0 was recorded again from step 6 on (the run was resumed there): the later rows are read."
        ]


def test_an_event_without_a_step_hides_nothing(tmp_path: Path) -> None:
    """A session may log an event before it knows its step."""
    with RunWriter(tmp_path) as writer:
        writer.event(None, "config", None, "first")
        writer.append("tensors", tensor_rows(5))
    with RunWriter(tmp_path) as writer:
        writer.event(0, "config", None, "second")
        writer.append("tensors", tensor_rows(6))
    with open_folder(tmp_path) as run:
        assert steps_of(run) == [5, 6]
        assert run.sql("SELECT detail FROM events ORDER BY detail").fetchall() == [("first",), ("second",)]
        assert run.problems == []


@pytest.mark.parametrize("crash", ["part written, journal still there", "journal removed"])
def test_no_row_is_doubled_between_journal_and_part(tmp_path: Path, crash: str) -> None:
    """A crash after the part's rename: read, and continued, with every row once."""
    writer = write(tmp_path, range(3), close=False)
    journal = tmp_path / "journal/rank-00000.tensors.arrows"
    kept = journal.read_bytes()
    writer._stores["tensors"].finish()
    kill(writer)
    if crash == "part written, journal still there":
        journal.write_bytes(kept)
    for _ in range(2):
        with open_folder(tmp_path) as run:
            assert run.sql("SELECT count(*) FROM tensors").fetchall() == [(3 * 24,)]
        RunWriter(tmp_path).close()


def test_the_same_process_takes_its_own_folder_over(tmp_path: Path) -> None:
    """A notebook cell run again without closing: the earlier writer is closed, its rows stay."""
    first = write(tmp_path, range(2), close=False)
    second = RunWriter(tmp_path)
    second.append("tensors", tensor_rows(2))
    first.append("tensors", tensor_rows(99))
    first.close()
    second.close()
    with open_folder(tmp_path) as run:
        assert steps_of(run) == [0, 1, 2]


def test_a_rank_recorded_by_another_process_is_refused(tmp_path: Path) -> None:
    """Two processes without ranks of their own would destroy each other's journals."""
    child = os.fork()
    if child == 0:
        holder = RunWriter(tmp_path)
        (tmp_path / "ready").touch()
        while not (tmp_path / "done").exists():
            pass
        holder.close()
        os._exit(0)
    while not (tmp_path / "ready").exists():
        pass
    try:
        with pytest.raises(RunFolderError, match=r"Rank 0 of .* is being recorded by another process\. .*its own rank"):
            RunWriter(tmp_path)
    finally:
        (tmp_path / "done").touch()
        os.waitpid(child, 0)


# Wrong calls.


def test_unknown_names_are_refused_where_they_are_given(tmp_path: Path) -> None:
    """A wrong table or column is a mistake in the caller; the message lists the valid ones."""
    writer = RunWriter(tmp_path)
    with pytest.raises(
        UnknownNameError, match=r"No table is called 'tensor'\. Valid names: amax, events, gemms, steps"
    ):
        writer.append("tensor", [{}])
    with pytest.raises(UnknownNameError, match=r"No column of steps is called 'losss'\. Valid names: .*loss"):
        writer.append("steps", [{"step": 0, "losss": 1.0}])


def test_a_value_of_the_wrong_type_is_null_and_an_event(tmp_path: Path) -> None:
    """One misfit costs its own cell, not the batch."""
    with RunWriter(tmp_path) as writer:
        writer.append("steps", [step_row(0) | {"loss": "high"}, step_row(1), step_row(2) | {"loss": [1]}])
    with open_folder(tmp_path) as run:
        assert run.sql("SELECT loss FROM steps ORDER BY step").fetchall() == [(None,), (3.0,), (None,)]
        [(kind, detail)] = run.sql("SELECT kind, detail FROM events").fetchall()
        assert kind == "error"
        assert detail.startswith("steps.loss was given 'high'")


def test_the_folder_stops_growing_at_its_limit(tmp_path: Path) -> None:
    """max_bytes caps what is written, within the rows of one flush."""
    writer = write(tmp_path, range(200), max_bytes=300_000)
    assert writer.stopped == "the limit of 300000 bytes is reached"
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) < 310_000


def test_buffers_flush_themselves(tmp_path: Path) -> None:
    """By rows, by bytes and by age, without a call to flush."""
    writer = RunWriter(tmp_path)
    writer.append("amax", ({"step": i, "rank": 0} for i in range(4096)))
    writer.append("events", [{"step": i, "detail": "x" * 2000} for i in range(600)])
    with open_folder(tmp_path) as run:
        assert run.sql("SELECT (SELECT count(*) FROM amax), (SELECT count(*) > 400 FROM events)").fetchall() == [
            (4096, True)
        ]
    writer._flushed -= 2.0
    writer.append("steps", [step_row(0)])
    with open_folder(tmp_path) as run:
        assert steps_of(run, "steps") == [0]


# Damage.


def finished_parts(tmp_path: Path) -> list[Path]:
    """Three parts of `tensors`, one step each."""
    for step in range(3):
        write(tmp_path, range(step, step + 1))
    return sorted((tmp_path / "tensors/rank=00000").iterdir())


def cut(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-100])


def empty(part: Path) -> None:
    part.write_bytes(b"")


def text(part: Path) -> None:
    part.write_text("PAR1 or not")


def foreign(part: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), part)


def other_types(part: Path) -> None:
    pq.write_table(pa.table({"step": ["1"], "rank": [0]}), part)


def pipe(part: Path) -> None:
    part.unlink()
    os.mkfifo(part)


def folder(part: Path) -> None:
    part.unlink()
    part.mkdir()


@pytest.mark.parametrize("damage", [cut, empty, text, foreign, other_types, pipe, folder])
def test_a_damaged_part_hides_nothing_else(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Cut, empty, or of something else: a sentence names it, every other row is read."""
    damage(finished_parts(tmp_path)[1])
    with open_folder(tmp_path) as run:
        assert steps_of(run) == [0, 2]
        assert steps_of(run, "amax") == [0, 1, 2]
        [problem] = run.problems
        assert problem.startswith("tensors/rank=00000/part-000002.parquet is ")
        assert problem.endswith("it is not read.")


def test_a_part_damaged_inside_hides_nothing_else(tmp_path: Path) -> None:
    """Its footer is whole, so only reading finds out: it is left out, named, and the question is answered."""
    parts = finished_parts(tmp_path)
    data = bytearray(parts[1].read_bytes())
    pages = len(data) - 8 - int.from_bytes(data[-8:-4], "little")  # the footer and its length come last
    data[4:pages] = bytes(pages - 4)
    parts[1].write_bytes(data)
    with open_folder(tmp_path) as run:
        assert run.problems == []
        assert run.rows("SELECT step, count(*) AS n FROM tensors WHERE mse >= 0 GROUP BY step ORDER BY step") == [
            {"step": 0, "n": 24},
            {"step": 2, "n": 24},
        ]
        [problem] = run.problems
        assert problem.startswith("tensors/rank=00000/part-000002.parquet is damaged inside")


def test_a_cut_part_leaves_its_journal_to_read(tmp_path: Path) -> None:
    """A journal is ignored for a part only if that part is whole; continuing makes a new part of it."""
    writer = write(tmp_path, range(2), close=False)
    journal = tmp_path / "journal/rank-00000.tensors.arrows"
    kept = journal.read_bytes()
    writer.close()
    journal.write_bytes(kept)
    part = tmp_path / "tensors/rank=00000/part-000001.parquet"
    part.write_bytes(part.read_bytes()[:-50])
    with open_folder(tmp_path) as run:
        assert steps_of(run) == [0, 1]
        assert len(run.problems) == 1
    RunWriter(tmp_path).close()
    with open_folder(tmp_path) as run:
        assert steps_of(run) == [0, 1]


def test_an_older_part_lacks_columns(tmp_path: Path) -> None:
    """They read as NULL; narrower integers and floats read in the schema's types."""
    RunWriter(tmp_path).close()
    old = pa.table({"step": pa.array([1], pa.int32()), "rank": [0], "amax": pa.array([2.0], pa.float32()), "gone": [1]})
    (tmp_path / "amax/rank=00000").mkdir(parents=True)
    pq.write_table(old, tmp_path / "amax/rank=00000/part-000001.parquet")
    with open_folder(tmp_path) as run:
        assert run.rows("SELECT * FROM amax") == [
            dict.fromkeys(TABLES["amax"].names) | {"step": 1, "rank": 0, "amax": 2.0}
        ]
        assert run.problems == []


def test_a_left_over_temporary_file_is_no_problem(tmp_path: Path) -> None:
    """Killed while a part or a journal was written; the next session removes it, and nothing of another rank."""
    part = finished_parts(tmp_path)[0]
    left = [part.with_name("part-000009.parquet.77.tmp"), tmp_path / "journal/rank-00000.amax.arrows.77.tmp"]
    other = tmp_path / "journal/rank-00001.amax.arrows.77.tmp"
    for path in (*left, other):
        path.write_bytes(b"PAR1")
    with open_folder(tmp_path) as run:
        assert run.problems == []
    RunWriter(tmp_path).close()
    assert [path.exists() for path in (*left, other)] == [False, False, True]


def test_a_foreign_file_among_the_parts_is_named(tmp_path: Path) -> None:
    """It is not read: only parts are."""
    part = finished_parts(tmp_path)[0]
    shutil.copy(part, part.with_name("copy of part-000001.parquet"))
    with open_folder(tmp_path) as run:
        assert run.sql("SELECT count(*) FROM tensors").fetchall() == [(72,)]
        assert run.problems == ["tensors/rank=00000/copy of part-000001.parquet is no part of a run; it is not read."]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"schema_version": "1"}', "nul\0", "[" * 100_000])
def test_a_run_without_its_run_json_is_readable(tmp_path: Path, content: str) -> None:
    """The rows say enough; the problem is named."""
    write(tmp_path, range(2))
    (tmp_path / "run.json").write_text(content)
    with open_folder(tmp_path) as run:
        assert steps_of(run) == [0, 1]
        assert run.meta == {}
        assert [p.split(" is ")[0] for p in run.problems] == ["run.json"]


def test_a_missing_run_json_is_named(tmp_path: Path) -> None:
    """As a damaged one is."""
    write(tmp_path, range(2))
    (tmp_path / "run.json").unlink()
    with open_folder(tmp_path) as run:
        assert run.problems == ["run.json is missing."]
    write(tmp_path, range(2, 3))
    with open_folder(tmp_path) as run:
        assert (steps_of(run), run.problems) == ([0, 1, 2], [])


# Folders that are none.


def test_what_is_no_run_folder_is_one_sentence(tmp_path: Path) -> None:
    """Missing, a file, empty, of something else: what it is, and what to do."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.jpg").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package/run.json").write_text('{"name": "x"}')
    for name, sentence in {
        "missing": r"There is no folder .*missing\. Give",
        "file": r"file is a file, not a run folder\. Give",
        "empty": r"empty is empty: nothing was recorded\. Call fp8dbg\.attach",
        "photos": r"photos is not a run folder: run\.json is missing\. ",
        "package": r"package is not a run folder: run\.json is not a run's: it has no schema_version\. ",
    }.items():
        with pytest.raises(RunFolderError, match=sentence):
            open_folder(tmp_path / name)
    with pytest.raises(RunFolderError, match="No run folder was given"):
        open_folder([])


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    """To read and to write; one part of a newer schema is left out."""
    write(tmp_path, range(1))
    meta = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(meta | {"schema_version": 999}))
    for act in (open_folder, RunWriter):
        with pytest.raises(RunFolderError, match=r"was recorded with schema 999; this fp8dbg knows up to \d+\. Update"):
            act(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(meta))
    newer = arrow_schema("steps").with_metadata(
        {"fp8dbg": json.dumps({"table": "steps", "rank": 0, "part": 9, "session": 1, "schema_version": 999})}
    )
    pq.write_table(newer.empty_table(), tmp_path / "steps/rank=00000/part-000009.parquet")
    with open_folder(tmp_path) as run:
        assert steps_of(run, "steps") == [0]
        assert run.problems == ["steps/rank=00000/part-000009.parquet was written by a newer fp8dbg; it is not read."]


# Hostile names.

HOSTILE = [
    "",
    ".",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b\\c",
    "line\nbreak\r\t",
    "nul\0byte",
    "'; DROP VIEW tensors; --",
    '"quoted" `too`',
    "<script>alert(1)</script>",
    "😀 ü 漢字 \u202e",
    "%41~x",
    "-rf",
    "con.aux",
    "x" * 200_000,
    "é" * 70,
]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:20]))
def test_hostile_layer_names_come_back_and_stay_inside(tmp_path: Path, name: str) -> None:
    """In rows, in events and in dumps; as a parameter and in a dump's path."""
    with RunWriter(tmp_path / "run", fingerprint={"layers": [{"layer": name}]}) as writer:
        writer.append("tensors", tensor_rows(0, layers=(name,)))
        writer.event(0, "gap", name, "x")
        [path] = writer.dump(3, name, {"input": torch.arange(4.0)})
    assert path.resolve().parent == (tmp_path / "run/dumps/rank=00000/step=000003").resolve()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]
    with open_folder(tmp_path / "run") as run:
        assert run.sql("SELECT DISTINCT layer FROM tensors").fetchall() == [(name,)]
        assert run.sql("SELECT count(*) FROM events WHERE layer = $layer", {"layer": name}).fetchall() == [(1,)]
        assert run.meta["layers"] == [{"layer": name}]
        [dump] = run.dumps(name, "input")
        assert (dump.layer, dump.tensor, dump.step, dump.rank) == (name, "input", 3, 0)
        assert dump.load().tolist() == [0, 1, 2, 3]
        assert run.problems == []


@settings(max_examples=300, deadline=None)
@given(st.text(), st.text())
def test_escaped_names_are_file_names_and_differ(name: str, other: str) -> None:
    """Short, visible, without a separator; two names never share one."""
    escaped = escape(name)
    assert 0 < len(escaped) <= 100
    assert escaped.isascii()
    assert escaped.isprintable()
    assert not set(escaped) & set("/\\:*?\"<>|' ")
    assert not escaped.startswith(".")
    assert (escape(other) == escaped) == (other == name)


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=300))
def test_any_text_comes_back_from_a_journal(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """Whatever Unicode a layer is called."""
    folder = tmp_path_factory.mktemp("run")
    writer = RunWriter(folder)
    writer.append("events", [{"step": 0, "layer": name}])
    writer.flush()
    with open_folder(folder) as run:
        assert run.sql("SELECT layer FROM events WHERE layer = ?", [name]).fetchall() == [(name,)]


def test_text_that_is_no_unicode_is_escaped(tmp_path: Path) -> None:
    """A lone surrogate has no UTF-8: it is written out, the row is kept."""
    with RunWriter(tmp_path) as writer:
        writer.event(0, "gap", "a\ud800b", "x")
        writer.dump(0, "a\ud800b", {"input": torch.zeros(1)})
    with open_folder(tmp_path) as run:
        assert run.sql("SELECT layer FROM events").fetchall() == [("a\\ud800b",)]
        assert [d.layer for d in run.dumps()] == ["a\\ud800b"]


@pytest.mark.parametrize("name", ["it's", "[a]*?", "new\nline", "😀", "{a,b}", "s3:x", "rank=7", "%41", "-v"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    """Its path goes into SQL and through DuckDB's globbing, beside a folder that a pattern would match."""
    write(tmp_path / name, range(2))
    write(tmp_path / "a", range(5))
    with open_folder(tmp_path / name) as run:
        assert steps_of(run) == [0, 1]
        assert run.sql("SELECT DISTINCT rank FROM tensors").fetchall() == [(0,)]


# Size.


def test_a_part_takes_at_most_250_bytes_a_row(tmp_path: Path) -> None:
    """Random doubles in every figure column, as real figures are; 40 layers, six tensors."""
    layers = tuple(f"model.layers.{i}.mlp.up_proj" for i in range(40))
    with RunWriter(tmp_path) as writer:
        for step in range(20):
            writer.append("tensors", tensor_rows(step, layers=layers))
            writer.flush()
    size = (tmp_path / "tensors/rank=00000/part-000001.parquet").stat().st_size / (20 * 240)
    assert size < 250, f"{size:.0f} bytes a row"
