"""When to measure: cadence, windows, triggers, and the control file of a live run."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from fp8dbg.errors import UnknownNameError, UsageError
from fp8dbg.numerics.arguments import texts
from fp8dbg.recording.triggers import SPIKE, FigureLimit, figure_limit
from fp8dbg.runs.files import is_regular
from fp8dbg.runs.schema import ROLES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONTROL = "control.toml"
LOOK_SECONDS = 1.0
"""The control file's time is looked at no more often than this: a file system can be slow."""

LARGEST = 1 << 20
"""Bytes of a control file that are read at most."""

LAST_STEP = (1 << 63) - 1
"""The largest number that a run folder's column of steps can hold."""

TRIGGER_STEPS = 3
"""Steps measured in full after a trigger: enough to see where it spreads."""

REST = 10
"""After them, as many times their number in which nothing triggers: what stays broken does not measure all of a run."""


@dataclass(frozen=True)
class Settings:
    """What a live run can be told; the fields are the keys of ``control.toml``.

    Args:
        every: measure in full on every n-th step; 0: never.
        windows: first and last step (inclusive) of ranges in which every step is measured in full.
        layers: globs of the layers measured in full.
        tensors: the roles measured in full.
        dump: ``layer:tensor`` globs whose values are saved once, at the next step.
        stop: record nothing, until it is false again.
        trigger_steps: steps measured in full after a trigger: a loss that is not finite or spikes, a NaN in an operand,
            a figure past its limit. 0: nothing triggers.
        spike: times the usual change from step to step by which a spike exceeds the usual loss; two thirds of it where
            the rise is four times that of any of the last 50 losses; 0: none does.
        limits: figures past which a tensor measured in full triggers, as "layers.3.*:input underflow_ratio > 0.5".
        trigger_dump: ``layer:tensor`` globs whose values are saved on the steps after a trigger, together with those of
            the last measured steps before it as far as they fit into a ring of 16 MiB.
    """

    every: int = 100
    windows: tuple[tuple[int, int], ...] = ()
    layers: tuple[str, ...] = ("*",)
    tensors: tuple[str, ...] = ROLES
    dump: tuple[str, ...] = ()
    stop: bool = False
    trigger_steps: int = TRIGGER_STEPS
    spike: float = SPIKE
    limits: tuple[str, ...] = ()
    trigger_dump: tuple[str, ...] = ()

    def checked(self) -> Settings:
        """Itself.

        Raises:
            UsageError: a value does not fit; the message says which are allowed.
        """
        if type(self.every) is not int or not 0 <= self.every <= LAST_STEP:
            raise UsageError(f"every={self.every!r:.100} is no cadence.", "Give a whole number of steps; 0 is never.")
        if type(self.stop) is not bool:
            raise UsageError(f"stop={self.stop!r:.100} is neither true nor false.", "Give true or false.")
        for window in self.windows:
            if (
                len(window) != 2
                or not all(type(n) is int and abs(n) <= LAST_STEP for n in window)
                or window[0] > window[1]
            ):
                raise UsageError(f"{window!r:.100} is no window of steps.", "Give first and last step, as (100, 120).")
        for role in self.tensors:
            if role not in ROLES:
                raise UnknownNameError("tensor", role, list(ROLES))
        self._check_triggers()
        for request in (*self.dump, *self.trigger_dump):
            if ":" not in request:
                raise UsageError(
                    f"{request!r:.100} names no tensor to save.", "Give layer:tensor, as 'layers.3.*:input'."
                )
            tensor = request.rpartition(":")[2]
            if not any(fnmatchcase(role, tensor) for role in ROLES):
                raise UnknownNameError("tensor", tensor, list(ROLES))
        return self

    def _check_triggers(self) -> None:
        if type(self.trigger_steps) is not int or not 0 <= self.trigger_steps <= 1000:
            raise UsageError(
                f"trigger_steps={self.trigger_steps!r:.100} is no number of steps.",
                "Give 0 to 1000; 0: nothing triggers.",
            )
        if type(self.spike) not in (int, float) or not 0 <= self.spike < math.inf:
            raise UsageError(
                f"spike={self.spike!r:.100} is no score.", "Give a number from 0 up; 0: no loss is a spike."
            )
        for text in self.limits:
            figure_limit(text)

    @cached_property
    def figure_limits(self) -> tuple[FigureLimit, ...]:
        """``limits``, read."""
        return tuple(figure_limit(text) for text in self.limits)

    def changed(self, values: Mapping[str, Any]) -> Settings:
        """These settings with others in place of some.

        Raises:
            UsageError: for an unknown key, or a value that does not fit.
        """
        known = Settings.__dataclass_fields__
        for key in values:
            if key not in known:
                raise UsageError(f"No setting is called {key!r:.100}.", f"Valid names: {', '.join(known)}.")
        merged = {name: values.get(name, getattr(self, name)) for name in known}
        try:
            merged["windows"] = tuple((first, last) for first, last in merged["windows"])
            for name in ("layers", "tensors", "dump", "limits", "trigger_dump"):
                merged[name] = texts(name, merged[name])
        except (TypeError, ValueError) as error:
            raise UsageError(f"A setting has the wrong shape ({error}).", "Give windows as [[100, 120]].") from None
        return Settings(**merged).checked()


