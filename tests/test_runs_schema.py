"""The schema: every table and column is named once, explained, and typed as it is stored."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fp8dbg.runs.folder import RunWriter, open_folder
from fp8dbg.runs.merged import MERGED
from fp8dbg.runs.schema import GEMMS, OPERANDS, ROLES, TABLES, arrow_schema
from fp8dbg.runs.views import TENSOR_RATIOS
from tests.recorded import rows_of


@pytest.mark.parametrize("name", list(TABLES))
def test_every_column_is_explained_once(name: str) -> None:
    """A meaning of one line that is no sentence with a full stop, distinct names, keys among the columns."""
    table = TABLES[name]
    assert table.name == name
    assert table.row
    assert len(set(table.names)) == len(table.names)
    assert set(table.keys) <= set(table.names)
    for column in table.columns:
        assert column.name.isidentifier()
        assert column.meaning
        assert "\n" not in column.meaning
        assert not column.meaning.endswith(".") or column.meaning.endswith("...")


def test_a_name_means_one_thing_in_every_table() -> None:
    """The same type and unit wherever it appears."""
    seen: dict[str, tuple[object, str]] = {}
    for table in TABLES.values():
        for column in table.columns:
            assert seen.setdefault(column.name, (column.type, column.unit)) == (column.type, column.unit)


def test_every_table_can_be_placed_in_a_run() -> None:
    """Step and rank are in every table: parts are cut by the one and laid out by the other."""
    assert all({"step", "rank"} <= set(table.names) for table in TABLES.values())


def test_operands_are_roles_and_gemms_take_operands() -> None:
    """The vocabulary hangs together."""
    assert set(OPERANDS) <= set(ROLES)
    assert all(set(pair) <= set(OPERANDS) and len(pair) == 2 for pair in GEMMS.values())


def test_views_add_columns_and_shadow_none() -> None:
    """The ratios' names are new, and no view is called like a table."""
    assert not set(TENSOR_RATIOS) & set(TABLES["tensors"].names)
    assert not {"tensor_ratios", *MERGED} & set(TABLES)


def test_parts_and_views_have_the_schema(tmp_path: Path) -> None:
    """What is declared is what is stored and what is read."""
    with RunWriter(tmp_path) as writer:
        for table, rows in rows_of(0).items():
            writer.append(table, rows)
        writer.append("gemms", [{"step": 0, "rank": 0}])
        writer.event(0, "gap", None, "x")
    with open_folder(tmp_path) as run:
        for name in TABLES:
            [part] = (tmp_path / name).rglob("*.parquet")
            assert pq.ParquetFile(part).schema_arrow.equals(arrow_schema(name))
            assert run.sql(f"FROM {name}").to_arrow_table().schema.types == arrow_schema(name).types
