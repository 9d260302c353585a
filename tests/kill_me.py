"""Records runs to be killed, for test_promise_nothing_lost: one line of input, one child process to kill."""

from __future__ import annotations

import os
import sys

from fp8dbg.runs.rows import to_batch
from fp8dbg.runs.writer import RunWriter
from tests.recorded import rows_of


def record(folder: str, first: int, part_bytes: int) -> None:
    """Record steps for ever, and print each that is finished; the first line is the process's number."""
    writer = RunWriter(folder, fingerprint={"recipe": "delayed"}, part_bytes=part_bytes)
    print(os.getpid(), flush=True)
    step = first
    while True:
        for table, rows in rows_of(step).items():
            writer.append(table, rows)
        writer.flush()
        print(step, flush=True)
        step += 1


def main() -> None:
    """Each line of input is a folder, the first step and part_bytes; "dead" is printed when that child is."""
    to_batch("steps", [{}], lambda column, value: None)  # what is imported here is not imported in every child
    for line in sys.stdin:
        folder, first, part_bytes = line.split()
        child = os.fork()
        if child == 0:
            record(folder, int(first), int(part_bytes))
        os.waitpid(child, 0)
        print("\ndead", flush=True)


if __name__ == "__main__":
    main()
