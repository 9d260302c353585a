"""What is in a run folder: every part and journal looked at, what cannot be read named, the rest made ready."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from fp8dbg.errors import RunFolderError
from fp8dbg.runs.files import entries, parse_journal_name, parse_part_name, parse_rank_folder
from fp8dbg.runs.fingerprint import parse_run_json_name, read_run_json, refuse_newer
from fp8dbg.runs.journal import JournalContents, Stamp, read_journal
from fp8dbg.runs.lock import is_recording
from fp8dbg.runs.parts import misfit, read_part_facts, unplaced
from fp8dbg.runs.schema import SCHEMA_VERSION, TABLES

_LOOKS = 9
"""How often a rank's parts are looked at while a writer or `compact` changes them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One part or journal of a table.

    Attributes:
        stamp: whose it is.
        path: its file.
        columns: those of the schema that it has.
        steps: smallest and largest step in it; None if unknown.
        rows: a journal's rows; None for a part.
    """

    stamp: Stamp
    path: Path
    columns: tuple[str, ...]
    steps: tuple[int, int] | None
    rows: pa.Table | None = None

    @property
    def age(self) -> tuple[int, int]:
        """Orders the pieces of a rank: later is newer. A compacted part has the place of the first one it replaces."""
        return min(self.sessions), min((self.stamp.part, *self.stamp.replaces))

    @property
    def sessions(self) -> dict[int, tuple[int, int] | None]:
        """The sessions that its rows are of: the smallest and largest step of each; None if unknown."""
        if self.stamp.spans:
            return {session: (first, last) for session, first, last in self.stamp.spans}
        return {self.stamp.session: self.steps}


@dataclass(slots=True)
class Contents:
    """Everything readable in a run folder, and a sentence for each thing that is not.

    ``copy`` keeps the files of a remote folder, which lie in ``path``, for as long as this object lives.
    """

    path: Path
    meta: dict[str, Any] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    state: str = "killed"
    copy: TemporaryDirectory[str] | None = None

    def report(self, path: Path, what: str) -> None:
        """Add a sentence about a file."""
        name = str(path.relative_to(self.path))
        self.problems.append(f"{name if name.isprintable() else ascii(name)} {what}.")


def read_folder(path: Path) -> Contents:
    """Look at every file of a run folder; only footers and journals are read.

    Raises:
        RunFolderError: it is missing, empty, of something else, or of a newer schema.
    """
    require_folder(path)
    contents = Contents(path)
    _read_meta(contents)
    journals = list(_journals(contents))  # before the parts: a journal that becomes a part meanwhile is then there
    parts = list(_parts(contents))
    finished = {(p.stamp.table, p.stamp.rank, n) for p in parts for n in (p.stamp.part, *p.stamp.replaces)}
    contents.pieces = parts + [j for j in journals if (j.stamp.table, j.stamp.rank, j.stamp.part) not in finished]
    if not contents.pieces and not contents.meta:
        raise RunFolderError(
            f"{path} is not a run folder: {contents.problems[0]}", "A run folder is what fp8dbg.attach writes to."
        )
    contents.state = _state(contents)
    return contents


def require_folder(path: Path) -> None:
    """Refuse what is no folder with something in it.

    Raises:
        RunFolderError: it is missing, a file, empty, or cannot be looked into.
    """
    try:
        _require_entries(path)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be opened: {error.strerror}.", "Give another folder.") from error


def _require_entries(path: Path) -> None:
    if not path.exists():
        raise RunFolderError(f"There is no folder {path}.", "Give the folder that fp8dbg.attach(model, run_dir) wrote.")
    if not path.is_dir():
        raise RunFolderError(f"{path} is a file, not a run folder.", "Give the folder that holds run.json.")
    if not any(path.iterdir()):
        raise RunFolderError(
            f"{path} is empty: nothing was recorded.", "Call fp8dbg.attach(model, ...) before training."
        )


def _read_meta(contents: Contents) -> None:
    """run.json of every rank; the lowest rank's speaks for the run."""
    ranks: dict[int, dict[str, Any]] = {}
    for file in entries(contents.path):
        rank = parse_run_json_name(file.name)
        if rank is None:
            continue
        meta = read_run_json(file)
        if isinstance(meta, str):
            contents.report(file, meta)
            continue
        refuse_newer(contents.path, meta)
        ranks[rank] = meta
        if isinstance(meta.get("stopped"), str):
            contents.report(file, f"says that recording stopped early: {meta['stopped']:.300}")
    if ranks:
        contents.meta = {**ranks[min(ranks)], "layers": _layers(ranks), "ranks": ranks}
    elif not contents.problems:
        contents.report(contents.path / "run.json", "is missing")


