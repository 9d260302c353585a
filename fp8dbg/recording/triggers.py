"""What makes a live run worth a closer look: a loss spike, a NaN, a figure past its limit; and what preceded it."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from fp8dbg.errors import UsageError
from fp8dbg.recording.dumps import Dumps
from fp8dbg.recording.names import matches
from fp8dbg.runs.schema import ROLES

if TYPE_CHECKING:
    from fp8dbg.runs.writer import RunWriter

SPIKE = 10.0
"""Times the usual change from step to step by which a spike exceeds the usual loss: Gaussian noise reaches 4, batches
of few tokens 7 (robust standard deviations of the difference of two losses)."""

WINDOW, ENOUGH = 50, 10
"""Losses that a new one is compared with, and how many of them there must be."""

LONE = 4.0
"""Two thirds of ``SPIKE`` are enough for a loss that rises this many times as far as any other in the window."""

RISE = 0.05
"""And the share of the usual loss by which it must rise: a loss without noise has no spikes of a hair's width."""

RING_BYTES = 16 << 20
"""Saved tensors of past sampled steps that are held in memory; one alone may take a quarter of it."""

RATIOS = {"underflow_ratio": "underflow", "saturated_ratio": "saturated"}
COLUMNS = (
    *("amax", "rms", "kurtosis", "peak_to_median", "scale_delta", "rel_l2", "sqnr_db", "cosine", "norm_ratio"),
    *("bias", "nan", "inf"),
)
"""Figures that a limit can name: shares formed of counts, and columns of ``tensors``."""

_LIMIT = re.compile(r"\s*(?:(\S+):(\S+)\s+)?(\w+)\s*([<>])\s*(\S+)\s*")


@dataclass(frozen=True)
class FigureLimit:
    """A figure past which a tensor triggers, as "layers.3.*:input underflow_ratio > 0.5"; without names, any tensor's.

    Args:
        text: as it was given.
        layer, tensor: globs.
        figure: one of ``RATIOS`` or ``COLUMNS``.
        above: whether more than ``value`` triggers, or less.
    """

    text: str
    layer: str
    tensor: str
    figure: str
    above: bool
    value: float

    def broken(self, row: Mapping[str, Any]) -> float | None:
        """The figure of a row of ``tensors``, if it is past the limit."""
        found = _figure(row, self.figure)
        if found is None or not (found > self.value if self.above else found < self.value):
            return None
        return found if matches(row["layer"], [self.layer]) and matches(row["tensor"], [self.tensor]) else None


def figure_limit(text: str) -> FigureLimit:
    """A limit from its text.

    Raises:
        UsageError: it is none; the message says how one looks and which figures there are.
    """
    found = _LIMIT.fullmatch(text)
    names = ", ".join((*RATIOS, *COLUMNS))
    if found is None or found[3] not in (*RATIOS, *COLUMNS):
        raise UsageError(
            f"{text!r:.100} is no limit.", f"Give FIGURE > NUMBER, perhaps LAYER:TENSOR first; of {names}."
        )
    try:
        value = float(found[5])
    except ValueError:
        raise UsageError(f"{found[5]!r:.100} in {text!r:.100} is no number.", "Give FIGURE > NUMBER.") from None
    tensor = found[2] or "*"
    if not any(matches(role, [tensor]) for role in ROLES):
        raise UsageError(f"{tensor!r:.100} in {text!r:.100} names no tensor.", f"Tensors are {', '.join(ROLES)}.")
    return FigureLimit(text.strip(), found[1] or "*", tensor, found[3], found[4] == ">", value)


def past_limit(rows: Iterable[Mapping[str, Any]], limits: Iterable[FigureLimit]) -> tuple[str, str] | None:
    """Layer and sentence of the first row of ``tensors`` that is past a limit."""
    for row in rows:
        for limit in limits:
            if (found := limit.broken(row)) is not None:
                return row["layer"], f"{row['tensor']} of {row['layer']} has {limit.figure} {found:.4g} ({limit.text})."
    return None


def _figure(row: Mapping[str, Any], figure: str) -> float | None:
    if figure not in RATIOS:
        return row.get(figure)
    count, finite = row.get(RATIOS[figure]), row["numel"] - (row["nan"] or 0) - (row["inf"] or 0)
    total = finite - (row["zeros"] or 0) if figure == "underflow_ratio" else finite
    return count / total if count is not None and total else None


class Losses:
    """The last losses, and whether a new one leaves them; some microseconds a step, and a little more for a spike.

    The first loss of a step (the mean of its backward roots, perhaps multiplied by a host's scaler) is compared with
    first ones, what the user logs for it afterwards with what was logged.
    """

    def __init__(self) -> None:
        self._last: list[deque[float]] = [deque(maxlen=WINDOW), deque(maxlen=WINDOW)]
        self._step: int | None = None

    def unusual(self, step: int, loss: float, spike: float) -> str | None:
        """Why this loss is worth a closer look, or None; it then belongs to those the next one is compared with.

        Args:
            step: its step.
            loss: may be NaN or infinite.
            spike: how many times the usual change from step to step makes a spike; 0: only what is not finite is one.
        """
        last, self._step = self._last[step == self._step], step
        if not math.isfinite(loss):
            return f"The loss of step {step} is {loss}."
        why = _spike(list(last), step, loss, spike) if spike and len(last) >= ENOUGH else None
        last.append(loss)
        return why


def _spike(last: list[float], step: int, loss: float, spike: float) -> str | None:
    """Against the median of the latest losses, and the median change between neighbours: a trend widens neither."""
    if loss <= max(last[-ENOUGH:]):
        return None
    usual = median(last[-ENOUGH:])
    change = 1.4826 * median(abs(b - a) for a, b in pairwise(last))
    lone = loss - usual > LONE * (max(last) - usual)
    if loss - usual <= max(spike * change * (2 / 3 if lone else 1), RISE * abs(usual)):
        return None
    above = f", {(loss - usual) / change:.0f} times the usual change from step to step above it" if change else ""
    return f"The loss of step {step} is {loss:.6g}, where {usual:.6g} is usual{above}."


class _Kept(NamedTuple):
    step: int
    layer: str
    role: str
    tensor: Tensor


class Ring:
    """Tensors of the last sampled steps, copied to the host, that a trigger saves: what preceded it.

    Holds ``RING_BYTES`` at most: the oldest go first, and a tensor larger than a quarter of it is not held.
    """

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque()
        self._bytes = 0
        self._wanted = Dumps()

    def open(self, requests: tuple[str, ...]) -> None:
        """A sampled step begins; ``layer:tensor`` globs of what is kept of it."""
        self._wanted = Dumps(requests)

    def keep(self, step: int, layer: str, role: str, tensor: Tensor) -> None:
        """Keep a copy, if this is a tensor that is wanted."""
        size = tensor.numel() * tensor.element_size()
        if not self._wanted or size > RING_BYTES // 4 or not self._wanted.take(layer, role):
            return
        self._kept.append(_Kept(step, layer, role, tensor.detach().to("cpu", copy=True)))
        self._bytes += size
        while self._bytes > RING_BYTES:
            gone = self._kept.popleft().tensor
            self._bytes -= gone.numel() * gone.element_size()

    def save(self, writer: RunWriter) -> None:
        """Save all of it as dumps of the steps it is of, and hold nothing."""
        kept, self._kept, self._bytes = self._kept, deque(), 0
        for one in kept:
            writer.dump(one.step, one.layer, {one.role: one.tensor})
