"""``fp8dbg run``: start a program that has never heard of fp8dbg so that what it trains is recorded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fp8dbg.errors import UsageError
from fp8dbg.numerics.arguments import whole
from fp8dbg.numerics.recipes import recipe_named
from fp8dbg.recording.sampling import Settings

BOOT = Path(__file__).resolve().parent / "boot"
"""Folder of the sitecustomize that Python imports by itself."""

_FORWARDED = ("SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True)
class Options:
    """How a program is recorded; as the arguments of ``attach``.

    Args:
        out: the run folder. Further models of the same process go to ``out-2``, ``out-3``, ...
        fallback: file of a plan that is applied to each model before it is attached to; its names are the model's.
        first_step: number of the first step, for a training that is resumed.

    Raises:
        UsageError: an option does not fit.
    """

    out: Path
    every: int = 100
    recipe: str = "delayed"
    layers: tuple[str, ...] = ("*",)
    fallback: Path | None = None
    first_step: int = 0
    limits: tuple[str, ...] = ()
    trigger_dump: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Settings(every=self.every, limits=self.limits, trigger_dump=self.trigger_dump).checked()
        recipe_named(self.recipe)
        whole("first_step", self.first_step, 0)

    def to_json(self) -> str:
        """For the processes of the program, wherever they run: paths are made absolute."""
        paths = {"out": self.out.absolute(), "fallback": self.fallback and self.fallback.absolute()}
        return json.dumps(asdict(self) | {name: path and str(path) for name, path in paths.items()})


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        code: its exit code; 128 + n where signal n ended it.
        folders: the run folders that this machine's processes recorded into.
        failures: why processes that would have recorded did not.
        detail: what to know about the recording, in a sentence; "" if all is well.
    """

    code: int
    folders: tuple[str, ...]
    failures: tuple[str, ...]
    detail: str


def launch(
    command: Sequence[str], options: Options, log: Path | None = None, variables: Mapping[str, str] | None = None
) -> Outcome:
    """Run a command to its end; it and all Python processes below it record what they train.

    Signals are passed on to it. Its standard streams are this process's own.

    Args:
        command: the program and its arguments.
        options: how it is recorded.
        log: a file that takes what it prints, instead.
        variables: to add to its environment.

    Raises:
        UsageError: it cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="fp8dbg-") as folder:
        told = Path(folder) / "told"
        told.touch()
        code = _run(command, {**environment(options, told), **(variables or {})}, log)
        words = told.read_text(encoding="utf-8", errors="replace").splitlines()
    folders, failures = _after(words, "attached "), _after(words, "failed ")
    return Outcome(code, folders, failures, _detail(words, folders, failures))


def environment(options: Options, told: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which Python processes record: two variables, and the boot folder first on PYTHONPATH."""
    path = os.pathsep.join([str(BOOT), *filter(None, [base.get("PYTHONPATH")])])
    return {**base, "PYTHONPATH": path, "FP8DBG_RUN": options.to_json(), "FP8DBG_TOLD": str(told)}


def _run(command: Sequence[str], variables: Mapping[str, str], log: Path | None) -> int:
    try:
        with log.open("wb") if log else contextlib.nullcontext() as output:
            error_output = subprocess.STDOUT if log else None
            process = subprocess.Popen(command, env=variables, stdout=output, stderr=error_output)
    except OSError as error:
        what = error.filename or command[0]
        raise UsageError(f"{what} cannot be started: {error.strerror}.", "Give a command after --.") from error
    with _forwarding(process):
        code = process.wait()
    return 128 - code if code < 0 else code


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[None]:
    def forward(number: int, _: object) -> None:
        if number != signal.SIGINT or not _in_foreground():
            process.send_signal(number)

    known = [signal.Signals[name] for name in _FORWARDED if hasattr(signal, name)]
    before = {number: signal.signal(number, forward) for number in known}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether a terminal's Ctrl-C reaches the program by itself."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


def _after(words: Sequence[str], start: str) -> tuple[str, ...]:
    """What follows a beginning, each once."""
    return tuple(dict.fromkeys(word.removeprefix(start) for word in words if word.startswith(start)))


def _detail(words: Sequence[str], folders: Sequence[str], failures: Sequence[str]) -> str:
    if "started" not in words:
        return (
            "Nothing was recorded: no Python process looked for fp8dbg. Python's options -I, -E and -S keep it out; "
            "so does a program that clears PYTHONPATH."
        )
    if not folders and failures:
        return f"Nothing was recorded: {failures[0]}"
    if not folders:
        return (
            "Nothing was recorded: no PyTorch model with linear layers was called in training mode after an optimizer "
            "was made for its parameters."
        )
    empty = [folder for folder in folders if not _has_rows(Path(folder))]
    return f"Nothing was recorded in {empty[0]}: no training step of its model was seen." if empty else ""


def _has_rows(folder: Path) -> bool:
    """Whether a run folder holds amaxes, in parts or, after a kill, in a journal."""
    found = [*folder.glob("amax/rank=*/*.parquet"), *folder.glob("journal/rank-*.amax.arrows")]
    return any(path.stat().st_size for path in found)
