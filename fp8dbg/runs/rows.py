"""Rows as dicts -> Arrow record batches: the one place where NaN, infinities and wrong types are kept out of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fp8dbg.errors import UnknownNameError
from fp8dbg.runs.schema import TABLES, arrow_schema
from fp8dbg.text import in_unicode

Row = Mapping[str, Any]

_COLUMNS = {name: frozenset(table.names) for name, table in TABLES.items()}
_ROW_BYTES = {name: 12 * len(table.names) for name, table in TABLES.items()}
"""What a row takes without its texts and lists, measured generously."""


def check_columns(table: str, row: Row) -> None:
    """Refuse what the schema does not know.

    Raises:
        UnknownNameError: for the table or the first unknown column; it lists the valid ones.
    """
    if table not in _COLUMNS:
        raise UnknownNameError("table", table, list(TABLES))
    if not row.keys() <= _COLUMNS[table]:
        unknown = next(str(name) for name in row if name not in _COLUMNS[table])
        raise UnknownNameError(f"column of {table}", unknown, list(TABLES[table].names))


def row_bytes(table: str, row: Row) -> int:
    """About how many bytes a row takes in a batch: texts and histograms by their length."""
    size = _ROW_BYTES[table]
    for value in row.values():
        if type(value) is str:
            size += len(value)
        elif type(value) is dict:
            size += sum(8 * len(v) for v in value.values() if hasattr(v, "__len__"))
    return size


def to_batch(table: str, rows: Sequence[Row], misfit: Callable[[str, object], None]) -> pa.RecordBatch:
    """Rows of a table as a record batch: missing columns and non-finite floats become NULL.

    Args:
        table: one of the schema's.
        rows: dicts whose keys ``check_columns`` has passed; values are Python or numpy scalars.
        misfit: called with column and value for each value that does not fit its column's type; it becomes NULL.
    """
    arrays = []
    for column in arrow_schema(table):
        values = [row.get(column.name) for row in rows]
        arrays.append(_array(values, column, misfit))
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(table))


def finite(array: pa.Array) -> pa.Array:
    """The same floats with NaN and infinities as NULL."""
    return pc.if_else(pc.is_finite(array), array, None)


def _array(values: list[Any], column: pa.Field, misfit: Callable[[str, object], None]) -> pa.Array:
    try:
        array = pa.array(values, column.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        array = pa.array([_fitted(value, column, misfit) for value in values], column.type)
    return finite(array) if column.type == pa.float64() else array


def _fitted(value: Any, column: pa.Field, misfit: Callable[[str, object], None]) -> Any:
    """One value as its column takes it; text that is no Unicode is written with backslash escapes."""
    if isinstance(value, str):
        value = in_unicode(value)
    if isinstance(value, float) and not math.isfinite(value) and column.type != pa.float64():
        value = None
    try:
        return pa.array([value], column.type)[0].as_py()
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        misfit(column.name, value)
        return None