def read_control(path: Path) -> dict[str, Any]:
    """What a control file says; reading it never waits: a pipe or a device is refused, and so is what is too large.

    Raises:
        FileNotFoundError: there is none.
        UsageError: it cannot be read.
    """
    try:
        size = path.stat().st_size
        if not is_regular(path) or size > LARGEST:
            raise UsageError(f"{path.name} is no file of settings.", f"Write a text file of at most {LARGEST} bytes.")
        with path.open("rb") as file:
            return tomllib.loads(file.read(LARGEST).decode("utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path.name} cannot be read ({' '.join(str(error).split()):.300}).") from None


@dataclass
class Sampling:
    """Decides, at each step boundary, whether the step is measured in full.

    Args:
        settings: what ``attach`` was asked for; ``control.toml`` in ``folder`` overrides it while training.
        folder: the run folder.
        tell: called with kind ("config", "error") and a sentence when the control file changed something.
    """

    settings: Settings
    folder: Path
    tell: Callable[[str, str], None]
    once: tuple[str, ...] = ()
    """Tensors to save at this step because the control file asked for it."""
    _asked: Settings = field(init=False)
    _until: int = -1
    _rest: int = -1
    _seen: int | None = None
    _next_look: float = 0.0

    def __post_init__(self) -> None:
        self._asked = self.settings

    def decide(self, step: int) -> str | None:
        """Why this step is measured in full (control, trigger, window, every), or None."""
        self.once = ()
        fresh = self._read_control()
        if self.settings.stop:
            return None
        if fresh and self.settings.dump != self._asked.dump:
            self.once = self.settings.dump
            return "control"
        if step <= self._until:
            return "trigger"
        if any(first <= step <= last for first, last in self.settings.windows):
            return "window"
        return "every" if self.settings.every and step % self.settings.every == 0 else None

    def trigger(self, step: int) -> bool:
        """Have the steps after ``step`` measured in full; False if they are already going to be, or it is too soon."""
        steps = self.settings.trigger_steps
        if not steps or step <= self._rest:
            return False
        self._until, self._rest = step + steps, step + steps * (1 + REST)
        return True

    def follows_trigger(self, step: int) -> bool:
        """Whether the step is one of those after a trigger."""
        return step <= self._until

    def _read_control(self) -> bool:
        """Take over a control file that changed since the last look."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        path = self.folder / CONTROL
        try:
            stamp: int | None = path.stat().st_mtime_ns
        except OSError:
            stamp = None
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            values = {} if stamp is None else read_control(path)
            self.settings = self._asked.changed(values)
        except (OSError, UsageError) as error:
            self.tell("error", f"{CONTROL} is not followed: {error}")
            return False
        said = ", ".join(f"{k} = {v!r:.200}" for k, v in values.items())
        self.tell("config", f"{CONTROL} now says {said or 'nothing: the options of attach apply'}.")
        return True
