"""The journal: whatever is cut off its end, what was whole before is read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8dbg.runs.folder import RunWriter, open_folder
from fp8dbg.runs.journal import Journal, JournalContents, Stamp, own_batches, read_journal
from fp8dbg.runs.rows import to_batch
from tests.recorded import rows_of, step_row

STAMP = Stamp("steps", rank=3, part=2, session=4)


def batch(step: int, rows: int = 3) -> pa.RecordBatch:
    """A batch of `steps` that can be told from others."""
    return to_batch(
        "steps", [step_row(step, row, reason="x" * step) for row in range(rows)], lambda column, value: None
    )


def make(path: Path, batches: int = 4) -> list[int]:
    """A journal, and its size after its start and after each batch."""
    journal = Journal(path, STAMP)
    sizes = [journal.bytes]
    for step in range(batches):
        journal.append(batch(step))
        sizes.append(journal.bytes)
    journal.close()
    return sizes


def steps(contents: JournalContents) -> list[int]:
    """The step of each batch that was read."""
    return [b.column("step")[0].as_py() for b in contents.batches]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[int]]:
    """A journal's bytes, and where its batches end."""
    path = tmp_path_factory.mktemp("journal") / "j.arrows"
    sizes = make(path)
    return path.read_bytes(), sizes


def test_a_whole_journal_reads_whole(tmp_path: Path) -> None:
    """Batches, stamp, no damage; what is on disk is what was handed over, without closing anything."""
    journal = Journal(tmp_path / "j", STAMP)
    for step in range(3):
        journal.append(batch(step))
        assert (tmp_path / "j").stat().st_size == journal.bytes
        contents = read_journal(tmp_path / "j")
        assert (steps(contents), contents.damage, contents.stamp) == (list(range(step + 1)), "", STAMP)
    assert contents.batches[2].equals(batch(2))
    assert [b.num_rows for b in own_batches(tmp_path / "j")] == [3, 3, 3]


def test_every_cut_leaves_the_batches_before_it(example: tuple[bytes, list[int]], tmp_path: Path) -> None:
    """Just before, at and after every batch's end, and at every fifth length between."""
    data, sizes = example
    near = {size + by for size in sizes for by in (-8, -1, 0, 1, 4, 8)}
    for length in sorted({*range(0, len(data) + 1, 5), *near} - set(range(len(data) + 1, len(data) + 9))):
        (tmp_path / "j").write_bytes(data[:length])
        contents = read_journal(tmp_path / "j")
        assert steps(contents) == list(range(sum(size <= length for size in sizes[1:]))), length
        assert bool(contents.damage) == (length not in sizes), length


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_wrong_bytes_never_crash_the_reader(
    example: tuple[bytes, list[int]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A stranger's journal: any bytes in any place; batches before them stand, every value read is valid."""
    original, sizes = example
    start = data.draw(st.integers(0, len(original) - 1))
    wrong = data.draw(st.binary(min_size=1, max_size=32))
    path = tmp_path_factory.mktemp("journal") / "j"
    path.write_bytes((original[:start] + wrong + original[start + len(wrong) :])[: len(original)])
    contents = read_journal(path)
    for read in contents.batches:
        read.validate(full=True)
        read.to_pylist()
    if start >= sizes[0]:
        before = sum(size <= start for size in sizes[1:])
        assert steps(contents)[:before] == list(range(before))


def test_zeros_after_the_end_are_damage(example: tuple[bytes, list[int]], tmp_path: Path) -> None:
    """A machine that lost power may leave a file longer than what was written to it."""
    (tmp_path / "j").write_bytes(example[0] + bytes(100))
    contents = read_journal(tmp_path / "j")
    assert steps(contents) == [0, 1, 2, 3]
    assert contents.damage == "ends 96 bytes before its file"


def test_a_torn_journal_hides_nothing_else(tmp_path: Path) -> None:
    """The cut table loses its last batch, the others nothing, and a sentence says so; so does the session after it."""
    writer = RunWriter(tmp_path)
    for step in range(3):
        for table, rows in rows_of(step).items():
            writer.append(table, rows)
        writer.flush()
    writer._forget()
    torn = tmp_path / "journal/rank-00000.tensors.arrows"
    torn.write_bytes(torn.read_bytes()[:-10])
    with open_folder(tmp_path) as run:
        assert run.sql("SELECT count(DISTINCT step) FROM tensors").fetchall() == [(2,)]
        assert run.sql("SELECT count(DISTINCT step) FROM amax").fetchall() == [(3,)]
        [problem] = run.problems
        assert problem.startswith("journal/rank-00000.tensors.arrows is cut or damaged (")
        assert problem.endswith("); the 48 rows before that are read.")
    RunWriter(tmp_path).close()
    with open_folder(tmp_path) as run:
        assert run.sql("SELECT count(DISTINCT step) FROM tensors").fetchall() == [(2,)]
        assert run.problems == []
        [(kind, detail)] = run.sql("SELECT kind, detail FROM events").fetchall()
        assert kind == "gap"
        assert detail.startswith("rank-00000.tensors.arrows is cut or damaged")


@pytest.mark.parametrize("content", [b"", b"not arrow", b"\xff\xff\xff\xff\xff\xff\xff\x7f", None])
def test_a_journal_that_is_none_hides_nothing_else(tmp_path: Path, content: bytes | None) -> None:
    """Empty, foreign, or of another table; the session after it puts it aside and goes on."""
    writer = RunWriter(tmp_path)
    writer.append("steps", [step_row(0)])
    writer.flush()
    writer._forget()
    other = pa.table({"a": [1]})
    path = tmp_path / "journal/rank-00000.amax.arrows"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, other.schema) as stream:
        stream.write_table(other)
    if content is not None:
        path.write_bytes(content)
    with open_folder(tmp_path) as run:
        assert run.sql("SELECT step FROM steps").fetchall() == [(0,)]
        [problem] = run.problems
        assert problem.startswith("journal/rank-00000.amax.arrows is ")
        assert problem.endswith("; it is not read.")
    kept = path.read_bytes()
    with RunWriter(tmp_path) as writer:
        writer.append("amax", [{"step": 1, "rank": 0}])
    assert path.with_suffix(".unreadable").read_bytes() == kept
    with open_folder(tmp_path) as run:
        assert run.sql("SELECT step FROM amax").fetchall() == [(1,)]
        assert run.problems == []


def test_a_batch_that_does_not_go_down_whole_is_taken_back(tmp_path: Path) -> None:
    """The journal ends at the batch before, so that nothing torn is left behind."""
    journal = Journal(tmp_path / "j", STAMP)
    journal.append(batch(0))
    whole = journal.bytes
    journal.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        journal.append(batch(1))
    assert (tmp_path / "j").stat().st_size == whole
    assert journal.bytes == whole


@pytest.mark.parametrize("metadata", [None, {}, {b"fp8dbg": b"{"}, {b"fp8dbg": b"[]"}, {b"fp8dbg": b'{"rank": "x"}'}])
def test_a_stamp_that_is_none_is_none(metadata: dict[bytes, bytes] | None) -> None:
    """Foreign metadata; the right one comes back as it was."""
    assert Stamp.from_metadata(metadata) is None
    assert Stamp.from_metadata(STAMP.metadata()) == STAMP
