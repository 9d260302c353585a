"""The command line: its verbs in the order of --help, and one place where errors become sentences and exit codes.

Each verb is a short function in one of the files beside this one. Heavy libraries are imported inside the verbs, so
--help is quick.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from fp8dbg import __version__, output
from fp8dbg.cli import act, data, live, look
from fp8dbg.errors import Fp8dbgError

app = typer.Typer(
    help="Tells a team training in FP8 where the numbers break, why, and what to keep in BF16.",
    epilog="Exit codes: 0 fine, 1 a gate failed, 2 wrong usage or unreadable input, 3 nothing recorded.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line: every error meant for a user is printed here, once, and becomes an exit code."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `fp8dbg query ... | head` ends quietly
    output.accept_any_text()
    try:
        try:
            app(prog_name="fp8dbg")
        finally:
            _flush()  # here, where a full disk becomes a sentence; as Python exits it is exit code 120
    except Exception as error:
        if os.environ.get("FP8DBG_DEBUG") == "1":
            raise
        _give_up_stdout_if_broken()
        # a Ctrl-C that reached DuckDB comes back as a RuntimeError
        if isinstance(error, RuntimeError) and str(error) == "Query interrupted":
            sys.exit(128 + signal.SIGINT)
        output.say(f"fp8dbg: {error if isinstance(error, Fp8dbgError) else _unforeseen(error)}")
        # Python's own exit code for an exception is 1, which here means that a gate failed
        sys.exit(getattr(error, "exit_code", Fp8dbgError.exit_code))


def _flush() -> None:
    if sys.stdout is not None:  # closed before we began, as by >&-
        sys.stdout.flush()


def _give_up_stdout_if_broken() -> None:
    """What cannot be written stays in the buffer, and Python would try again as it exits."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unforeseen(error: Exception) -> str:
    what = error.strerror or "" if isinstance(error, OSError) else ""
    name = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    said = f"{name}{what}" if what else f"{type(error).__name__}: {error}"
    return f"This could not be done ({' '.join(said.split()):.500}). FP8DBG_DEBUG=1 shows where."


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fp8dbg {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


VERBS = (
    live.demo,
    live.doctor,
    live.run,
    live.watch,
    live.control,
    look.report,
    look.tensors,
    look.query,
    look.whatif,
    look.compare,
    act.recommend,
    act.bisect,
    act.check,
    data.export,
    data.compact,
)
"""Every verb, in the order of --help: while training, then looking at the run, acting on it, and its files."""

_BEFORE_A_COMMAND = {live.doctor, live.run, act.bisect}
"""What follows their first argument is the program's own, options and all."""

for verb in VERBS:
    app.command(context_settings={"allow_interspersed_args": verb not in _BEFORE_A_COMMAND})(verb)
