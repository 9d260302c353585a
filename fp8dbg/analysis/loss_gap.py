"""The loss of two runs, step by step: the gap, its noise, where it opens, whether it still grows, who learned.

Steps are paired, so that what both runs share (the fall of the loss, a shared batch) cancels. The noise of the gap is
taken from its changes from step to step (1.4826 x MAD / sqrt 2), which neither a level nor a slow drift inflates. It is
widened where the means of windows scatter more than independent steps would: batches, and so losses, are correlated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

FEWEST = 20
"""Common steps with a loss below which nothing is said of it."""

WINDOW = 5
"""Steps that one mean of the gap is taken over, at least."""

SIGMAS, TAIL_SIGMAS = 6.0, 4.0
"""Standard errors that a window's gap, and the tail's slope, must exceed; and the tail's gap: there is one tail."""

MATERIAL_OPENING, MATERIAL_TAIL = 0.06, 0.03
"""Shares of what was learned (the fall of the loss) below which a gap says nothing: two seeds of a recipe differ so."""

BLOCKS = 8
"""Windows from whose scatter a variance is still taken."""

LEARNED = 0.01
"""Share of its first loss by which a run's loss must fall, beyond its noise, to have learned anything."""


@dataclass(frozen=True)
class Opening:
    """Where the gap leaves its noise: the first step to do so in the first of two such windows, and by how much.

    ``gap`` is the window's mean; it and ``threshold`` are None where one run's loss was no longer known.
    """

    step: int
    gap: float | None
    threshold: float | None


