"""How the command line shows rows and long work: tables, JSON, CSV, and a progress bar."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from fp8dbg.errors import QueryError

if TYPE_CHECKING:
    import duckdb
    from rich.console import Console

SHOWN = 200
"""Rows a table shows; all are there as JSON and CSV."""

_AT_ONCE = 10_000
"""Rows of a result in memory."""


class Advance(Protocol):
    """What a progress bar is told: steps done, and a few words."""

    def __call__(self, done: int, words: str) -> None:
        """Move the bar."""


def console(*, stderr: bool = False) -> Console:
    """A terminal to print on; colours only where they can be seen and NO_COLOR does not forbid them."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def accept_any_text() -> None:
    """Print escapes for what the terminal's encoding has no characters for, where Python would give up."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(sentence: str) -> None:
    """A sentence on stderr, where it does not mix with what a program reads; whatever is in it is made visible."""
    from fp8dbg.render.names import visible

    if sys.stderr is not None:  # else print would take stdout, where programs read
        print(visible(sentence), file=sys.stderr, flush=True)


def json_text(value: Any) -> str:
    """JSON with what it has no form for made plain: NaN and infinities are null, dates and the rest are text."""
    return json.dumps(_plain(value), indent=1, default=str)


def rows_of(relation: duckdb.DuckDBPyRelation) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """The columns of a query's result, and its rows as they are read.

    Raises:
        QueryError: the query fails while it runs; raised from the rows.
    """
    return relation.columns, _read(relation)


def _read(relation: duckdb.DuckDBPyRelation) -> Iterator[dict[str, Any]]:
    import duckdb
    import pyarrow as pa

    try:
        for rows in relation.to_arrow_reader(_AT_ONCE):
            yield from rows.to_pylist()
    except (duckdb.Error, pa.ArrowException) as error:
        what = str(error).split("\n\nLINE")[0]  # what follows is an excerpt of the query
        raise QueryError(" ".join(what.split())[:500]) from error


def print_json_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """A JSON list of row objects, one to a line, written as they come."""
    before = "[\n"
    for row in rows:
        sys.stdout.write(before + json.dumps(_plain(row), default=str))
        before = ",\n"
    sys.stdout.write("[]\n" if before == "[\n" else "\n]\n")


def print_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """A header and the rows; a missing value is an empty field, a nested one is JSON."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        values = (_plain(row[c]) for c in columns)
        writer.writerow([json.dumps(v, default=str) if isinstance(v, (dict, list)) else v for v in values])


def print_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """The first ``SHOWN`` rows as a table, and a sentence on stderr if there are more, or none.

    A column is as wide as what is in it: a table wider than the screen is for ``less -S``.
    """
    shown = list(islice(rows, SHOWN + 1))
    if shown:
        lines = _aligned([_column(name, [row[name] for row in shown[:SHOWN]]) for name in columns])
        print("\n".join(line.rstrip() for line in lines))
    if len(shown) > SHOWN or not shown:
        say(f"These are the first {SHOWN} rows; --csv and --json give all." if shown else "No rows.")


def _column(name: str, values: Sequence[Any]) -> list[str]:
    """The cells of a column, its name first, all of one width; numbers end where their neighbours end."""
    from rich.cells import cell_len

    cells = [_cell(value) for value in (name, *values)]
    width = max(map(cell_len, cells))
    words = any(isinstance(value, str) for value in values)
    return [cell + _blank(cell, width) if words else _blank(cell, width) + cell for cell in cells]


def _blank(cell: str, width: int) -> str:
    from rich.cells import cell_len

    return " " * (width - cell_len(cell))


def _aligned(columns: Sequence[Sequence[str]]) -> Iterator[str]:
    return map("  ".join, zip(*columns, strict=True))


@contextmanager
def progress(total: int | None, title: str) -> Iterator[Advance]:
    """A bar on stderr, only where stderr is a terminal; yields what to call as the work goes on.

    Args:
        total: how much there is to do; None: nobody knows, the bar only says that it goes on.
        title: what is being done.
    """
    if not sys.stderr.isatty():
        yield lambda done, words: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[words]}"), console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, words="")
        yield lambda done, words: bar.update(task, completed=done, words=words)


def _cell(value: Any) -> str:
    from fp8dbg.render.names import shorten

    value = _plain(value)
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return shorten(str(value), 120)


def _plain(value: Any) -> Any:
    """The value without numbers that JSON cannot hold; a sum of integers comes as a decimal."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
