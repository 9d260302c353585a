"""The merged views: in pieces they are what they are in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8dbg.runs.folder import open_folder
from fp8dbg.runs.merged import AT_ONCE, MERGED
from tests.synthetic import outlier, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks, with an outlier."""
    path = tmp_path_factory.mktemp("merged") / "run"
    return write_run(path, blocks=1, steps=70, ranks=3, plant=outlier("layers.0.up", step=30))


def settled(row: dict[str, Any]) -> list[str]:
    """A row without the last digits of its numbers, which depend on the order in which they were added."""
    return [f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()]


@pytest.mark.parametrize("name", MERGED)
@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_pieces_together_are_the_whole(folder: Path, name: str, pieces: int) -> None:
    """Each step is in one piece, however the steps are divided; rows of no step have a piece of their own."""
    with open_folder(folder) as run:
        _, _, first, last = run.sql(MERGED[name].extent_sql).fetchall()[0]
        selects = MERGED[name].pieces(False, pieces * AT_ONCE, first, last)
        assert len(selects) == pieces + 1
        apart = [row for select in selects for row in run.rows(select)]
        whole = run.rows(f"select * from {name}")
    assert len(whole) > 100
    assert sorted(map(settled, apart)) == sorted(map(settled, whole))


@pytest.mark.parametrize("name", MERGED)
def test_what_needs_no_merging_is_read_as_it_is(tmp_path: Path, name: str) -> None:
    """One rank, one microbatch, one call: the plain select has the same rows."""
    folder = write_run(tmp_path / "run", blocks=1, steps=30)
    with open_folder(folder) as run:
        plain, *extent = run.sql(MERGED[name].extent_sql).fetchall()[0]
        assert plain
        (select,) = MERGED[name].pieces(plain, *extent)
        assert "GROUP BY" not in select
        assert sorted(map(settled, run.rows(select))) == sorted(map(settled, run.rows(f"select * from {name}")))
