"""A run's tables and curves in other programs' formats: CSV, Parquet, TensorBoard, Weights & Biases, MLflow.

The trackers get every curve (`reports/exported.sql`) in their offline format; nothing is sent anywhere. Their libraries
are optional and imported where they are used.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from fp8dbg.errors import UnknownNameError, UsageError, optional_library
from fp8dbg.runs.folder import Folder
from fp8dbg.runs.queries import stream
from fp8dbg.runs.schema import TABLES

Point = tuple[int, str, float]
"""Step, name of a curve, value."""

_LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: where, in which format, how many rows or values, and how it is looked at."""

    path: str
    format: str
    rows: int
    next: str


def export(run: Folder, to: str, out: Path) -> Exported:
    """Write a run in another program's format.

    Args:
        run: an open run folder.
        to: csv or parquet (one file a table), tensorboard, wandb or mlflow (every curve, offline).
        out: the folder to write into; made if missing.

    Raises:
        UnknownNameError: there is no such format.
        UsageError: ``out`` is in use or cannot be written, or the format's library is not installed.
    """
    if to not in FORMATS:
        raise UnknownNameError("export format", to, list(FORMATS))
    write, then = FORMATS[to]
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise UsageError(f"{out} exists and is not an empty folder.", "Give another folder.")
        if to in _LIBRARIES:
            optional_library(_LIBRARIES[to], to)
        out.mkdir(parents=True, exist_ok=True)
        rows = write(run, out)
    except OSError as error:
        raise UsageError(f"Cannot write {out}: {error.strerror or error}.", "Give another folder.") from error
    return Exported(str(out), to, rows, then.format(out=out))


def _parquet(run: Folder, out: Path) -> int:
    def write(batches: pa.RecordBatchReader, table: str) -> int:
        with pq.ParquetWriter(out / f"{table}.parquet", batches.schema, compression="zstd") as file:
            return _written(batches, file.write_batch)

    return sum(_streamed(run, f"SELECT * FROM {name}", partial(write, table=name)) for name in TABLES)


def _csv(run: Folder, out: Path) -> int:
    """A missing value is an empty field; a histogram is JSON."""

    def write(batches: pa.RecordBatchReader, table: str) -> int:
        with pa.csv.CSVWriter(out / f"{table}.csv", batches.schema) as file:
            return _written(batches, file.write_batch)

    flat = {"tensors": "SELECT * REPLACE (to_json(histogram)::VARCHAR AS histogram) FROM tensors"}
    return sum(_streamed(run, flat.get(n, f"SELECT * FROM {n}"), partial(write, table=n)) for n in TABLES)


def _streamed(run: Folder, sql: str, use: Callable[[pa.RecordBatchReader], T]) -> T:
    return run.reading(lambda connection: stream(connection, sql, use))


def _written(batches: pa.RecordBatchReader, write: Callable[[pa.RecordBatch], object]) -> int:
    rows = 0
    for batch in batches:
        write(batch)
        rows += batch.num_rows
    return rows


def _points(run: Folder, write: Callable[[Iterator[Point]], int]) -> int:
    """Hand every value of every curve, step by step, to a writer that counts them."""

    def points(batches: pa.RecordBatchReader) -> Iterator[Point]:
        for batch in batches:
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    return run.reading(lambda connection: stream(connection, "exported", lambda b: write(points(b))))


def _tensorboard(run: Folder, out: Path) -> int:
    def write(points: Iterator[Point]) -> int:
        count = 0
        with optional_library("tensorboardX", "tensorboard").SummaryWriter(str(out), write_to_disk=True) as board:
            for count, (step, name, value) in enumerate(points, 1):  # noqa: B007  # how many there were is the answer
                board.add_scalar(_tame(name), value, step)
        return count

    return _points(run, write)


def _wandb(run: Folder, out: Path) -> int:
    wandb = optional_library("wandb", "wandb")
    settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)

    def write(points: Iterator[Point]) -> int:
        count = 0
        with wandb.init(
            mode="offline", dir=str(out), project="fp8dbg", name=run.path.name, config=_config(run), settings=settings
        ) as log:
            for step, of_step in groupby(points, key=lambda p: p[0]):
                values = {_tame(name): value for _, name, value in of_step}
                log.log(values, step=step)
                count += len(values)
        return count

    return _points(run, write)


def _mlflow(run: Folder, out: Path) -> int:
    optional_library("mlflow", "mlflow")
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    now = int(time.time() * 1000)

    def write(points: Iterator[Point]) -> int:
        client = MlflowClient(tracking_uri=out.absolute().as_uri())
        log = client.create_run(client.create_experiment("fp8dbg"), run_name=run.path.name).info.run_id
        count = 0
        while some := [Metric(_tame(n), value, now, step) for step, n, value in islice(points, 1000)]:
            client.log_batch(log, metrics=some)
            count += len(some)
        for name, text in _config(run).items():
            client.log_param(log, name, str(text)[:500])
        client.set_terminated(log)
        return count

    with _file_store():
        return _points(run, write)


@contextmanager
def _file_store() -> Iterator[None]:
    """MLflow 3 wants this variable before it writes files, the one offline format that needs no database."""
    name = "MLFLOW_ALLOW_FILE_STORE"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _config(run: Folder) -> dict[str, Any]:
    return {name: run.meta[name] for name in ("recipe", "every", "created") if name in run.meta}


def _tame(name: str) -> str:
    """A curve's name that every tracker takes as a name and none as a path that leads elsewhere."""
    words = (re.sub(r"[^A-Za-z0-9_. :-]", "_", word) for word in name.split("/"))
    return "/".join(word if word.strip(". ") else "_" * max(1, len(word)) for word in words)


FORMATS: dict[str, tuple[Callable[[Folder, Path], int], str]] = {
    "csv": (_csv, "One file a table: {out}/tensors.csv and its neighbours."),
    "parquet": (_parquet, "One file a table: {out}/tensors.parquet and its neighbours."),
    "tensorboard": (_tensorboard, "tensorboard --logdir {out}"),
    "wandb": (_wandb, "wandb sync {out}/wandb/offline-run-*"),
    "mlflow": (_mlflow, "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {out}"),
}
"""Each format: its writer, and how what it wrote is looked at."""