@dataclass(frozen=True)
class LossGap:
    """What the losses say.

    Attributes:
        steps: common steps; gap: loss of B minus loss of A on each, None where either is missing.
        noise: standard deviation of the gap from one step to the next.
        inflation: by what factor the variance of means exceeds that of independent steps.
        tail_from: first step of the tail, the last third.
        tail_gap: mean gap over the tail.
        tail_band: the gap that noise and what is immaterial allow there.
        tail_slope: change of the gap per step over the tail; tail_slope_sigmas: the same in standard errors.
        opening: where the gap opens; None if it never does.
        learned: whether A and B each learned.
    """

    steps: list[int]
    gap: list[float | None]
    noise: float
    inflation: float
    tail_from: int
    tail_gap: float | None
    tail_band: float
    tail_slope: float
    tail_slope_sigmas: float
    opening: Opening | None
    learned: tuple[bool, bool]

    @property
    def differs(self) -> bool:
        """Whether the gap opens, or ends beyond its band."""
        return self.opening is not None or self.tail_gap is None or abs(self.tail_gap) > self.tail_band

    @property
    def drifts(self) -> bool:
        """Whether the gap still changes over the tail, by more than noise and by more than its band."""
        moved = abs(self.tail_slope) * (self.steps[-1] - self.tail_from)
        return abs(self.tail_slope_sigmas) > SIGMAS and moved > self.tail_band

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the gap of every step."""
        told = {name: value for name, value in asdict(self).items() if name not in ("steps", "gap")}
        return told | {"differs": self.differs, "drifts": self.drifts}


def has_learned(loss: Floats) -> bool:
    """Whether a loss ever fell: the lowest mean of a window below the first, by more than noise and ``LEARNED``.

    Args:
        loss: [steps]; NaN where it is not known.
    """
    known = loss[np.isfinite(loss)]
    if len(known) < FEWEST:
        return False
    first = float(np.median(known[:3]))
    means = _means(known, max(WINDOW, len(known) // 20))
    least = SIGMAS * _step_noise(known) / np.sqrt(3)
    return bool(first - np.min(means) > max(least, LEARNED * abs(first)))


def loss_gap(steps: Sequence[int], a: Floats, b: Floats, interval: int = 1) -> LossGap | None:
    """Compare two losses on their common steps.

    Args:
        steps: the common steps, ascending.
        a, b: the losses, [steps]; NaN where one is not known.
        interval: steps between sampled ones: the windows are as long.

    Returns:
        None where fewer than ``FEWEST`` steps have a loss in either run.
    """
    if min(np.isfinite(a).sum(), np.isfinite(b).sum()) < FEWEST:
        return None
    gap = b - a
    known = gap[np.isfinite(gap)]
    if len(known) < FEWEST:
        known = np.zeros(FEWEST)
    width = int(np.clip(interval, WINDOW, max(WINDOW, len(gap) // 8)))
    noise, inflation = _step_noise(known), _inflation(known, width)
    fallen = _fall(a, b)
    start = len(gap) - max(len(gap) // 3, WINDOW)
    tail = gap[start:]
    slope, sigmas = _slope(np.asarray(steps[start:], np.float64), tail, noise * np.sqrt(inflation))
    error = noise * np.sqrt(inflation / len(tail))
    return LossGap(
        steps=list(map(int, steps)),
        gap=[float(g) if np.isfinite(g) else None for g in gap],
        noise=noise,
        inflation=inflation,
        tail_from=int(steps[start]),
        tail_gap=float(tail.mean()) if np.isfinite(tail).all() else _one_missing(a[start:], b[start:], tail),
        tail_band=max(TAIL_SIGMAS * float(error), MATERIAL_TAIL * fallen),
        tail_slope=slope,
        tail_slope_sigmas=sigmas,
        opening=_opening(steps, a, b, width, noise * float(np.sqrt(inflation / width)), fallen),
        learned=(has_learned(a), has_learned(b)),
    )


def _one_missing(a: Floats, b: Floats, gap: Floats) -> float | None:
    """The mean of what is known; None where one run's loss went missing and the other's did not."""
    one_sided = np.isfinite(a) != np.isfinite(b)
    return None if one_sided.any() or not np.isfinite(gap).any() else float(np.nanmean(gap))


def _step_noise(values: Floats) -> float:
    changes = np.diff(values)
    return float(1.4826 / np.sqrt(2) * np.median(np.abs(changes - np.median(changes))))


def _means(values: Floats, width: int) -> Floats:
    whole = len(values) // width * width
    return np.asarray(values[:whole].reshape(-1, width).mean(axis=1))


def _inflation(gap: Floats, width: int) -> float:
    """How much more the means of windows scatter, from one to the next, than independent steps would let them.

    The widest of the windows that there are ``BLOCKS`` of counts: the longer steps remember, the longer they must be. A
    memory longer than a tenth of the run cannot be told from a difference by anything.
    """
    noise = _step_noise(gap)
    if noise == 0:
        return 1.0
    widths = [width << i for i in range(8) if len(gap) // (width << i) >= BLOCKS]
    return float(max([1.0, *(w * _step_noise(_means(gap, w)) ** 2 / noise**2 for w in widths)]))


def _fall(a: Floats, b: Floats) -> float:
    """What was learned: the larger fall of the two losses, from the first to the median of the last fifth."""
    falls = []
    for loss in (a, b):
        known = loss[np.isfinite(loss)]
        falls.append(float(np.median(known[:3]) - np.median(known[-max(1, len(known) // 5) :])))
    return max(0.0, *falls)


def _slope(steps: Floats, gap: Floats, noise: float) -> tuple[float, float]:
    """Least-squares slope of the gap over the steps, and the same in standard errors."""
    known = np.isfinite(gap)
    if known.sum() < WINDOW:
        return 0.0, 0.0
    x = steps[known] - steps[known].mean()
    spread = float((x * x).sum())
    slope = float((x * gap[known]).sum() / spread) if spread else 0.0
    error = noise / np.sqrt(spread) if spread else 0.0
    return slope, float(slope / error) if error else 0.0


def _opening(steps: Sequence[int], a: Floats, b: Floats, width: int, error: float, fallen: float) -> Opening | None:
    """The first of two windows in a row whose mean gap is beyond noise, what is immaterial, and a shift by one window.

    A loss that falls steeply makes a gap of a few steps' delay; where only one run's loss is known there is no noise.
    """
    one_sided = np.flatnonzero(np.isfinite(a) != np.isfinite(b))
    lost = int(one_sided[0]) if len(one_sided) else len(steps)
    means = np.array([_means(np.where(np.isfinite(loss), loss, np.nan)[:lost], width) for loss in (a, b)])
    shift = np.abs(np.array([np.gradient(m) if len(m) > 1 else 0 * m for m in means])).min(axis=0)
    gap = means[1] - means[0]
    threshold = np.maximum(max(SIGMAS * error, MATERIAL_OPENING * fallen), shift)
    sign = np.sign(gap) * (np.abs(gap) > threshold)
    for i in np.flatnonzero(sign):
        if i + 1 < len(sign) and sign[i] == sign[i + 1]:
            inside = np.flatnonzero((b - a)[i * width : (i + 1) * width] * sign[i] > threshold[i])
            return Opening(int(steps[i * width + inside[0]]), float(gap[i]), float(threshold[i]))
    return Opening(int(steps[lost]), None, None) if lost < len(steps) else None
