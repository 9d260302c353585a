"""Writing a run folder while training: rows are buffered, journalled at every sampled step, and end up in parts."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from fp8dbg.errors import RunFolderError
from fp8dbg.runs import fingerprint as run_json
from fp8dbg.runs.dumps import save_dump
from fp8dbg.runs.files import folder_path
from fp8dbg.runs.lock import RankLock
from fp8dbg.runs.rows import Row, check_columns, row_bytes, to_batch
from fp8dbg.runs.schema import TABLES
from fp8dbg.runs.store import TableStore

if TYPE_CHECKING:
    from torch import Tensor

BUFFER_ROWS = 4096
BUFFER_BYTES = 1 << 20
BUFFER_SECONDS = 1.0
"""A buffer is journalled by itself when it holds this many rows or bytes, or when its oldest row is this old."""

PART_BYTES = 32 << 20
"""A journal of this size becomes a part."""

_LOG = logging.getLogger("fp8dbg")
"""Not `warnings`: under -W error a full disk would raise into training."""

_OPEN: weakref.WeakValueDictionary[tuple[str, int], RunWriter] = weakref.WeakValueDictionary()


class RunWriter:
    """One rank's hand on a run folder.

    Rows go to a buffer (`append`), from there to the table's journal (`flush`, at the end of every sampled step) and
    from there to Parquet parts (when a journal is large, and at `close`). An existing folder is continued: what a
    killed run left in its journals is finished first; a writer that this process still has open on the same folder and
    rank is closed. No buffer holds more than 1 MB and the rows of one `append`.

    Once constructed it never raises for the disk's sake: when a write fails, recording stops, `stopped` says why, and
    one warning is given. A tensor that cannot be saved stops no more than the saving of tensors, with an event. Wrong
    tables and columns do raise: they are mistakes in the caller. A forked child records nothing.

    Args:
        path: the run folder; made if missing.
        rank: global rank of this process; only files of this rank are ever written.
        fingerprint: what to add to run.json: recipe, layout, layers, config.
        part_bytes: size at which a journal becomes a part.
        max_bytes: recording stops when this rank has written so much in this session; None: no limit.

    Attributes:
        stopped: why recording stopped; "" while it goes on.
        last_step: largest step that earlier sessions recorded for this rank; None if there is none.

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
        self.path, self.rank, self.max_bytes = folder_path(path), int(rank), max_bytes
        self.stopped = ""
        self.last_step: int | None = None
        self._stores = {name: TableStore(self.path, name, self.rank, part_bytes) for name in TABLES}
        self._rows: dict[str, list[Row]] = {name: [] for name in TABLES}
        self._sizes = dict.fromkeys(TABLES, 0)
        self._flushed, self._dumped, self._saves = time.monotonic(), 0, True
        self._misfits: set[tuple[str, str]] = set()
        self._closed = False
        self._mutex = threading.RLock()  # backward hooks may run on autograd's own threads
        try:
            self._open(dict(fingerprint or {}))
        except (OSError, pa.ArrowException) as error:
            raise RunFolderError(
                f"Cannot record into {self.path}: {_reason(error)}.", "Give another folder."
            ) from error

    def append(self, table: str, rows: Iterable[Row]) -> None:
        """Buffer rows; columns left out are NULL, NaN and infinities become NULL. The dicts must not change after.

        A row of ``steps`` for a step and rank recorded before adds to it: its non-NULL values win.

        Raises:
            UnknownNameError: for a table or column that the schema lacks; the rows before that one are kept.
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
            if time.monotonic() - self._flushed > BUFFER_SECONDS:
                self.flush()

    def event(self, step: int | None, kind: str, layer: str | None, detail: str) -> None:
        """Buffer one row of ``events``."""
        self.append("events", [{"step": step, "rank": self.rank, "kind": kind, "layer": layer, "detail": detail}])

    def flush(self) -> None:
        """Hand everything buffered to the operating system: after this, killing the process loses none of it."""
        with self._mutex:
            for table in TABLES:  # events last: the others may add to them
                self._flush_table(table)
            self._flushed = time.monotonic()

    def dump(self, step: int, layer: str, tensors: Mapping[str, Tensor]) -> list[Path]:
        """Save tensors of a layer, by tensor name; a dump of the same step, layer and name is replaced."""
        saved: list[Path] = []
        with self._mutex:
            for name, tensor in tensors.items():
                if self._saves and not self.stopped and not self._closed:
                    self._save(saved, step, layer, name, tensor)
        return saved

    @property
    def facts(self) -> Mapping[str, Any]:
        """What this rank's run.json says: until it is told anew, what an earlier session's said."""
        return self._fingerprint

    def update_fingerprint(self, **facts: Any) -> None:
        """Add facts to this rank's run.json, replacing those of the same name."""
        with self._mutex:
            self._fingerprint.update(facts)
            if not self.stopped and not self._closed:
                self._try("run.json", self._write_fingerprint)

    def close(self) -> None:
        """Flush, turn the journals into parts and mark this rank as finished; closing twice does nothing."""
        with self._mutex:
            if self._closed:
                return
            self.flush()
            self._closed = True
            for table, store in self._stores.items():
                self._try(f"part of {table}", store.finish)
                store.abandon()
            ending = {"finished": not self.stopped, "ended": run_json.now(), "stopped": self.stopped or None}
            self._fingerprint |= ending
            self._try("run.json", self._write_fingerprint)
            self._lock.release()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, facts: dict[str, Any]) -> None:
        (self.path / "journal").mkdir(parents=True, exist_ok=True)
        old = run_json.read_run_json(self.path / run_json.run_json_name(self.rank))
        if isinstance(old, dict):
            run_json.refuse_newer(self.path, old)
        key = (os.path.realpath(self.path), self.rank)
        if earlier := _OPEN.get(key):
            earlier.close()
        self._lock = RankLock(self.path, self.rank)
        to_batch("steps", [{}], lambda column, value: None)  # pyarrow imports pandas here, for 0.4 s: not in a step
        pasts = [store.adopt() for store in self._stores.values()]
        self.last_step = max((p.last_step for p in pasts if p.last_step is not None), default=None)
        self._session = 1 + max(p.session for p in pasts)
        self._fingerprint = run_json.continued(old if isinstance(old, dict) else {}, self.rank)
        self._fingerprint |= facts | {"sessions": self._session}
        self._write_fingerprint()
        for lost in (p.lost for p in pasts if p.lost):
            self.event(None, "gap", None, lost)
        _OPEN[key] = self

    def _flush_table(self, table: str) -> None:
        rows, self._rows[table], self._sizes[table] = self._rows[table], [], 0
        if rows and not self.stopped:
            batch = to_batch(table, rows, lambda column, value: self._note_misfit(table, column, value))
            self._try(f"journal of {table}", lambda: self._stores[table].append(batch, self._session))
            self._check_limit()

    def _note_misfit(self, table: str, column: str, value: object) -> None:
        if (table, column) not in self._misfits:
            self._misfits.add((table, column))
            self.event(
                None, "error", None, f"{table}.{column} was given {value!r:.80}, which its type cannot hold: NULL."
            )

    def _save(self, saved: list[Path], step: int, layer: str, name: str, tensor: Tensor) -> None:
        try:
            path = save_dump(self.path, self.rank, step, layer, name, tensor)
            self._dumped += path.stat().st_size
        except OSError as error:
            self._saves = False
            detail = f"No tensor is saved from here on: {self.path / 'dumps'} cannot be written ({_reason(error)})."
            self.event(step, "error", layer, detail)
            _LOG.warning("fp8dbg: %s", detail)
            return
        saved.append(path)
        self._check_limit()

    def _write_fingerprint(self) -> None:
        run_json.write_run_json(self.path, self.rank, self._fingerprint)

    def _check_limit(self) -> None:
        used = self._dumped + sum(store.bytes_on_disk for store in self._stores.values())
        if self.max_bytes is not None and used > self.max_bytes:
            self._stop(f"the limit of {self.max_bytes} bytes is reached")

    def _try(self, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, pa.ArrowException) as error:
            self._stop(f"{what}: {_reason(error)}")

    def _stop(self, reason: str) -> None:
        if not self.stopped:
            self.stopped = reason
            _LOG.warning("fp8dbg stopped recording into %s (%s). Training goes on.", self.path, reason)

    def _forget(self) -> None:
        """In a forked child: the parent records, this copy must not."""
        self._mutex = threading.RLock()  # another thread may have held it at the fork
        self.stopped, self._closed = "this process is a forked child", True
        self._lock.release()
        for store in self._stores.values():
            store.abandon()


def _forget_all() -> None:
    for writer in list(_OPEN.values()):
        writer._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _reason(error: BaseException) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:300]
