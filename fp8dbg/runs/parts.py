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
from fp8dbg.runs.schema import arrow_schema

_GROUP_BYTES = 8 << 20
"""A row group is sorted and encoded in memory: this bounds what finishing a part takes."""

_SORTED_BY = {
    "amax": ("layer", "tensor", "step", "microbatch"),
    "tensors": ("layer", "tensor", "what_if", "step", "microbatch", "call"),
    "gemms": ("layer", "gemm", "step", "microbatch", "call"),
}
"""Neighbours that resemble each other compress. The other tables keep their order, which says what came last."""


def write_part(path: Path, stamp: Stamp, batches: Iterable[pa.RecordBatch]) -> None:
    """Write batches of a table as one part, whole or not at all.

    Args:
        path: the part's file.
        stamp: what it says about itself; its table gives the schema.
        batches: any number of record batches of that schema.

    Raises:
        OSError: nothing is left behind.
    """
    schema = arrow_schema(stamp.table).with_metadata(stamp.metadata())
    floats = [f.name for f in schema if f.type == pa.float64()]
    texts = [f.name for f in schema if f.type == pa.string()]

    def write(file: IO[bytes]) -> None:
        with pq.ParquetWriter(
            file, schema, compression="zstd", use_dictionary=texts, use_byte_stream_split=floats
        ) as writer:
            for group in _groups(batches, schema):
                writer.write_table(_sorted(group, stamp.table), row_group_size=group.num_rows)

    write_whole(path, write)


def _groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    held_bytes = 0
    for batch in batches:
        held.append(batch.cast(schema))
        held_bytes += batch.nbytes
        if held_bytes >= _GROUP_BYTES:
            yield pa.Table.from_batches(held, schema)
            held, held_bytes = [], 0
    if held:
        yield pa.Table.from_batches(held, schema)


def _sorted(group: pa.Table, table: str) -> pa.Table:
    keys = _SORTED_BY.get(table)
    return group if keys is None else group.sort_by([(key, "ascending") for key in keys])


@dataclass(frozen=True, slots=True)
class PartFacts:
    """What a part's footer says.

    Attributes:
        schema: its columns.
        rows: how many.
        first_step: smallest step; None if the footer does not say.
        stamp: None in a file that another program wrote.
    """

    schema: pa.Schema
    rows: int
    first_step: int | None
    stamp: Stamp | None


def read_part_facts(path: Path) -> PartFacts | str:
    """Read a part's footer: its facts, or why it is no readable part, as the end of a sentence."""
    if not is_regular(path):
        return "is not a regular file"
    try:
        if not path.stat().st_size:
            return "is empty"
        with pq.ParquetFile(path, memory_map=False) as file:
            schema = file.schema_arrow
            return PartFacts(
                schema, file.metadata.num_rows, _first_step(file.metadata), Stamp.from_metadata(schema.metadata)
            )
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        return f"is cut, damaged or not Parquet ({' '.join(str(error).split())[:200]})"


def _first_step(metadata: pq.FileMetaData) -> int | None:
    first: int | None = None
    for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
        for column in (group.column(i) for i in range(group.num_columns)):
            if column.path_in_schema == "step" and column.statistics is not None and column.statistics.has_min_max:
                first = column.statistics.min if first is None else min(first, column.statistics.min)
    return first
