"""Finished parts: Parquet files that appear whole and never change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from fp8dbg.runs.files import is_regular, write_whole
from fp8dbg.runs.journal import Stamp
from fp8dbg.runs.schema import SORTED_BY, TABLES, arrow_schema

_GROUP_BYTES = 4 << 20
"""A row group is sorted and encoded in memory: finishing a part takes about eight times this (measured)."""


def write_part(path: Path, stamp: Stamp, batches: Iterable[pa.RecordBatch]) -> None:
    """Write batches of a table as one part, whole or not at all.

    Args:
        path: the part's file.
        stamp: what it says about itself; its table gives the schema.
        batches: any number of record batches of that schema.

    Raises:
        OSError: nothing is left behind.
    """
    schema = arrow_schema(stamp.table)
    groups = (sorted_rows(group, stamp.table) for group in _groups(batches, schema))
    write_whole(path, lambda file: write_groups(file, stamp, groups))


def write_groups(file: IO[bytes], stamp: Stamp, groups: Iterable[pa.Table]) -> None:
    """Write Parquet of a part's form into an open file, each table of the part's schema as one row group."""
    schema = arrow_schema(stamp.table).with_metadata(stamp.metadata())
    with pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        write_page_checksum=True,
        use_dictionary=[f.name for f in schema if f.type == pa.string() or pa.types.is_integer(f.type)],
        use_byte_stream_split=[f.name for f in schema if f.type == pa.float64()],
    ) as writer:
        for group in groups:
            writer.write_table(group.cast(schema), row_group_size=max(1, group.num_rows))


def _groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    held_bytes = 0
    for batch in batches:
        held.append(conform(batch, schema))
        held_bytes += batch.nbytes
        if held_bytes >= _GROUP_BYTES:
            yield pa.Table.from_batches(held, schema)
            held, held_bytes = [], 0
    if held:
        yield pa.Table.from_batches(held, schema)


def conform(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Rows in a schema: columns by name, in its types; those they lack are NULL, those it lacks are dropped."""
    arrays = []
    for ours in schema:
        has = ours.name in rows.schema.names
        arrays.append(rows.column(ours.name).cast(ours.type) if has else pa.nulls(rows.num_rows, ours.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def sorted_rows(group: pa.Table, table: str) -> pa.Table:
    """Rows in the order that a part of this table has."""
    keys = SORTED_BY.get(table)
    return group if keys is None else group.sort_by([(key, "ascending") for key in keys])


@dataclass(frozen=True, slots=True)
class PartFacts:
    """What a part's footer says.

    Attributes:
        schema: its columns.
        rows: how many.
        steps: smallest and largest step; None if the footer does not say.
        stamp: None in a file that another program wrote.
        nulls: columns that hold a NULL, as far as the footer says.
    """

    schema: pa.Schema
    rows: int
    steps: tuple[int, int] | None
    stamp: Stamp | None
    nulls: tuple[str, ...] = ()


def read_part_facts(path: Path) -> PartFacts | str:
    """Read a part's footer: its facts, or why it is no readable part, as the end of a sentence."""
    if not is_regular(path):
        return "is not a regular file"
    try:
        if not path.stat().st_size:
            return "is empty"
        with pq.ParquetFile(path, memory_map=False) as file:
            schema, metadata = file.schema_arrow, file.metadata
            _ = schema.names  # raises here, not later, where a name is no Unicode
            stamp = Stamp.from_metadata(schema.metadata)
            return PartFacts(schema, metadata.num_rows, _step_range(metadata), stamp, _nulls(metadata))
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        return f"is cut, damaged or not Parquet ({' '.join(str(error).split())[:200]})"


def _nulls(metadata: pq.FileMetaData) -> tuple[str, ...]:
    """Columns with a NULL in them, as far as the footer says."""
    chunks = (
        metadata.row_group(g).column(c) for g in range(metadata.num_row_groups) for c in range(metadata.num_columns)
    )
    return tuple(
        {c.path_in_schema: None for c in chunks if c.statistics is not None and (c.statistics.null_count or 0) > 0}
    )


def _step_range(metadata: pq.FileMetaData) -> tuple[int, int] | None:
    places = [i for i in range(metadata.num_columns) if metadata.schema.column(i).path == "step"]
    groups = range(metadata.num_row_groups) if places else ()
    statistics = [metadata.row_group(g).column(places[0]).statistics for g in groups]
    known = [s for s in statistics if s is not None and s.has_min_max and isinstance(s.min, int)]
    return (min(s.min for s in known), max(s.max for s in known)) if known else None


def misfit(table: str, schema: pa.Schema) -> str:
    """Why columns are not a table's, as the end of a sentence; "" if they are, be it an older or a wider set."""
    names = schema.names
    missing = [name for name in ("step", "rank") if name not in names]
    if missing:
        return f"is no part of {table}: it has no column {missing[0]}"
    if len(set(names)) < len(names):
        return f"is no part of {table}: two of its columns have one name"
    for ours in arrow_schema(table):
        if ours.name in names and not _fits(schema.field(ours.name).type, ours.type):
            return f"is no part of {table}: its {ours.name} is {schema.field(ours.name).type}, not {ours.type}"
    return ""


def unplaced(table: str, nulls: Iterable[str]) -> str:
    """Why rows with a NULL in these columns cannot be placed, as the end of a sentence; "" if they can.

    A row of no step or of no rank is of nothing; in ``events`` a step that is NULL has a meaning.
    """
    missing = sorted({"step", "rank"} & set(TABLES[table].keys) & set(nulls))
    return f"holds rows without {missing[0]}" if missing else ""


def _fits(theirs: pa.DataType, ours: pa.DataType) -> bool:
    alike = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, _is_text)
    return theirs == ours or pa.types.is_null(theirs) or any(kind(theirs) and kind(ours) for kind in alike)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)  # type: ignore[no-any-return]