def _layers(ranks: dict[int, dict[str, Any]]) -> list[Any]:
    """The layers of all ranks: pipeline stages hold different ones."""
    seen: dict[str, Any] = {}
    for rank in sorted(ranks):
        layers = ranks[rank].get("layers")
        for layer in layers if isinstance(layers, list) else ():
            name = layer.get("layer") if isinstance(layer, dict) else layer
            seen.setdefault(str(name), layer)
    return list(seen.values())


def _journals(contents: Contents) -> Iterator[Piece]:
    for path in entries(contents.path / "journal"):
        rank, table = parse_journal_name(path.name) or (-1, "")
        if table not in TABLES:
            continue
        read = _read_settled(path)
        if not path.exists() and not read.batches:
            continue  # it became a part while we looked
        why = misfit(table, read.schema) if read.schema is not None else read.damage
        why = why or unplaced(table, {n for b in read.batches for n in b.schema.names if b.column(n).null_count})
        if why:
            contents.report(path, f"{why}; it is not read")
        elif read.damage:
            contents.report(path, f"{read.damage}; the {read.rows} rows before that are read")
        if read.batches and not why:
            stamp = read.stamp or Stamp(table, rank, 0)
            rows = pa.Table.from_batches(read.batches, read.schema)
            columns = _columns(table, read.schema)
            yield Piece(_own(stamp, table, rank), path, columns, _range(rows["step"]), rows.select(columns))


def _read_settled(path: Path) -> JournalContents:
    """A journal; read again where its end was perhaps being written at this moment."""
    read = read_journal(path)
    if read.damage:
        time.sleep(0.02)
        read = read_journal(path)
    return read


def _parts(contents: Contents) -> Iterator[Piece]:
    for table in TABLES:
        for folder in entries(contents.path / table):
            rank = parse_rank_folder(folder.name)
            if rank is not None:
                yield from _settled_parts(contents, table, rank, folder)


def _settled_parts(contents: Contents, table: str, rank: int, folder: Path) -> list[Piece]:
    """The parts of a rank without those that a compacted one replaces; looked at again if files came or went."""
    found: list[Piece] = []
    said = len(contents.problems)
    for _ in range(_LOOKS):
        del contents.problems[said:]
        files = _part_files(folder)
        found = [piece for path in files if (piece := _part(contents, table, rank, path)) is not None]
        if _part_files(folder) == files:
            break
    replaced = {number for piece in found for number in piece.stamp.replaces}
    return [piece for piece in found if piece.stamp.part not in replaced]


def _part_files(folder: Path) -> list[Path]:
    """Without what is being written, or was when the run was killed: the journal has its rows."""
    return [path for path in entries(folder) if path.suffix != ".tmp"]


def _part(contents: Contents, table: str, rank: int, path: Path) -> Piece | None:
    number = parse_part_name(path.name)
    facts = "is no part of a run" if number is None else read_part_facts(path)
    if not isinstance(facts, str):
        facts = misfit(table, facts.schema) or _newer(facts.stamp) or unplaced(table, facts.nulls) or facts
    if isinstance(facts, str):
        contents.report(path, f"{facts}; it is not read")
        return None
    stamp = _own(facts.stamp or Stamp(table, rank, 0), table, rank, number)
    return Piece(stamp, path, _columns(table, facts.schema), facts.steps)


def _newer(stamp: Stamp | None) -> str:
    newer = stamp is not None and stamp.schema_version > SCHEMA_VERSION
    return "was written by a newer fp8dbg" if newer else ""


def _own(stamp: Stamp, table: str, rank: int, number: int | None = None) -> Stamp:
    """The stamp with what the file's place says, which cannot be wrong."""
    part = stamp.part if number is None else number
    at_home = (stamp.table, stamp.rank, stamp.part) == (table, rank, part)
    replaces = stamp.replaces if at_home else ()  # a part copied from elsewhere must not hide this rank's
    return Stamp(table, rank, part, stamp.session, stamp.schema_version, replaces, stamp.spans)


def _columns(table: str, schema: pa.Schema) -> tuple[str, ...]:
    return tuple(name for name in TABLES[table].names if name in schema.names)


def _state(contents: Contents) -> str:
    metas: dict[int, dict[str, Any]] = contents.meta.get("ranks", {})
    ranks = {p.stamp.rank for p in contents.pieces} | set(metas)
    if any(is_recording(contents.path, rank) for rank in ranks):
        return "alive"
    if any(m.get("stopped") for m in metas.values()):
        return "stopped"
    return "finished" if metas and all(m.get("finished") is True for m in metas.values()) else "killed"


def _range(steps: pa.ChunkedArray) -> tuple[int, int] | None:
    import pyarrow.compute as pc  # 0.1 s, which only a run with journals needs

    found = pc.min_max(steps).as_py()
    return None if found["min"] is None else (found["min"], found["max"])
