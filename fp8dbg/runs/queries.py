"""Questions to a run folder: the only file that executes SQL.

A folder is opened as a DuckDB connection that can read the run's own parts and nothing else. The questions that come
with fp8dbg are the files reports/*.sql; their parameters are checked by name and type and never become SQL text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import duckdb

from fp8dbg import reports
from fp8dbg.errors import QueryError, UnknownNameError
from fp8dbg.runs.merged import MERGED
from fp8dbg.runs.readonly import why_refused
from fp8dbg.runs.schema import TABLES
from fp8dbg.runs.views import Source, parquet_sql, quoted, ratios_sql, view_sql

if TYPE_CHECKING:
    from fp8dbg.runs.folder import Folder

Parameters = Mapping[str, Any] | Sequence[Any] | None

_SETTINGS = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "python_enable_replacements": False,  # a query must not see the caller's Python variables
    "temp_directory": "",
}


def connect(sources: Sequence[Source]) -> duckdb.DuckDBPyConnection:
    """A connection with the views of every table, locked down to the given files.

    Args:
        sources: what to read, oldest first.
    """
    connection = duckdb.connect(":memory:", config=_SETTINGS)
    for table in TABLES:
        mine = [s for s in sources if s.table == table]
        connection.execute(view_sql(table, [(s, _rows_sql(connection, s)) for s in mine]))
    connection.execute(ratios_sql())
    for name, select in MERGED.items():
        connection.execute(f"CREATE VIEW {name} AS {select}")
    allowed = ", ".join(quoted(f) for s in sources for f in s.files)
    connection.execute(f"SET allowed_paths = [{allowed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _rows_sql(connection: duckdb.DuckDBPyConnection, source: Source) -> str:
    if source.rows is None:
        return parquet_sql(source.files)
    name = f"_journal_{source.table}_{source.order}"
    connection.register(name, source.rows)
    return name


def run(connection: duckdb.DuckDBPyConnection, query: str, params: Parameters = None) -> duckdb.DuckDBPyRelation:
    """A relation for a user's query.

    Raises:
        QueryError: DuckDB refuses it, or it does more than read; the message names the valid columns or tables where
            one is unknown.
    """
    try:
        refused = why_refused(connection, query)
        if refused:
            raise QueryError(_one_line(refused))
        given = params if params is None or isinstance(params, Mapping) else list(params)
        return connection.sql(query, params=given)
    except duckdb.Error as error:
        raise QueryError(_one_line(str(error)), _hint(connection, str(error))) from error


def _one_line(message: str) -> str:
    """DuckDB's message without its excerpt of the query."""
    return " ".join(re.split(r"\n\s*LINE \d+:", message)[0].split())[:500]


def _hint(connection: duckdb.DuckDBPyConnection, message: str) -> str:
    if "Table with name" in message:
        return f"The tables are {', '.join((*TABLES, 'tensor_ratios'))}."
    if "not found in FROM clause" in message or "does not have a column" in message:
        views = {name: [c.name for c in table.columns] for name, table in TABLES.items()}
        return "Columns: " + "; ".join(f"{name}: {', '.join(columns)}" for name, columns in views.items()) + "."
    return ""


# The questions of reports/*.sql.

_TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a question: its type is text, integer, number or boolean; NULL is always allowed."""

    name: str
    type: str
    default: Any
    meaning: str


@dataclass(frozen=True, slots=True)
class Question:
    """One file of reports/: what it answers, what it reads and takes, its output columns, and its SQL."""

    name: str
    question: str
    reads: tuple[str, ...]
    parameters: dict[str, Parameter]
    columns: dict[str, str]
    sql: str


_FIELD = re.compile(r"-- (Question|Reads|Parameters|Columns):\s*(.*)")
_PARAMETER = re.compile(r"(\w+) \((text|integer|number|boolean), default (.+?)\): (.+)")
_COLUMN = re.compile(r"(\w+): (.+)")


def parse_question(name: str, sql: str) -> Question:
    """Read a report's header; lines that do not follow the form are left out (a test holds that none is)."""
    fields: dict[str, list[str]] = {"Question": [], "Reads": [], "Parameters": [], "Columns": []}
    current = ""
    for line in sql.splitlines():
        if not line.startswith("--"):
            break
        if start := _FIELD.fullmatch(line):
            current, line = start[1], start[2]
        if current and line.strip("- "):
            fields[current].append(line.removeprefix("--").strip())
    parameters = [
        Parameter(m[1], m[2], _default(m[3]), m[4]) for m in map(_PARAMETER.fullmatch, fields["Parameters"]) if m
    ]
    return Question(
        name,
        " ".join(fields["Question"]),
        tuple(t.strip() for t in ",".join(fields["Reads"]).split(",") if t.strip()),
        {p.name: p for p in parameters},
        {m[1]: m[2] for m in map(_COLUMN.fullmatch, fields["Columns"]) if m},
        sql,
    )


def _default(text: str) -> Any:
    """NULL, true, false, a number or a text, as SQL writes it."""
    literals = {"null": None, "true": True, "false": False}
    if text.lower() in literals:
        return literals[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("'\"")


QUESTIONS: dict[str, Question] = {
    name: parse_question(name, reports.text(f"{name}.sql")) for name in reports.names(".sql")
}


def ask(folder: Folder, question: str, **parameters: Any) -> list[dict[str, Any]]:
    """The answer to a question as rows.

    Args:
        folder: an open run folder.
        question: name of a file in reports/, without ``.sql``.
        parameters: by name; those left out have their defaults.

    Raises:
        UnknownNameError: there is no such question or parameter; the message lists those that exist.
        QueryError: a parameter is of the wrong type, or the query fails.
    """
    if question not in QUESTIONS:
        raise UnknownNameError("question", question, list(QUESTIONS))
    asked = QUESTIONS[question]
    values = {p.name: p.default for p in asked.parameters.values()}
    for name, value in parameters.items():
        if name not in asked.parameters:
            raise UnknownNameError(f"parameter of {question}", name, list(asked.parameters))
        _check_type(question, asked.parameters[name], value)
        values[name] = value
    _keep_merged(folder.connection, asked.reads)
    return rows(folder.connection, asked.sql, values)


def _keep_merged(connection: duckdb.DuckDBPyConnection, reads: Sequence[str]) -> None:
    """Merging is most of a question's cost: its result is kept as a temporary table, which hides the view."""
    for name in set(reads) & set(MERGED):
        connection.execute(f"CREATE TEMP TABLE IF NOT EXISTS {name} AS SELECT * FROM main.{name}")


def rows(connection: duckdb.DuckDBPyConnection, sql: str, params: Parameters = None) -> list[dict[str, Any]]:
    """The result of SQL as row objects.

    Raises:
        QueryError: as for `run`, and for what fails while it runs.
    """
    try:
        relation = run(connection, sql, params)
        names = relation.columns
        return [dict(zip(names, row, strict=True)) for row in relation.fetchall()]
    except duckdb.Error as error:
        raise QueryError(_one_line(str(error))) from error


def _check_type(question: str, parameter: Parameter, value: Any) -> None:
    allowed = _TYPES[parameter.type]
    if value is None or (isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))):
        return
    raise QueryError(
        f"Parameter {parameter.name} of {question} is {value!r:.100}, a {type(value).__name__}.",
        f"It takes {parameter.type}.",
    )
