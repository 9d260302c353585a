"""Records under a limit on the size of files, for test_promise_nothing_lost."""

from __future__ import annotations

import resource
import sys

from fp8dbg.runs.writer import RunWriter
from tests.recorded import rows_of


def main() -> None:
    """Arguments: folder, bytes that a file may have. Prints the last step flushed, and why recording stopped."""
    folder, size = sys.argv[1], int(sys.argv[2])
    writer = RunWriter(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    last = -1
    for step in range(100):
        for table, rows in rows_of(step).items():
            writer.append(table, rows)
        writer.flush()
        if not writer.stopped:
            last = step
    writer.close()
    print(last, writer.stopped)


if __name__ == "__main__":
    main()
