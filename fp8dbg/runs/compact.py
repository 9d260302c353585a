"""Compacting a run folder: many small parts become few sorted ones; at no moment is a row missing or there twice.

The parts of one table and rank are merged, as many as fit into memory at once. The merged part is written
under a temporary name, read back and compared with its sources (rows, and a sum of hashes over every value), synced,
and renamed; its stamp names the parts it replaces, which readers ignore from that moment on; then these are removed.
Killed anywhere in between, the next call removes what is left of them.

Which rows of a resumed run count is decided by their session: a later one that began at an earlier step takes the place
of what the others recorded from there on. A session that none has gone back behind is merged with the next one, and the
stamp keeps the steps of each, so that one still to come supersedes of them what it would have superseded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from fp8dbg.errors import RunFolderError
from fp8dbg.runs.files import entries, folder_path, parse_part_name, part_name, rank_folder, write_whole
from fp8dbg.runs.journal import Stamp
from fp8dbg.runs.lock import RankLock
from fp8dbg.runs.parts import conform, read_part_facts, sorted_rows, write_groups
from fp8dbg.runs.queries import contents_sum
from fp8dbg.runs.reader import Contents, Piece, read_folder
from fp8dbg.runs.schema import TABLES, arrow_schema
from fp8dbg.runs.sources import steps_of_sessions, superseded
from fp8dbg.runs.store import TableStore
from fp8dbg.runs.writer import PART_BYTES

GROUP_BYTES = 128 << 20
"""Encoded bytes that are merged at once: sorting them takes about six times this in memory."""

GROUP_ROWS = 122_880
"""Rows of a row group: what DuckDB reads at once."""


@dataclass(slots=True)
class Compacted:
    """What `compact` did.

    Attributes:
        parts_before, parts_after: readable parts of the ranks that were compacted.
        bytes_before, bytes_after: their size on disk.
        rows: rows that were rewritten.
        left: a sentence for each rank or part that was left as it is.
    """

    parts_before: int = 0
    parts_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    rows: int = 0
    left: list[str] = field(default_factory=list)


def compact(path: str | Path, group_bytes: int = GROUP_BYTES) -> Compacted:
    """Merge the parts of a run folder. A rank's lock is held meanwhile: nothing can start to record it.

    Args:
        path: the run folder. Ranks that are being recorded are left alone; what a killed one left in its journals is
            made into parts first.
        group_bytes: how much is merged at once, and so about the largest size of a part.

    Raises:
        RunFolderError: it is no run folder, cannot be written, or all its ranks are being recorded.
    """
    folder = folder_path(path)
    contents = read_folder(folder)
    ranks = sorted({p.stamp.rank for p in contents.pieces} | set(contents.meta.get("ranks", {})))
    done = Compacted(left=list(contents.problems))
    busy = [why for rank in ranks if (why := _rank(folder, rank, group_bytes, done))]
    if busy and len(busy) == len(ranks):
        raise RunFolderError(busy[0], "Compact it when the run has ended.")
    done.left += busy
    return done


def _rank(folder: Path, rank: int, group_bytes: int, done: Compacted) -> str:
    """Compact one rank; why it was left alone, "" if it was not."""
    try:
        (folder / "journal").mkdir(exist_ok=True)
        lock = RankLock(folder, rank)
    except RunFolderError as error:
        return error.message
    except OSError as error:
        raise _refused(folder, error) from error
    try:
        for table in TABLES:
            TableStore(folder, table, rank, PART_BYTES).adopt()
            _remove_replaced(folder, table, rank)
        _count(folder, rank, done, group_bytes)
    except (OSError, pa.ArrowException) as error:
        raise _refused(folder, error) from error
    finally:
        lock.release()
    return ""


def _refused(folder: Path, error: Exception) -> RunFolderError:
    why = getattr(error, "strerror", None) or error
    return RunFolderError(
        f"{folder} could not be compacted ({why:.300}).", "Nothing is lost: all parts are as readable."
    )


def _count(folder: Path, rank: int, done: Compacted, group_bytes: int) -> None:
    contents = read_folder(folder)
    parts = _parts(contents, rank)
    done.parts_before += len(parts)
    done.bytes_before += sum(p.path.stat().st_size for p in parts)
    for group in _groups(parts, group_bytes, _lasting(contents, rank)):
        done.rows += _merge(folder, group)
    parts = _parts(read_folder(folder), rank)
    done.parts_after += len(parts)
    done.bytes_after += sum(p.path.stat().st_size for p in parts)


def _parts(contents: Contents, rank: int) -> list[Piece]:
    """The readable parts of a rank by table, session and number."""
    found = [p for p in contents.pieces if p.rows is None and p.stamp.rank == rank]
    return sorted(found, key=lambda p: (p.stamp.table, p.age))


def _lasting(contents: Contents, rank: int) -> dict[int, int]:
    """The last step of each session of a rank that no later one went back behind."""
    gone = superseded(contents)
    return {s: last for (r, s), (_, last) in steps_of_sessions(contents).items() if r == rank and (r, s) not in gone}


def _groups(parts: Iterable[Piece], most: int, lasting: dict[int, int]) -> Iterator[list[Piece]]:
    """Neighbours of one table that belong and fit together; a part that fits with no neighbour is left out."""
    for _, of_table in groupby(parts, key=lambda p: p.stamp.table):
        group: list[Piece] = []
        held = 0
        for piece in (p for p in of_table if not _is_wider(p)):
            size = _encoded_bytes(piece.path)
            if group and (held + size > most or not _belong_together(group[-1], piece, lasting)):
                yield from [group] * (len(group) > 1)
                group, held = [], 0
            group.append(piece)
            held += size
        yield from [group] * (len(group) > 1)


def _belong_together(earlier: Piece, later: Piece, lasting: dict[int, int]) -> bool:
    """Whether every session still to come supersedes rows of both alike, or none of the earlier one's.

    So it is where they are of one session, or where no row of the earlier one is past its session's last step, which
    lies before all later ones' steps. Only events can be past it.
    """
    if earlier.stamp.session == later.stamp.session:
        return True
    known = earlier.sessions.items()
    return all(steps is not None and steps[1] <= lasting.get(session, -1) for session, steps in known)


def _is_wider(piece: Piece) -> bool:
    """Whether a part has columns that this schema lacks: merged, they would be lost."""
    return len(pq.read_schema(piece.path).names) > len(piece.columns)


def _encoded_bytes(path: Path) -> int:
    metadata = pq.read_metadata(path)
    return sum(metadata.row_group(g).total_byte_size for g in range(metadata.num_row_groups))


def _merge(folder: Path, group: list[Piece]) -> int:
    """Put one part in the place of several; how many rows it has."""
    last = group[-1].stamp
    place = folder / last.table / rank_folder(last.rank)
    replaces = sorted({n for p in group for n in (p.stamp.part, *p.stamp.replaces)})
    number = max(TableStore(folder, last.table, last.rank, PART_BYTES).next_number(), replaces[-1] + 1)
    stamp = Stamp(last.table, last.rank, number, last.session, replaces=tuple(replaces), spans=_spans(group))
    expected = contents_sum(last.table, [(str(p.path.absolute()), p.columns) for p in group])
    rows = sorted_rows(_rows(group), last.table)

    def write(file: IO[bytes]) -> None:
        write_groups(file, stamp, (rows.slice(at, GROUP_ROWS) for at in range(0, rows.num_rows, GROUP_ROWS)))
        file.flush()
        _verify(Path(file.name), stamp, expected)

    write_whole(place / part_name(number), write)
    _remove_replaced(folder, last.table, last.rank)
    return int(rows.num_rows)


def _spans(group: list[Piece]) -> tuple[tuple[int, int, int], ...]:
    """Session, first and last step of each session in a group; none where it is but one."""
    steps: dict[int, list[int]] = {}
    for piece in group:
        for session, known in piece.sessions.items():
            steps.setdefault(session, []).extend(known or ())
    spans = ((session, min(known), max(known)) for session, known in steps.items() if known)
    return tuple(spans) if len(steps) > 1 else ()


def _rows(group: list[Piece]) -> pa.Table:
    schema = arrow_schema(group[0].stamp.table)
    tables = [pq.read_table(p.path, partitioning=None, page_checksum_verification=True) for p in group]
    return pa.Table.from_batches([conform(b, schema) for t in tables for b in t.to_batches()], schema)


def _verify(path: Path, stamp: Stamp, expected: tuple[int, int]) -> None:
    """Read the merged part back.

    Raises:
        OSError: it does not hold what its sources hold; the sources stay.
    """
    if contents_sum(stamp.table, [(str(path.absolute()), TABLES[stamp.table].names)]) != expected:
        raise OSError(f"the merged part of {stamp.table} does not hold what its sources hold")


def _remove_replaced(folder: Path, table: str, rank: int) -> None:
    """Remove the parts that a merged one replaces, which a killed `compact` may have left."""
    place = folder / table / rank_folder(rank)
    for path in entries(place):
        facts = read_part_facts(path) if parse_part_name(path.name) is not None else ""
        stamp = None if isinstance(facts, str) else facts.stamp
        if stamp is not None and place / part_name(stamp.part) == path and (stamp.table, stamp.rank) == (table, rank):
            for number in stamp.replaces:
                (place / part_name(number)).unlink(missing_ok=True)
