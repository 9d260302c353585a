"""A run folder opened for reading, while the run is alive, finished or killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fp8dbg.errors import QueryError, RunFolderError, UnknownNameError, UsageError
from fp8dbg.runs import queries
from fp8dbg.runs.dumps import Dump, find_dumps
from fp8dbg.runs.files import folder_path
from fp8dbg.runs.reader import Contents, read_folder
from fp8dbg.runs.remote import as_url, fetched
from fp8dbg.runs.sources import resumed, sources_of

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import pyarrow as pa
    from typing_extensions import Self

    from fp8dbg.runs.writer import RunWriter

T = TypeVar("T")


def __getattr__(name: str) -> Any:
    """`RunWriter` on first use: reading needs nothing of what writing imports, and `fp8dbg query` starts sooner."""
    if name != "RunWriter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fp8dbg.runs.writer import RunWriter

    return RunWriter


_TRIES = 4
"""How often a query is tried while parts are compacted or turn out to be damaged."""

__all__ = ["Folder", "RunWriter", "contents_of", "open_folder"]


class Folder:
    """A run as tables, as it was when it was opened.

    Attributes:
        path: the folder; the first of them where several were opened together.
        paths: all of them.
        meta: run.json as a dict; ``layers`` of all ranks together, by order of execution, and ``ranks``: each rank's
            own run.json by number.
        problems: a sentence for each file that could not be read, or not to its end, and for what else a reader should
            know. Everything else was read.
        state: "alive" (some rank is being recorded, on this machine), "killed", "stopped" (recording ended early, as on
            a full disk) or "finished" (every rank was closed).
        connection: the DuckDB connection with a view for each of `tables`.
    """

    def __init__(self, contents: Sequence[Contents]) -> None:
        self.paths = [c.path for c in contents]
        self.path = self.paths[0]
        self.meta: dict[str, Any] = contents[0].meta
        self.problems: list[str] = [p for c in contents for p in (*c.problems, *resumed(c))]
        states = [c.state for c in contents]
        self.state = next((s for s in ("alive", "killed", "stopped") if s in states), "finished")
        self._contents = contents
        self.connection: duckdb.DuckDBPyConnection = self._connect()

    @property
    def tables(self) -> tuple[str, ...]:
        """Names that a query can read from; all exist always, some may be empty."""
        return queries.VIEWS

    def sql(self, query: str, params: queries.Parameters = None) -> duckdb.DuckDBPyRelation:
        """The relation of a query; ``.df()``, ``.arrow()``, ``.fetchall()`` run it.

        Args:
            query: one SELECT; nothing that writes, and nothing that reads other files.
            params: values for ``$name`` (a mapping) or ``?`` (a sequence).

        Raises:
            QueryError: DuckDB refuses the query; the message is one line and names what is valid.
        """
        return self.reading(lambda connection: queries.run(connection, query, params))

    def rows(self, query: str, params: queries.Parameters = None) -> list[dict[str, Any]]:
        """The result of a query as row objects; raises as `sql` does, also for what fails while it runs."""
        return self.reading(lambda connection: queries.rows(connection, query, params))

    def arrow(self, table: str) -> pa.Table:
        """A whole table, or one of the views of `tables`, as a pyarrow Table.

        Raises:
            UnknownNameError: there is no such table.
        """
        if table not in self.tables:
            raise UnknownNameError("table", table, list(self.tables))
        whole: pa.Table = self.reading(lambda c: queries.stream(c, f"SELECT * FROM {table}", lambda b: b.read_all()))
        return whole

    def answer(self, question: str, params: Mapping[str, Any] | None = None) -> pa.Table:
        """The answer to a question of reports/ as a pyarrow Table; raises as `queries.ask`."""
        whole: pa.Table = self.reading(lambda c: queries.stream(c, question, lambda b: b.read_all(), params))
        return whole

    def df(self, table: str) -> pd.DataFrame:
        """A whole table as a pandas DataFrame; raises as `arrow` does. Integers with NULLs come as floats."""
        frame: pd.DataFrame = self.arrow(table).to_pandas()
        return frame

    def polars(self, table: str) -> Any:
        """A whole table as a Polars DataFrame; raises as `arrow` does.

        Raises:
            UsageError: Polars is not installed.
        """
        try:
            from polars import from_arrow
        except ImportError:
            raise UsageError("polars is not installed.", "pip install polars, or use .df() or .arrow().") from None
        return from_arrow(self.arrow(table))

    def reading(self, read: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
        """What ``read`` returns for the connection.

        If it fails because parts were compacted meanwhile, the folder is looked at again; if because a part is damaged
        inside, that part is left out and a problem names it; then it is called again.
        """
        for _ in range(_TRIES):
            try:
                return read(self.connection)
            except QueryError as error:
                if not self._is_mended(error):
                    raise
                self.connection.close()
                self.connection = self._connect()
        return read(self.connection)

    def dumps(self, layer: str | None = None, tensor: str | None = None) -> list[Dump]:
        """Saved tensors by step, rank, layer and tensor; only those of the given names."""
        return [dump for path in self.paths for dump in find_dumps(path, layer, tensor)]

    def close(self) -> None:
        """Close the connection; relations made from it end with it."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self) -> duckdb.DuckDBPyConnection:
        for _ in range(_TRIES):
            try:
                return queries.connect(sources_of(self._contents))
            except QueryError as error:
                if not self._is_mended(error):
                    raise
        return queries.connect(sources_of(self._contents))

    def _is_mended(self, error: QueryError) -> bool:
        """Whether another try may succeed. A file that has gone is not even a ReadError to DuckDB, but a permission."""
        return self._look_again() or (isinstance(error, queries.ReadError) and self._leave_out_damaged())

    def _look_again(self) -> bool:
        """Where a part has gone, look at the folders again; whether one had."""
        if all(p.path.exists() for c in self._contents for p in c.pieces if p.rows is None):
            return False
        self._contents = [replace(read_folder(c.path), copy=c.copy) for c in self._contents]
        return True

    def _leave_out_damaged(self) -> bool:
        """Read every part to its end; whether some could not be, and are now left out."""
        before = len(self.problems)
        for contents in self._contents:
            for piece in [p for p in contents.pieces if p.rows is None]:
                if why := queries.why_unreadable(str(piece.path.absolute())):
                    contents.pieces.remove(piece)
                    contents.report(piece.path, f"{why}; it is not read")
                    self.problems.append(contents.problems[-1])
        return len(self.problems) > before


def open_folder(path: str | Path | Iterable[str | Path]) -> Folder:
    """Open a run folder, or the folders of several ranks of one run, for reading.

    Args:
        path: one folder or several; a URL as ``s3://bucket/run`` is copied to a temporary folder first (see `remote`).

    Raises:
        RunFolderError: a folder is missing, empty, of something else, or of a newer schema.
    """
    return Folder(contents_of(path))


def contents_of(path: str | Path | Iterable[str | Path]) -> list[Contents]:
    """What `open_folder` opens, looked at; raises as it does."""
    several = [path] if isinstance(path, (str, os.PathLike)) else list(path) if isinstance(path, Iterable) else [path]
    paths = [folder_path(p) for p in several]
    if not paths:
        raise RunFolderError("No run folder was given.", "Give at least one.")
    distinct = list({p.resolve(): p for p in paths}.values())
    return [_contents(p) for p in distinct]


def _contents(path: Path) -> Contents:
    url = as_url(path)
    if url is None:
        return read_folder(path)
    copy = fetched(url)
    contents = read_folder(Path(copy.name))
    contents.copy = copy
    return contents
