"""Writing a run folder while training: rows are buffered, journalled at every sampled step, and end up in parts."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from fp8dbg.errors import RunFolderError
from fp8dbg.runs import fingerprint as run_json
from fp8dbg.runs.dumps import save_dump
from fp8dbg.runs.files import entries, journal_name, parse_part_name, part_name, rank_folder
from fp8dbg.runs.journal import Journal, Stamp, read_journal
from fp8dbg.runs.lock import RankLock
from fp8dbg.runs.parts import read_part_facts, write_part
from fp8dbg.runs.rows import Row, check_columns, row_bytes, to_batch
from fp8dbg.runs.schema import SCHEMA_VERSION, TABLES

if TYPE_CHECKING:
    from torch import Tensor

BUFFER_ROWS = 4096
BUFFER_BYTES = 1 << 20
BUFFER_SECONDS = 1.0
"""A buffer is journalled by itself when it holds this many rows or bytes, or when its oldest row is this old."""

PART_BYTES = 32 << 20
"""A journal of this size becomes a part."""


class RunWriter:
    """One rank's hand on a run folder.

    Rows go to a buffer (`append`), from there to the table's journal (`flush`, at the end of every sampled step) and
    from there to Parquet parts (when a journal is large, and at `close`). An existing folder is continued: what a
    killed run left in its journals is finished first. Buffers stay below 2 MB a table.

    Once constructed it never raises for the disk's sake: when a write fails, recording stops, `stopped` says why, and
    one warning is given. Wrong tables and columns do raise: they are mistakes in the caller.

    Args:
        path: the run folder; made if missing.
        rank: global rank of this process; only files of this rank are ever written.
        fingerprint: what to add to run.json: recipe, layout, layers, config.
        part_bytes: size at which a journal becomes a part.
        max_bytes: recording stops when this rank has written so much in this session; None: no limit.

    Raises:
        RunFolderError: the folder cannot be written, is of a newer schema, or this rank is being recorded by another
            process.
    """

    def __init__(
        self,
        path: str | Path,
        rank: int = 0,
        fingerprint: Mapping[str, Any] | None = None,
        *,
        part_bytes: int = PART_BYTES,
        max_bytes: int | None = None,
    ) -> None:
        self.path, self.rank, self.stopped = Path(path), int(rank), ""
        self.part_bytes, self.max_bytes, self.bytes_written = part_bytes, max_bytes, 0
        self._rows: dict[str, list[Row]] = {name: [] for name in TABLES}
        self._sizes = dict.fromkeys(TABLES, 0)
        self._oldest = time.monotonic()
        self._journals: dict[str, Journal] = {}
        self._closed = False
        self._mutex = threading.RLock()  # backward hooks may run on autograd's own threads
        try:
            self._open(dict(fingerprint or {}))
        except OSError as error:
            raise RunFolderError(
                f"Cannot record into {self.path}: {error.strerror or error}.", "Give a folder that can be written."
            ) from error

    # What the recorder calls.

    def append(self, table: str, rows: Iterable[Row]) -> None:
        """Buffer rows; columns left out are NULL, NaN and infinities become NULL. The dicts must not change after.

        A row of ``steps`` for a step and rank recorded before adds to it: its non-NULL values win.

        Raises:
            UnknownNameError: for a table or column that the schema lacks; nothing of this call's later rows is kept.
        """
        with self._mutex:
            for row in rows:
                check_columns(table, row)
                if self.stopped or self._closed:
                    continue
                self._rows[table].append(row)
                self._sizes[table] += row_bytes(table, row)
                if len(self._rows[table]) >= BUFFER_ROWS or self._sizes[table] >= BUFFER_BYTES:
                    self._flush_table(table)
            if time.monotonic() - self._oldest > BUFFER_SECONDS:
                self.flush()

    def event(self, step: int | None, kind: str, layer: str | None, detail: str) -> None:
        """Buffer one row of ``events``."""
        self.append("events", [{"step": step, "rank": self.rank, "kind": kind, "layer": layer, "detail": detail}])

    def flush(self) -> None:
        """Hand everything buffered to the operating system: after this, killing the process loses none of it."""
        with self._mutex:
            for table in TABLES:
                self._flush_table(table)
            self._oldest = time.monotonic()

    def dump(self, step: int, layer: str, tensors: Mapping[str, Tensor]) -> list[Path]:
        """Save tensors of a layer, by tensor name; a dump of the same step, layer and name is replaced."""
        saved: list[Path] = []
        for name, tensor in tensors.items():
            with self._mutex, self._guarded(f"dump of {layer[:80]!r}"):
                saved.append(save_dump(self.path, self.rank, step, layer, name, tensor))
                self._count(saved[-1].stat().st_size)
        return saved

    def update_fingerprint(self, **facts: Any) -> None:
        """Add facts to this rank's run.json, replacing those of the same name."""
        with self._mutex:
            self._fingerprint.update(facts)
            with self._guarded("run.json"):
                run_json.write_run_json(self.path, self.rank, self._fingerprint)

    def close(self) -> None:
        """Flush, turn the journals into parts and mark this rank as finished; closing twice does nothing."""
        with self._mutex:
            if self._closed:
                return
            self.flush()
            for table in list(self._journals):
                with self._guarded(f"part of {table}"):
                    self._finish_part(table)
            self._write_ending()
            self._closed = True
            for journal in self._journals.values():
                journal.close()
            self._lock.release()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # How a folder is opened and continued.

    def _open(self, facts: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "journal").mkdir(exist_ok=True)
        old = run_json.read_run_json(self.path / run_json.run_json_name(self.rank))
        self._fingerprint = run_json.new_fingerprint(self.rank)
        if isinstance(old, dict):
            _refuse_newer(self.path, old)
            self._fingerprint = old | {k: v for k, v in self._fingerprint.items() if k not in ("created", "sessions")}
        self._lock = RankLock(self.path, self.rank)
        self._session = 1 + max((self._adopt(table) for table in TABLES), default=0)
        self._fingerprint |= facts | {"sessions": self._session}
        run_json.write_run_json(self.path, self.rank, self._fingerprint)

    def _adopt(self, table: str) -> int:
        """Finish what an earlier session left in a journal; the number of the last session seen in this table."""
        path = self._journal_path(table)
        last = self._last_part(table)
        session = last[1]
        if path.exists():
            contents = read_journal(path)
            stamp = contents.stamp or Stamp(table, self.rank, last[0] + 1, session or 1)
            session = max(session, stamp.session)
            if contents.batches and not isinstance(read_part_facts(self._part_path(table, stamp.part)), str):
                contents.batches.clear()  # the part was finished, only the journal had not been removed yet
            if contents.batches:
                number = max(stamp.part, last[0] + 1)
                new = Stamp(table, self.rank, number, stamp.session)
                write_part(self._part_path(table, number), new, contents.batches)
            path.unlink()
        return session

    def _last_part(self, table: str) -> tuple[int, int]:
        """Number of the last part, and the session of the last readable one; zeros if there is none."""
        numbers = [parse_part_name(p.name) or 0 for p in entries(self.path / table / rank_folder(self.rank))]
        for number in sorted(numbers, reverse=True):
            facts = read_part_facts(self._part_path(table, number))
            if not isinstance(facts, str):
                return max(numbers), facts.stamp.session if facts.stamp else 1
        return max(numbers, default=0), 0

    def _journal_path(self, table: str) -> Path:
        return self.path / "journal" / journal_name(self.rank, table)

    def _part_path(self, table: str, number: int) -> Path:
        return self.path / table / rank_folder(self.rank) / part_name(number)

    # From buffer to journal to part.

    def _flush_table(self, table: str) -> None:
        rows, self._rows[table], self._sizes[table] = self._rows[table], [], 0
        if not rows or self.stopped:
            return
        batch = to_batch(table, rows, lambda column, value: None)
        with self._guarded(f"journal of {table}"):
            self._journal(table).append(batch)
            self._count(batch.nbytes)
            if self._journals[table].bytes >= self.part_bytes:
                self._finish_part(table)

    def _journal(self, table: str) -> Journal:
        if table not in self._journals:
            number = self._last_part(table)[0] + 1
            self._journals[table] = Journal(self._journal_path(table), Stamp(table, self.rank, number, self._session))
        return self._journals[table]

    def _finish_part(self, table: str) -> None:
        """The journal's rows as a part; then, and only then, the journal goes."""
        journal = self._journals[table]
        write_part(self._part_path(table, journal.stamp.part), journal.stamp, read_journal(journal.path).batches)
        journal.close()
        journal.path.unlink()
        del self._journals[table]

    def _count(self, written: int) -> None:
        self.bytes_written += written
        if self.max_bytes is not None and self.bytes_written > self.max_bytes:
            self._stop(f"the limit of {self.max_bytes} bytes is reached")

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        if self.stopped:
            return
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            self._stop(f"{what}: {getattr(error, 'strerror', None) or error}")

    def _stop(self, reason: str) -> None:
        if not self.stopped:
            self.stopped = reason
            warnings.warn(
                f"fp8dbg stopped recording into {self.path} ({reason}). Training goes on.", RuntimeWarning, stacklevel=2
            )

    def _write_ending(self) -> None:
        ending = {"finished": not self.stopped, "ended": run_json.now(), "stopped": self.stopped or None}
        self._fingerprint |= ending
        try:
            run_json.write_run_json(self.path, self.rank, self._fingerprint)
        except OSError as error:
            self._stop(f"run.json: {error.strerror or error}")


def _refuse_newer(path: Path, meta: Mapping[str, Any]) -> None:
    if meta["schema_version"] > SCHEMA_VERSION:
        raise RunFolderError(
            f"{path} was recorded with schema {meta['schema_version']}; this fp8dbg knows up to {SCHEMA_VERSION}.",
            "Update fp8dbg, or record into another folder.",
        )
