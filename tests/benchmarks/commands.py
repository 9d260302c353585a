"""What the command line takes: ``python -m tests.benchmarks.commands``.

``--help``, and a Python below ``fp8dbg run``, beside a Python that does nothing; ``report`` and ``whatif`` of a run of
a million rows of ``tensors``, and ``recommend`` of one with a fault, without and with a host whose configuration it
writes; the fastest of some tries each, for what else the machine does only adds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from fp8dbg.recording.launch import Options, environment
from tests.synthetic import outlier, write_big_run

ROWS = 1_000_000


def seconds(*command: str, tries: int, variables: Mapping[str, str] = os.environ) -> float:
    """Wall time of the fastest try of a command."""
    best = float("inf")
    for _ in range(tries):
        began = time.perf_counter()
        subprocess.run([sys.executable, *command], env=variables, check=True, capture_output=True)
        best = min(best, time.perf_counter() - began)
    return best


def rows() -> list[tuple[str, float]]:
    """What was run, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(write_big_run(Path(folder) / "run", ROWS))
        faulty = str(write_big_run(Path(folder) / "faulty", ROWS, plant=outlier()))
        advice = ("-m", "fp8dbg", "recommend", faulty, "--out", str(Path(folder) / "advice"))
        launched = environment(Options(Path(folder)), Path(folder) / "told")
        report = ("-m", "fp8dbg", "report", run)
        return [
            ("python that does nothing", seconds("-c", "pass", tries=9)),
            ("the same below fp8dbg run", seconds("-c", "pass", tries=9, variables=launched)),
            ("fp8dbg --help", seconds("-m", "fp8dbg", "--help", tries=9)),
            (f"fp8dbg report, {ROWS:,} rows, without the page", seconds(*report, "--no-html", tries=3)),
            (f"fp8dbg report, {ROWS:,} rows", seconds(*report, tries=3)),
            (f"fp8dbg whatif, {ROWS:,} rows", seconds("-m", "fp8dbg", "whatif", run, "--recipe", "delayed", tries=3)),
            (f"fp8dbg recommend, {ROWS:,} rows", seconds(*advice, tries=3)),
            (f"fp8dbg recommend --for pytorch, {ROWS:,} rows", seconds(*advice, "--for", "pytorch", tries=3)),
        ]


def main() -> None:
    """Print the table."""
    for name, took in rows():
        print(f"{name:46}{took:9.3f}s")


if __name__ == "__main__":
    main()
