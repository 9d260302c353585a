"""The same group-bys on the same files, by fp8dbg and pandas: ``python -m tests.benchmarks.pandas_group_bys [rows]``.

Each side starts from the Parquet files and ends with the answer in memory. pandas reads once the columns needed and
once, as one does who looks around, the whole table. The fastest of five tries, in one process.

The last line says where the floor is: one column, read and added up, without any grouping. Against a pandas whose
columns are chosen by hand no query that starts from the files is ten times faster, for both decode the same pages: a
million doubles take DuckDB about 7 ms of CPU and pandas about 16. What `ask` keeps of a folder while it is open (the
merged steps) is not used here.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from fp8dbg.runs.folder import Folder, open_folder
from tests.synthetic import write_big_run

RATIO = "sum(underflow) / sum(numel - zeros - nan - inf)"
KEYS = ["layer", "tensor"]


def _underflow(rows: pd.DataFrame) -> Any:
    sums = rows.groupby(KEYS)[["underflow", "numel", "zeros", "nan", "inf"]].sum()
    return sums["underflow"] / (sums["numel"] - sums["zeros"] - sums["nan"] - sums["inf"])


@dataclass(frozen=True)
class GroupBy:
    """One question: as SQL, and in pandas as the columns it needs and what is done with them."""

    sql: str
    columns: list[str]
    frame: Callable[[pd.DataFrame], Any]

    def pandas(self, folder: Path, whole: bool) -> Any:
        """The answer from the files."""
        columns = None if whole else self.columns
        return self.frame(pd.read_parquet(folder / "tensors", columns=columns, partitioning=None))


QUESTIONS = {
    "underflow of each tensor": GroupBy(
        f"select layer, tensor, {RATIO} as ratio from tensors group by all",
        [*KEYS, "underflow", "numel", "zeros", "nan", "inf"],
        _underflow,
    ),
    "worst rel_l2 of each layer": GroupBy(
        "select layer, max(rel_l2) as worst from tensors group by layer",
        ["layer", "rel_l2"],
        lambda rows: rows.groupby("layer")["rel_l2"].max(),
    ),
    "median amax of each tensor": GroupBy(
        "select layer, tensor, median(amax) as usual from tensors group by all",
        [*KEYS, "amax"],
        lambda rows: rows.groupby(KEYS)["amax"].median(),
    ),
    "figures of each step": GroupBy(
        "select step, max(rel_l2) as worst, avg(kurtosis) as kurtosis from tensors group by step",
        ["step", "rel_l2", "kurtosis"],
        lambda rows: rows.groupby("step").agg({"rel_l2": "max", "kurtosis": "mean"}),
    ),
    "one column, added up": GroupBy("select sum(rel_l2) from tensors", ["rel_l2"], lambda rows: rows["rel_l2"].sum()),
}


def best(work: Callable[[], object]) -> float:
    """Wall seconds of the fastest of five tries."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def rows(count: int) -> list[tuple[str, float, float, float]]:
    """Each question, and the seconds of fp8dbg, of pandas with the columns needed, and of pandas with all."""
    with tempfile.TemporaryDirectory() as root:
        folder = write_big_run(Path(root) / "run", count)
        with open_folder(folder) as run:
            return [(name, *_times(run, folder, asked)) for name, asked in QUESTIONS.items()]


def _times(run: Folder, folder: Path, asked: GroupBy) -> tuple[float, float, float]:
    pandas = partial(asked.pandas, folder)
    return best(partial(run.rows, asked.sql)), best(partial(pandas, whole=False)), best(partial(pandas, whole=True))


def main(count: int = 1_000_000) -> None:
    """Print the table."""
    print(f"{count:9,} rows of tensors        fp8dbg    pandas, needed columns    pandas, whole table")
    for name, ours, needed, whole in rows(count):
        print(f"{name:30}{ours:7.3f}s{needed:11.3f}s ={needed / ours:5.1f}x{whole:17.3f}s ={whole / ours:6.1f}x")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
