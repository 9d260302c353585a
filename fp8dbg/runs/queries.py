"""Questions to a run folder: the only file that executes SQL.

A folder is opened as a DuckDB connection that can read the run's own parts and nothing else. The questions that come
with fp8dbg are the files reports/*.sql; their parameters are checked by name and type and never become SQL text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import duckdb
import pyarrow as pa

from fp8dbg.errors import QueryError, UnknownNameError
from fp8dbg.runs.merged import MERGED
from fp8dbg.runs.questions import Question, load_questions
from fp8dbg.runs.readonly import why_refused
from fp8dbg.runs.schema import TABLES
from fp8dbg.runs.views import Source, parquet_sql, quoted, ratios_sql, sum_sql, view_sql

if TYPE_CHECKING:
    from fp8dbg.runs.folder import Folder

T = TypeVar("T")

_AT_ONCE = 20_000
"""Rows of a streamed result in memory."""

Parameters = Mapping[str, Any] | Sequence[Any] | None

QUESTIONS: dict[str, Question] = load_questions()
"""Every question that `ask` can be asked."""

VIEWS = (*TABLES, "tensor_ratios", *MERGED)
"""Names that a query can read from."""

_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "python_enable_replacements": False,  # a query must not see the caller's Python variables
    "temp_directory": "",
}


class ReadError(QueryError):
    """A query that failed for no fault of its own: a part may be damaged inside."""


_OWN_FAULTS = (
    duckdb.ParserException,
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.PermissionException,
    duckdb.ConversionException,
    duckdb.OutOfMemoryException,
)


def _open() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:", config=_SETTINGS)
    connection.execute("SET enable_progress_bar = false")  # it would go into the middle of a verb's --json
    connection.execute("SET parquet_metadata_cache = true")  # parts never change: their footers are read once
    return connection


def connect(sources: Sequence[Source]) -> duckdb.DuckDBPyConnection:
    """A connection with the views of every table, locked down to the given files.

    Args:
        sources: what to read, oldest first.

    Raises:
        ReadError: a part that looked whole cannot be opened.
    """
    connection = _open()
    try:
        _make_views(connection, sources)
    except duckdb.Error as error:
        connection.close()
        raise _error(error) from error
    allowed = ", ".join(quoted(f) for s in sources for f in s.files)
    connection.execute(f"SET allowed_paths = [{allowed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def why_unreadable(file: str) -> str:
    """Why a part cannot be read to its end, as the end of a sentence; "" if it can. Reads the whole file."""
    with _open() as connection:
        try:
            connection.execute(
                f"SELECT bit_xor(hash(part)) FROM {parquet_sql((file,), ordered=False)} AS part"
            ).fetchall()
        except duckdb.Error as error:
            return f"is damaged inside ({_one_line(str(error)):.200})"
    return ""


def remote_files(pattern: str) -> Iterator[tuple[str, bytes]]:
    """Every file that a URL with wildcards matches, and its bytes, by DuckDB's httpfs extension.

    Raises:
        ReadError: the extension is not installed, or nothing can be read there.
    """
    with _open() as connection:
        try:
            connection.execute("LOAD httpfs")
            files = connection.execute(f"SELECT file FROM glob({quoted(pattern)}) ORDER BY file").fetchall()
            for (file,) in files:
                for data in connection.execute(f"SELECT content FROM read_blob({quoted(file)})").fetchall():
                    yield file, data[0]
        except duckdb.Error as error:
            raise ReadError(_one_line(str(error))) from error


def contents_sum(table: str, files: Sequence[tuple[str, tuple[str, ...]]]) -> tuple[int, int]:
    """How many rows Parquet files hold, and a sum of hashes over them that another order or file layout leaves alone.

    Where the order of a table's rows means something (``steps``, ``events``) each row is hashed with its place.

    Args:
        table: the schema's table whose columns are read.
        files: each file with the columns it has, in order.

    Raises:
        ReadError: a file cannot be read to its end.
    """
    with _open() as connection:
        try:
            found = connection.execute(sum_sql(table, files)).fetchall()[0]
        except duckdb.Error as error:
            raise _error(error) from error
    return int(found[0]), int(found[1] or 0)


def _make_views(connection: duckdb.DuckDBPyConnection, sources: Sequence[Source]) -> None:
    for table in TABLES:
        mine = [s for s in sources if s.table == table]
        connection.execute(view_sql(table, [(s, _rows_sql(connection, s)) for s in mine]))
    connection.execute(ratios_sql())
    for name, merged in MERGED.items():
        connection.execute(f"CREATE VIEW {name} AS {merged.sql}")


def _rows_sql(connection: duckdb.DuckDBPyConnection, source: Source) -> str:
    if source.rows is None:
        return parquet_sql(source.files, ordered=source.table == "steps")
    name = f"_journal_{source.order}"
    connection.register(name, source.rows)
    return name


def run(connection: duckdb.DuckDBPyConnection, query: str, params: Parameters = None) -> duckdb.DuckDBPyRelation:
    """A relation for a query.

    Raises:
        QueryError: DuckDB refuses it, or it does more than read; the message names the valid columns or tables where
            one is unknown.
    """
    if not isinstance(query, str):
        raise QueryError(f"A query is a text, not {type(query).__name__}.", "Give one SELECT.")
    if not isinstance(params, (Mapping, Sequence, type(None))) or isinstance(params, str):
        raise QueryError(f"params={params!r:.100} does not fit.", "Give a mapping for $name or a list for ?.")
    try:
        query.encode()
        refused = why_refused(connection, query)
        if refused:
            raise QueryError(_one_line(refused))
    except duckdb.Error as error:
        raise _error(error, query) from error
    except UnicodeEncodeError as error:
        raise QueryError("The query is not valid Unicode.") from error
    return _relation(connection, query, params)


def _relation(connection: duckdb.DuckDBPyConnection, query: str, params: Parameters) -> duckdb.DuckDBPyRelation:
    """The relation of a query that only reads: one that `run` has checked, or a question."""
    given = dict(params) if isinstance(params, Mapping) else params and list(params)
    try:
        return connection.sql(query, params=given or None)
    except duckdb.Error as error:
        raise _error(error, query) from error


def rows(connection: duckdb.DuckDBPyConnection, query: str, params: Parameters = None) -> list[dict[str, Any]]:
    """The result of a query as row objects.

    Raises:
        QueryError: as for `run`, and for what fails while it runs.
    """
    return _rows(run(connection, query, params))


def _rows(relation: duckdb.DuckDBPyRelation) -> list[dict[str, Any]]:
    names = relation.columns
    try:
        return [dict(zip(names, row, strict=True)) for row in relation.fetchall()]
    except duckdb.Error as error:
        raise _error(error) from error


def stream(
    connection: duckdb.DuckDBPyConnection, query: str, use: Callable[[Any], T], params: Mapping[str, Any] | None = None
) -> T:
    """What ``use`` makes of a query's result, which it gets as an Arrow reader: no more than a batch is in memory.

    Args:
        connection: an open folder's.
        query: one SELECT, or the name of a question.
        use: reads the batches to their end.
        params: by name; those of a question that are left out have their defaults.

    Raises:
        QueryError: as for `run`, and for what fails while it is read.
    """
    question = QUESTIONS.get(query)
    if question is not None:
        _keep_merged(connection, question.reads)
        relation = _relation(connection, question.sql, question.values(params or {}))
    else:
        relation = run(connection, query, params)
    try:
        return use(relation.to_arrow_reader(_AT_ONCE))
    except (duckdb.Error, pa.ArrowException) as error:
        raise _error(error) from error


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
    return folder.reading(_asking(question, parameters, _rows))


def ask_table(folder: Folder, question: str, **parameters: Any) -> pa.Table:
    """The answer as an Arrow table, for questions with very many rows; raises as `ask` does."""
    return folder.reading(_asking(question, parameters, _table))


def _asking(
    question: str, parameters: Mapping[str, Any], read: Callable[[duckdb.DuckDBPyRelation], T]
) -> Callable[[duckdb.DuckDBPyConnection], T]:
    if question not in QUESTIONS:
        raise UnknownNameError("question", question, list(QUESTIONS))
    asked = QUESTIONS[question]
    values = asked.values(parameters)

    def answer(connection: duckdb.DuckDBPyConnection) -> T:
        _keep_merged(connection, asked.reads)
        return read(_relation(connection, asked.sql, values))

    return answer


def _table(relation: duckdb.DuckDBPyRelation) -> pa.Table:
    try:
        return relation.to_arrow_table()
    except duckdb.Error as error:
        raise _error(error) from error


_KEPT = (
    "SELECT 1 FROM (SELECT table_name AS name FROM duckdb_tables() WHERE temporary "
    "UNION ALL SELECT view_name FROM duckdb_views() WHERE temporary) WHERE name = ?"
)


def _keep_merged(connection: duckdb.DuckDBPyConnection, reads: Sequence[str]) -> None:
    """Merging is most of a question's cost: its result is kept as a temporary table, which hides the view.

    Where there is nothing to merge, a temporary view hides it: the run's own files are read, and no copy is in memory.
    """
    for name in sorted(set(reads) & set(MERGED)):
        try:
            if connection.execute(_KEPT, [name]).fetchall():
                continue
            plain, *extent = connection.execute(MERGED[name].extent_sql).fetchall()[0]
            first, *others = MERGED[name].pieces(plain, *extent)
            connection.execute(f"CREATE TEMP {'VIEW' if plain else 'TABLE'} {name} AS {first}")
            for select in others:
                connection.execute(f"INSERT INTO temp.{name} {select}")
        except duckdb.Error as error:
            connection.execute(f"DROP TABLE IF EXISTS temp.{name}")  # half of it must not pass for all
            raise _error(error) from error


def _error(error: Exception, query: str = "") -> QueryError:
    kind = QueryError if isinstance(error, _OWN_FAULTS) else ReadError
    return kind(_one_line(str(error)), _hint(query, str(error)))


def _one_line(message: str) -> str:
    """DuckDB's message without its excerpt of the query."""
    return " ".join(re.split(r"\n\s*LINE \d+:", message)[0].split())[:500]


def _hint(query: str, message: str) -> str:
    """The tables, or the columns of the tables that the query names, where DuckDB did not know one."""
    if "Table with name" in message:
        return f"The tables are {', '.join(VIEWS)}."
    if "not found in FROM clause" in message or "does not have a column" in message:
        named = [table for name, table in TABLES.items() if re.search(rf"\b{name}\b", query)]
        return " ".join(f"Columns of {t.name}: {', '.join(t.names)}." for t in named)
    return ""
