"""The exceptions fp8dbg raises: what happened, to which object, what to do, and the exit code it means."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Fp8dbgError(Exception):
    """Base of every error meant for a user.

    Args:
        message: one sentence: what happened, to which object.
        hint: one sentence: what to do about it; may be empty.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class UsageError(Fp8dbgError):
    """The caller asked for something that does not exist or does not fit together."""


class UnknownNameError(UsageError):
    """A name that is not in its list; the message gives the list.

    Args:
        kind: what the name should have named, as a singular noun ("recipe", "layer").
        name: the name given.
        valid: the names that exist; all are listed, at most 20.
    """

    def __init__(self, kind: str, name: str, valid: list[str]) -> None:
        self.kind, self.name, self.valid = kind, name, sorted(valid)
        shown = ", ".join(f"{one:.200}" for one in self.valid[:20]) + (
            f", and {len(valid) - 20} more" if len(valid) > 20 else ""
        )
        super().__init__(f"No {kind} is called {name!r:.200}.", f"Valid names: {shown or 'none'}.")


class RunFolderError(Fp8dbgError):
    """A run folder that is missing, empty, foreign, or of a newer schema."""


class QueryError(Fp8dbgError):
    """SQL that DuckDB refuses, or a report's parameters that do not check."""


class NothingRecordedError(Fp8dbgError):
    """A run folder that opens but holds no rows to answer from."""

    exit_code = 3


def optional_library(name: str, extra: str) -> Any:
    """A library that only one of fp8dbg's extras installs.

    Raises:
        UsageError: it is not installed; the message says how to install it.
    """
    try:
        return import_module(name)
    except ImportError:
        raise UsageError(f"{name} is not installed.", f"pip install 'fp8dbg[{extra}]' brings it.") from None
