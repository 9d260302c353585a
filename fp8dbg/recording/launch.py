"""``fp8dbg run``: start a program that has never heard of fp8dbg so that what it trains is recorded."""

from __future__ import annotations

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
from fp8dbg.runs.plan import Plan

BOOT = Path(__file__).resolve().parent / "boot"
"""Folder of the sitecustomize that Python imports by itself."""

_FORWARDED = ("SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1", "SIGUSR2")

_END_GROUP = """
read -r _
kill -s TERM -- "-$1" 2>/dev/null
for _ in 1 2 3 4 5 6 7 8 9 10; do
    kill -s 0 -- "-$1" 2>/dev/null || exit 0
    sleep 0.5
done
kill -s KILL -- "-$1" 2>/dev/null
"""
"""What a shell does with a process group when nobody holds the other end of its input any more; $1: its number."""


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
        unplanned: what of the fallback plan was not done as planned, a sentence each.
        missing: layers of the plan that no model had; empty where other machines may have them.
    """

    code: int
    folders: tuple[str, ...]
    failures: tuple[str, ...]
    detail: str
    unplanned: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def launch(
    command: Sequence[str], options: Options, log: Path | None = None, variables: Mapping[str, str] | None = None
) -> Outcome:
    """Run a command to its end; it and all Python processes below it record what they train.

    Signals are passed on to it. Its standard streams are this process's own.

    Args:
        command: the program and its arguments.
        options: how it is recorded.
        log: a file that takes what it prints, instead. Then nobody else looks after it: it reads nothing, and it and
            all that it started end with it, or with this process, however that ends.
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
    unplanned = _after(words, "unplanned ")
    missing = _missing(words, options.fallback) if folders else ()
    named = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    said = [f"WARNING: layers of the fallback plan are in no model: {named}."] if missing else []
    said += [f"WARNING: not as planned: {sentence}" for sentence in unplanned[:1]]
    detail = " ".join(filter(None, [*said, _detail(words, folders, failures)]))
    return Outcome(code, folders, failures, detail, unplanned, missing)


def environment(options: Options, told: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which Python processes record: two variables, and the boot folder first on PYTHONPATH."""
    path = os.pathsep.join([str(BOOT), *filter(None, [base.get("PYTHONPATH")])])
    return {**base, "PYTHONPATH": path, "FP8DBG_RUN": options.to_json(), "FP8DBG_TOLD": str(told)}


def _run(command: Sequence[str], variables: Mapping[str, str], log: Path | None) -> int:
    try:
        process = _started_alone(command, variables, log) if log else subprocess.Popen(command, env=variables)
    except OSError as error:
        what = error.filename or command[0]
        raise UsageError(f"{what} cannot be started: {error.strerror}.", "Give a command after --.") from error
    with _ending_with_us(process) if log else _forwarding(process):
        code = process.wait()
    return 128 - code if code < 0 else code


def _started_alone(command: Sequence[str], variables: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as said:
        return subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextmanager
def _ending_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A shell waits until the pipe to it is closed, here or by this process's death, and ends the process's group."""
    guard = subprocess.Popen(
        ["sh", "-c", _END_GROUP, "sh", str(process.pid)], stdin=subprocess.PIPE, start_new_session=True
    )

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in _known("SIGTERM", "SIGHUP")}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        guard.stdin.close()  # type: ignore[union-attr]  # it is a pipe
        process.wait()
        guard.wait()


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[None]:
    def forward(number: int, _: object) -> None:
        if number != signal.SIGINT or not _in_foreground():
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _known(*_FORWARDED)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _known(*names: str) -> list[signal.Signals]:
    """Those of the signals that this system has."""
    return [signal.Signals[name] for name in names if hasattr(signal, name)]


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


def _missing(words: Sequence[str], plan: Path | None) -> tuple[str, ...]:
    """Layers of a plan that no process had, where all of them told this launcher."""
    if plan is None or "elsewhere" in words:
        return ()
    had = {layer for layers in _after(words, "planned ") for layer in json.loads(layers)}
    return tuple(layer for layer in Plan.from_json(plan.read_text("utf-8")).as_fallback() if layer not in had)


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
