"""One table of one rank on disk: its journal, its parts, and the way from one to the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from fp8dbg.runs.files import entries, journal_name, parse_part_name, part_name, rank_folder
from fp8dbg.runs.journal import Journal, Stamp, own_batches, read_journal
from fp8dbg.runs.parts import misfit, read_part_facts, write_part


@dataclass(frozen=True, slots=True)
class Past:
    """What earlier sessions left of a table.

    Attributes:
        session: number of the last session seen; 0: none.
        last_step: largest step seen; None: no row.
        lost: what could not be kept, as a sentence; "" if all was.
    """

    session: int = 0
    last_step: int | None = None
    lost: str = ""


class TableStore:
    """A table's files; every method may raise OSError.

    A journal becomes a part in this order: the part is written under a temporary name, synced, renamed; then the
    journal is removed. Stopped in between, both exist, and the part's number in the journal's stamp says that the
    journal is to be ignored. So no row is lost and none is doubled.

    Args:
        folder: the run folder.
        table, rank: whose files; no other's are touched.
        part_bytes: size at which the journal becomes a part.
    """

    def __init__(self, folder: Path, table: str, rank: int, part_bytes: int) -> None:
        self.table, self.rank, self.part_bytes = table, rank, part_bytes
        self.journal_path = folder / "journal" / journal_name(rank, table)
        self.parts = folder / table / rank_folder(rank)
        self.bytes = 0
        self._journal: Journal | None = None

    def adopt(self) -> Past:
        """Finish what a killed session left in the journal, and say what is there."""
        self._sweep()
        past = self._past_parts()
        if not self.journal_path.exists():
            return past
        contents = read_journal(self.journal_path)
        if contents.schema is None or misfit(self.table, contents.schema):
            return self._set_aside(past, contents.damage or "its columns are not the table's")
        stamp = contents.stamp or Stamp(self.table, self.rank, 0, max(past.session, 1))
        if contents.batches and not self._is_finished(stamp.part):
            number = max(stamp.part, self.next_number())
            self._write_part(Stamp(self.table, self.rank, number, stamp.session), iter(contents.batches))
        self.journal_path.unlink()
        lost = f"{self.journal_path.name} {contents.damage}; what came after was lost." if contents.damage else ""
        again = self._past_parts()
        return Past(max(again.session, stamp.session), again.last_step, lost)

    def append(self, batch: pa.RecordBatch, session: int) -> None:
        """Hand a batch to the operating system; start a new part when the journal has become large."""
        if self._journal is None:
            stamp = Stamp(self.table, self.rank, self.next_number(), session)
            self._journal = Journal(self.journal_path, stamp)
        self._journal.append(batch)
        if self._journal.bytes >= self.part_bytes:
            self.finish()

    def finish(self) -> None:
        """Turn the journal into a part."""
        if self._journal is None:
            return
        self._write_part(self._journal.stamp, own_batches(self._journal.path))
        pa.default_memory_pool().release_unused()
        self.abandon()
        self.journal_path.unlink()

    def abandon(self) -> None:
        """Let go of the journal, which stays as it is."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    @property
    def bytes_on_disk(self) -> int:
        """Bytes this session has in parts and journal."""
        return self.bytes + (self._journal.bytes if self._journal else 0)

    def _sweep(self) -> None:
        """Remove what was being written under a temporary name when a session was killed."""
        beside = [p for p in entries(self.journal_path.parent) if p.name.startswith(f"{self.journal_path.name}.")]
        for path in (*entries(self.parts), *beside):
            if path.suffix == ".tmp":
                path.unlink(missing_ok=True)

    def _write_part(self, stamp: Stamp, batches: Iterator[pa.RecordBatch]) -> None:
        path = self.parts / part_name(stamp.part)
        write_part(path, stamp, batches)
        self.bytes += path.stat().st_size

    def _is_finished(self, number: int) -> bool:
        return not isinstance(read_part_facts(self.parts / part_name(number)), str)

    def _numbers(self) -> list[int]:
        found = (parse_part_name(path.name) for path in entries(self.parts))
        return sorted(number for number in found if number is not None)

    def next_number(self) -> int:
        """The number that the next part gets; larger than any that is there."""
        return max(self._numbers(), default=0) + 1

    def _past_parts(self) -> Past:
        session, last = 0, None
        for number in self._numbers():
            facts = read_part_facts(self.parts / part_name(number))
            if not isinstance(facts, str):
                session = max(session, facts.stamp.session if facts.stamp else 1)
                last = max((s for s in (last, facts.steps and facts.steps[1]) if s is not None), default=None)
        return Past(session, last)

    def _set_aside(self, past: Past, why: str) -> Past:
        """Keep a journal that cannot be read under another name, out of the way of the new one."""
        aside = self.journal_path.with_suffix(".unreadable")
        self.journal_path.replace(aside)
        return Past(
            past.session, past.last_step, f"{self.journal_path.name} could not be read ({why}): now {aside.name}."
        )
