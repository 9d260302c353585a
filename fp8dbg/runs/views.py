"""The SQL of a run folder's views, as text: parts and journals of any age as the tables of the schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from fp8dbg.runs.schema import HISTOGRAM, SORTED_BY, TABLES, arrow_schema

_SQL_TYPES = {
    pa.int64(): "BIGINT",
    pa.int32(): "INTEGER",
    pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR",
    pa.bool_(): "BOOLEAN",
    HISTOGRAM: "STRUCT(exponent SMALLINT, counts BIGINT[], codes USMALLINT[])",
}

TENSOR_RATIOS = {
    "underflow_ratio": (
        "underflow / nullif(numel - zeros - nan - inf, 0)",
        "underflow over finite non-zero elements; NULL where there are none",
    ),
    "saturated_ratio": (
        "saturated / nullif(numel - nan - inf, 0)",
        "saturated over finite elements",
    ),
    "at_max_ratio": ("at_max / nullif(numel - nan - inf, 0)", "at_max over finite elements"),
    "nan_ratio": ("nan / nullif(numel, 0)", "nan over all elements"),
    "underflow_percent_te": (
        "100.0 * underflow / nullif(numel, 0)",
        "underflow over all elements in per cent, as Transformer Engine 2.7 and later print it",
    ),
    "state": (
        "CASE WHEN numel IS NULL THEN NULL WHEN numel = 0 THEN 'empty' WHEN nan + inf > 0 THEN 'non-finite' "
        "WHEN zeros = numel THEN 'all zero' ELSE 'ok' END",
        "empty, all zero, non-finite (some element is NaN or infinite) or ok; NULL where nothing was counted",
    ),
}
"""Columns that the view ``tensor_ratios`` adds to ``tensors``: expression and meaning."""


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of one table that are read alike: either Parquet files or one Arrow table.

    Attributes:
        table: the table they belong to.
        columns: columns they have; the others are NULL.
        order: orders sources of ``steps``; later wins.
        before: only rows of a smaller step count; None: all.
        files: Parquet files, oldest first; empty where ``rows`` is set.
        rows: the rows of a journal.
    """

    table: str
    columns: tuple[str, ...]
    order: int
    before: int | None = None
    files: tuple[str, ...] = ()
    rows: pa.Table | None = None


def view_sql(table: str, sources: list[tuple[Source, str]]) -> str:
    """CREATE VIEW for a table.

    Args:
        table: one of the schema's.
        sources: each source with the SQL that its rows are selected from.
    """
    selects = [_select(table, source, rows) for source, rows in sources]
    union = "\nUNION ALL ".join(selects) or f"SELECT {_columns(table, ())} WHERE false"
    if table == "steps" and selects:
        union = _last_wins(union)
    return f"CREATE VIEW {table} AS {union}"


def ratios_sql() -> str:
    """CREATE VIEW for ``tensor_ratios``."""
    added = ", ".join(f"{expression} AS {name}" for name, (expression, _) in TENSOR_RATIOS.items())
    return f"CREATE VIEW tensor_ratios AS SELECT *, {added} FROM tensors"


def parquet_sql(files: tuple[str, ...], ordered: bool) -> str:
    """The SQL that reads parts; where order matters with ``_order``: the file's place in the list, then the row's."""
    listed = ", ".join(quoted(f) for f in files)
    rows = f"read_parquet([{listed}], file_row_number = {str(ordered).lower()}, hive_partitioning = false)"
    return f"(SELECT *, (file_index::BIGINT << 32) + file_row_number AS _order FROM {rows})" if ordered else rows


def sum_sql(table: str, files: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    """SELECT of how many rows files hold, and the sum of their hashes.

    Args:
        table: one of the schema's.
        files: each file with the columns it has, in order.
    """
    placed = table not in SORTED_BY
    place = "row_number() OVER (ORDER BY _file, _order)" if placed else "0"
    union = " UNION ALL ".join(
        f"SELECT {_columns(table, columns)}, {index} AS _file, {'_order' if placed else 0} AS _order "
        f"FROM {parquet_sql((file,), ordered=placed)}"
        for index, (file, columns) in enumerate(files)
    )
    names = ", ".join(TABLES[table].names)
    return f"SELECT count(*), sum(hash({names}, _place)::HUGEINT) FROM (SELECT *, {place} AS _place FROM ({union}))"


def quoted(text: str) -> str:
    """Text as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def _select(table: str, source: Source, rows: str) -> str:
    order = f", {source.order << 48} + _order AS _order" if table == "steps" else ""
    where = "" if source.before is None else f" WHERE step < {source.before} OR step IS NULL"
    return f"SELECT {_columns(table, source.columns)}{order} FROM {rows}{where}"


def _columns(table: str, present: tuple[str, ...]) -> str:
    """Every column of the table in its own type; a NaN or infinity that another program wrote is NULL."""
    out = []
    for field in arrow_schema(table):
        value = f"CAST({field.name if field.name in present else 'NULL'} AS {_SQL_TYPES[field.type]})"
        if field.type == pa.float64() and field.name in present:
            value = f"CASE WHEN isfinite({value}) THEN {value} END"
        out.append(f"{value} AS {field.name}")
    return ", ".join(out)


def _last_wins(union: str) -> str:
    """One row for each step and rank, in that order: of each column the last value that is not NULL."""
    values = (c.name for c in TABLES["steps"].columns if c.name not in TABLES["steps"].keys)
    merged = ", ".join(f"arg_max({name}, _order) AS {name}" for name in values)
    return f"SELECT step, rank, {merged} FROM ({union}) GROUP BY step, rank ORDER BY step, rank"
