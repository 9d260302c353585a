"""Training is never broken: what fp8dbg runs inside a training step runs behind ``guarded``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("fp8dbg")

GUARDED: dict[str, str] = {}
"""Qualified name and module of every guarded method: the sites at which a fault of ours could reach training."""


class Guard(Protocol):
    """An object with guarded methods: it knows which of them are off and tells the run when one is switched off."""

    off: set[str]

    def lost(self, what: str, error: Exception) -> None:
        """Record that ``what`` is no longer seen."""


S = TypeVar("S", bound=Guard)


def guarded(what: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R | None]]:
    """Make a method safe to call from training.

    An exception (of Exception's kind; an interrupt passes) is caught and logged, the method is switched off for this
    object, and the object's ``lost`` says that ``what`` is no longer seen. From then on the method returns None.

    Args:
        what: what is not recorded any more, as the subject of a sentence: "the gradients".
    """

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
        entry = method.__name__
        GUARDED[method.__qualname__] = method.__module__

        @functools.wraps(method)
        def safe(self: S, *args: P.args, **kwargs: P.kwargs) -> R | None:
            if entry in self.off:
                return None
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  whatever it is, it is ours and must not reach training
                self.off.add(entry)
                report(self, what, error)
                return None

        return cast("Callable[Concatenate[S, P], R | None]", safe)

    return decorate


def report(guard: Guard, what: str, error: Exception) -> None:
    """Tell the log and the run, whatever state they are in."""
    logger.warning("fp8dbg: %s is no longer recorded (%s: %s)", what, type(error).__name__, error, exc_info=error)
    try:
        guard.lost(what, error)
    except Exception:
        logger.exception("fp8dbg: the loss of %s could not be recorded", what)


def sentence(what: str, error: Exception) -> str:
    """The detail of the event: what is not seen from here on, and why."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return f"{what[:1].upper()}{what[1:]} is not recorded from here on ({text})."


__all__ = ["GUARDED", "Guard", "guarded", "report", "sentence"]
