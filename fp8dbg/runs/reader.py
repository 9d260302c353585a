"""What is in a run folder: every part and journal looked at, what cannot be read named, the rest made ready."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fp8dbg.errors import RunFolderError
from fp8dbg.runs.files import entries, parse_journal_name, parse_part_name, parse_rank_folder
from fp8dbg.runs.fingerprint import read_run_json
from fp8dbg.runs.journal import read_journal
from fp8dbg.runs.lock import is_recording
from fp8dbg.runs.parts import read_part_facts
from fp8dbg.runs.schema import SCHEMA_VERSION, TABLES, arrow_schema
from fp8dbg.runs.views import Source


@dataclass(frozen=True, slots=True)
class Piece:
    """One part or journal of a table.

    Attributes:
        columns: those of the schema that it has.
        first_step: smallest step in it; None if unknown.
        rows: a journal's rows; None for a part.
    """

    table: str
    rank: int
    number: int
    session: int
    path: Path
    columns: tuple[str, ...]
    first_step: int | None
    rows: pa.Table | None = None


@dataclass(slots=True)
class Contents:
    """Everything readable in a run folder, and a sentence for each thing that is not."""

    path: Path
    meta: dict[str, Any] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    state: str = "killed"


def read_folder(path: Path) -> Contents:
    """Look at every file of a run folder; only footers and journals are read.

    Raises:
        RunFolderError: it is missing, empty, of something else, or of a newer schema.
    """
    contents = Contents(path)
    _require_folder(path)
    _read_meta(contents)
    journals = list(_journals(contents))  # before the parts: a journal that becomes a part meanwhile is then there
    parts = list(_parts(contents))
    finished = {(p.table, p.rank, p.number) for p in parts}
    contents.pieces = parts + [j for j in journals if (j.table, j.rank, j.number) not in finished]
    if not contents.pieces and "schema_version" not in contents.meta:
        hint = contents.problems[0] if contents.problems else ""
        raise RunFolderError(f"{path} is not a run folder: {hint}", "A run folder is what fp8dbg.attach writes to.")
    contents.state = _state(contents)
    return contents


def _require_folder(path: Path) -> None:
    if not path.exists():
        raise RunFolderError(f"There is no folder {path}.", "Give the folder that fp8dbg.attach(model, run_dir) wrote.")
    if not path.is_dir():
        raise RunFolderError(f"{path} is a file, not a run folder.", "Give the folder that holds run.json.")
    if not entries(path):
        raise RunFolderError(
            f"{path} is empty: nothing was recorded.", "Call fp8dbg.attach(model, ...) before training."
        )


def _read_meta(contents: Contents) -> None:
    found: dict[str, dict[str, Any]] = {}
    for file in [contents.path / "run.json", *contents.path.glob("run.rank-*.json")]:
        meta = read_run_json(file)
        if isinstance(meta, str):
            contents.problems.append(f"{file.name} {meta}.")
            continue
        if meta["schema_version"] > SCHEMA_VERSION:
            raise RunFolderError(
                f"{contents.path} was recorded with schema {meta['schema_version']}; this fp8dbg knows up to "
                f"{SCHEMA_VERSION}.",
                "Update fp8dbg to read it.",
            )
        found[str(meta.get("rank", 0))] = meta
    if found:
        first = next(iter(found.values()))
        contents.meta = first | {"layers": _layers(found.values()), "ranks": found}


def _layers(metas: Any) -> list[Any]:
    """The layers of all ranks: pipeline stages hold different ones."""
    seen: dict[str, Any] = {}
    for meta in metas:
        for layer in meta.get("layers") or []:
            name = layer.get("layer") if isinstance(layer, dict) else layer
            seen.setdefault(str(name), layer)
    return list(seen.values())


def _journals(contents: Contents) -> Iterator[Piece]:
    for path in entries(contents.path / "journal"):
        named = parse_journal_name(path.name)
        if named is None or named[1] not in TABLES:
            continue
        read = read_journal(path)
        if read.damage:
            contents.problems.append(
                f"{_relative(contents, path)} {read.damage}; the {read.rows} rows before are read."
            )
        if read.schema is None or not read.batches:
            continue
        if misfit := _misfit(named[1], read.schema):
            contents.problems.append(f"{_relative(contents, path)} {misfit}; it is not read.")
            continue
        rows = pa.Table.from_batches(read.batches, read.schema)
        stamp = read.stamp
        columns = _columns(named[1], read.schema)
        yield Piece(
            named[1],
            named[0],
            stamp.part if stamp else 0,
            stamp.session if stamp else 1,
            path,
            columns,
            pc.min(rows["step"]).as_py(),
            rows.select(columns).append_column("_order", pa.array(range(rows.num_rows), pa.int64())),
        )


def _parts(contents: Contents) -> Iterator[Piece]:
    for table in TABLES:
        for folder in entries(contents.path / table):
            rank = parse_rank_folder(folder.name)
            for path in entries(folder) if rank is not None else ():
                if path.suffix == ".tmp":
                    continue  # a part that was being written when the run was killed; the journal has its rows
                number = parse_part_name(path.name)
                facts = read_part_facts(path) if number is not None else "is no part of a run"
                if not isinstance(facts, str):
                    facts = _misfit(table, facts.schema) or facts
                if isinstance(facts, str):
                    contents.problems.append(f"{_relative(contents, path)} {facts}; it is not read.")
                    continue
                assert rank is not None and number is not None  # noqa: PT018 - for the type checker
                session = facts.stamp.session if facts.stamp else 1
                yield Piece(table, rank, number, session, path, _columns(table, facts.schema), facts.first_step)


def _relative(contents: Contents, path: Path) -> str:
    text = str(path.relative_to(contents.path))
    return text if text.isprintable() else repr(text)


def _columns(table: str, schema: pa.Schema) -> tuple[str, ...]:
    return tuple(name for name in TABLES[table].names if name in schema.names)


def _misfit(table: str, schema: pa.Schema) -> str:
    """Why a file's columns are not the table's; "" if they are, be it an older or wider set of them."""
    missing = [name for name in ("step", "rank") if name not in schema.names]
    if missing:
        return f"is no part of {table}: it has no column {missing[0]}"
    if len(set(schema.names)) < len(schema.names):
        return "has two columns of one name"
    for ours in arrow_schema(table):
        if ours.name in schema.names and not _fits(schema.field(ours.name).type, ours.type):
            return f"is no part of {table}: its {ours.name} is {schema.field(ours.name).type}, not {ours.type}"
    return ""


def _fits(theirs: pa.DataType, ours: pa.DataType) -> bool:
    if pa.types.is_struct(ours):
        return theirs == ours or pa.types.is_null(theirs)
    alike = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, _is_text)
    return pa.types.is_null(theirs) or any(kind(theirs) and kind(ours) for kind in alike)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _state(contents: Contents) -> str:
    ranks = {p.rank for p in contents.pieces} | {int(r) for r in contents.meta.get("ranks", {})}
    if any(is_recording(contents.path, rank) for rank in ranks):
        return "alive"
    metas = contents.meta.get("ranks", {}).values()
    return "finished" if metas and all(m.get("finished") is True for m in metas) else "killed"


def sources_of(contents: Sequence[Contents]) -> list[Source]:
    """Pieces gathered into as few sources as read alike, oldest first."""
    gathered: dict[tuple[Any, ...], list[str]] = {}
    sources: list[Source] = []
    for index, folder in enumerate(contents):
        cutoffs = _cutoffs(folder)
        for piece in sorted(folder.pieces, key=lambda p: (p.session, p.rows is not None, p.number)):
            before = cutoffs.get((piece.rank, piece.session))
            if piece.rows is not None:
                sources.append(
                    Source(piece.table, piece.columns, 1_000_000 + len(sources), before=before, rows=piece.rows)
                )
            else:
                key = (index, piece.session, piece.table, piece.columns, before)
                gathered.setdefault(key, []).append(str(piece.path.absolute()))
    for order, ((_, _, table, columns, before), files) in enumerate(gathered.items()):
        sources.append(Source(table, columns, order, before=before, files=tuple(files)))
    return sources


def _cutoffs(folder: Contents) -> dict[tuple[int, int], int]:
    """For each rank and session that a later one went back behind: the step from which the later one counts."""
    first: dict[tuple[int, int], int] = {}
    for piece in folder.pieces:
        if piece.first_step is not None:
            key = (piece.rank, piece.session)
            first[key] = min(first.get(key, piece.first_step), piece.first_step)
    return {
        (rank, session): min(later)
        for rank, session in first
        if (later := [step for (r, s), step in first.items() if r == rank and s > session])
    }
