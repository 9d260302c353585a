"""The command line in tests: in this process (the fixture ``fp8dbg`` of conftest.py), or as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Result(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


def in_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Yields what runs the command line as the installed script does."""
    from fp8dbg import cli

    pipe = signal.getsignal(signal.SIGPIPE)

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["fp8dbg", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        return Result(int(stopped.value.code or 0), captured.out, captured.err)

    yield run
    signal.signal(signal.SIGPIPE, pipe)


def in_a_process(*arguments: object, place: Path | None = None, before: str = "", **variables: str) -> Result:
    """A command as a user types it, in a folder and with variables added to the environment; ``before``: Python that
    runs first."""
    start = ["-c", f"import sys; {before}; from fp8dbg.cli import main; main()"] if before else ["-m", "fp8dbg"]
    command = [sys.executable, *start, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=place, env=environment(**variables), capture_output=True, text=True, encoding="utf-8", check=False
    )
    return Result(done.returncode, done.stdout, done.stderr)


def started(*arguments: object, **options: object) -> subprocess.Popen[str]:
    """The same, running; options are Popen's own. It can be interrupted, though tests in the background cannot."""
    command = [sys.executable, "-m", "fp8dbg", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, it would stay so in the new process
    try:
        return subprocess.Popen(command, text=True, env=environment(), **pipes | options)  # type: ignore[call-overload,no-any-return]
    finally:
        signal.signal(signal.SIGINT, before)


def environment(**variables: str) -> dict[str, str]:
    """This process's, in which Python finds this checkout wherever it is started; a PYTHONPATH given comes first."""
    path = os.pathsep.join(filter(None, [variables.pop("PYTHONPATH", ""), str(ROOT)]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
