"""Loss spikes by a robust score, and which figures of which layers moved first."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8dbg.analysis.evidence import Evidence, Row

FloatArray = npt.NDArray[np.float64]

WINDOW = 50
"""Steps before a step that its usual loss and the usual change from step to step are taken from."""

ENOUGH = 10
"""Steps with a loss that there must be in the window."""

SCORE = 15.0
"""Robust standard deviations that make a spike: Gaussian noise reaches 5.5 in 60,000 steps, small text batches 14."""

LONE = 4.0
"""``LONE_SCORE`` is enough for a loss that rises this many times as far as any other in the window. Hard batches of
healthy training on text rise up to 2.9 times as far (36 runs of 400 steps of 32 to 1,024 tokens)."""

LONE_SCORE = SCORE * 2 / 3
"""Heavy-tailed noise (exponential, lognormal, Student of 4 degrees) has up to 12 spikes in 100,000 steps by both, 10 by
``SCORE`` alone."""

RISE = 0.05
"""And the share of the usual loss by which it must rise: a loss without noise has no spikes of a hair's width."""

AT_MOST = 20
"""Spikes whose first movers are looked up: the worst ones."""


@dataclass(frozen=True)
class Spike:
    """One loss spike.

    Attributes:
        step: its first step.
        loss: the loss at its worst step; None where it was not finite.
        score: robust standard deviations above the usual loss; None where the loss was not finite.
        last_step: last step of the stretch that stayed above.
        first_movers: rows of reports/first_movers.sql: which figures left their usual range at or before the spike,
            by step, forward before backward, and in execution order; empty if none did. Figures of casts are among
            them only where the cast took place: one that is merely compared with moves no loss.
    """

    step: int
    loss: float | None
    score: float | None
    last_step: int
    first_movers: list[Row] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def first_move(self, shown: Callable[[str], str] = str) -> str:
        """What moved first, as a sentence without its full stop; ``shown`` makes a layer's name fit to show.

        What moved on one step is told apart by the order in which layers run alone, so the sentence says so.
        """
        if not self.first_movers:
            return f"no figure of any layer moved before step {self.step}: look at the data first"
        first = self.first_movers[0]
        what = f"{first['figure']} of {shown(str(first['layer']))} {first['tensor']}"
        where = (first["layer"], first["tensor"])
        together = (m for m in self.first_movers if m["first_step"] == first["first_step"])
        if all((m["layer"], m["tensor"]) == where for m in together):
            return f"{what} moved first, on step {first['first_step']}"
        return f"{what} moved first in execution order of all that moved on step {first['first_step']}"


def worst_of(spikes: Iterable[Spike]) -> Spike:
    """The spike with the highest score; one without a finite loss before all others."""
    return max(spikes, key=lambda spike: math.inf if spike.score is None else spike.score)


def find_spikes(evidence: Evidence) -> list[Spike]:
    """Spikes of the run's loss in order of step; a loss that is NULL between recorded ones, or from then on, is one."""
    rows = evidence.ask("losses")
    loss = np.array([np.nan if r["loss"] is None else r["loss"] for r in rows], dtype=np.float64)
    steps = [int(r["step"]) for r in rows]
    if np.isfinite(loss).sum() == 0:
        return []  # the loss was never logged: there is nothing to judge
    scores = robust_scores(loss)
    spikes = [_spike(steps, loss, scores, first, last) for first, last in stretches(loss, scores)]
    worst = sorted(spikes, key=lambda s: -(s.score if s.score is not None else np.inf))[:AT_MOST]
    return [replace(s, first_movers=_first_movers(evidence, s.step)) if s in worst else s for s in spikes]


def robust_scores(loss: FloatArray) -> FloatArray:
    """For each step, how many robust standard deviations its loss is above the median of the steps before it.

    The deviation is that of the changes from step to step (1.4826 x MAD / sqrt 2), which a falling loss does not
    inflate. NaN where the loss is, or where too few steps came before; 0 where the rise is below ``RISE``.

    Args:
        loss: [steps]; NaN where it is not known.
    """
    padded = np.concatenate([np.full(WINDOW, np.nan), loss])
    before = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[:-1]
    enough = np.isfinite(before).sum(axis=1) >= ENOUGH
    scores = np.full(loss.shape, np.nan)
    for rows in np.array_split(np.flatnonzero(enough & np.isfinite(loss)), max(1, len(loss) // 50_000)):
        recent = before[rows, -ENOUGH:]
        known = np.where(np.isfinite(recent).any(axis=1), np.nanmedian(recent, axis=1), np.nan)
        change = np.diff(before[rows], axis=1)
        middle = np.nanmedian(change, axis=1, keepdims=True)
        spread = 1.4826 / np.sqrt(2) * np.nanmedian(np.abs(change - middle), axis=1)
        rise = loss[rows] - known
        scores[rows] = np.where(rise > RISE * np.abs(known), rise / np.maximum(spread, 1e-12), 0.0)
    return scores


def stretches(loss: FloatArray, scores: FloatArray) -> list[tuple[int, int]]:
    """First and last index of each stretch of spiking steps; steps before the first loss are no spike.

    Args:
        loss: [steps]; NaN where it is not known.
        scores: its ``robust_scores``.
    """
    lost = np.isnan(loss)
    lost[: int(np.flatnonzero(~lost)[0])] = False
    high = scores > SCORE
    for index in np.flatnonzero((scores > LONE_SCORE) & ~high):
        before = loss[max(0, index - WINDOW) : index]
        usual = np.nanmedian(before[-ENOUGH:])
        high[index] = loss[index] - usual > LONE * (np.nanmax(before) - usual)
    out = np.flatnonzero(high | lost)
    parts = np.split(out, np.flatnonzero(np.diff(out) > 1) + 1) if len(out) else []
    return [(int(p[0]), int(p[-1])) for p in parts]


def _spike(steps: list[int], loss: FloatArray, scores: FloatArray, first: int, last: int) -> Spike:
    inside = slice(first, last + 1)
    if np.isnan(loss[inside]).any():
        return Spike(steps[first], None, None, steps[last])
    worst = first + int(np.argmax(scores[inside]))
    return Spike(steps[first], float(loss[worst]), float(scores[worst]), steps[last])


def _first_movers(evidence: Evidence, step: int) -> list[Row]:
    """Figures that moved in the sampling interval before a step, against the twenty intervals before it."""
    interval = evidence.interval
    since = max(step - max(interval, 5), (evidence.run["first_step"] or 0) + 1)
    window = max(0, since - 20 * interval)
    layers = json.dumps([name for name in evidence.layer_order if _storable(name)])
    return evidence.ask("first_movers", step=step, since=since, healthy_from=window, at_most=20, layers=layers)


def _storable(name: str) -> bool:
    """Whether a row can be about it: a name with lone surrogates is no text that a file could hold."""
    return not any("\ud800" <= character <= "\udfff" for character in name)
