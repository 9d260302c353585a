"""Sparklines: how the figure of a finding went over the run, in eight characters or so."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fp8dbg.analysis.finding import Finding
from fp8dbg.render.cube import Cube, make_cube
from fp8dbg.runs.folder import Folder
from fp8dbg.runs.queries import ask

BARS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "!"
"""Character for a stretch in which the tensor held a NaN or an Inf."""
POINTS = 10
"""Characters of a sparkline: equal stretches of steps."""
FINEST = 1000
"""Values that a sparkline is made of, at most."""
MOST = 30
"""Findings that get one."""

COLUMN_OF = {
    "underflow": "underflow_ratio",
    "wrong_format": "underflow_ratio",
    "outlier": "underflow_ratio",
    "saturation": "scale_delta",
    "stale_scale": "scale_delta",
    "frozen_scale": "scale_delta",
    "non_finite": "nonfinite_ratio",
    "dead_tensor": "zero_ratio",
    "gain_error": "norm_ratio",
    "rank_disagreement": "scale_delta",
}
"""The figure that shows a verdict; rel_l2 for every other. A figure that the evidence names goes before it."""


def trends(run: Folder, findings: Sequence[Finding]) -> list[str]:
    """For each finding the sparkline of its figure, or "" where it is about no tensor.

    Each character stands for the worst of a tenth of the run, by step; a space is a stretch without the figure, and
    ``NOT_FINITE`` one with a NaN or an Inf.
    """
    placed = [f for f in findings[:MOST] if f.layer is not None and f.tensor is not None]
    if not placed:
        return ["" for _ in findings]
    layers = json.dumps(sorted({f.layer for f in placed if f.layer is not None}))
    sampled = _series(run, "page_tensors", "page_buckets", layers)
    every = _series(run, "page_amax", "page_steps_seen", layers)
    return [_trend(sampled, every, finding) if finding in placed else "" for finding in findings]


@dataclass(frozen=True, slots=True)
class _Series:
    """Figures of tensors, and the first step of each of their values."""

    cube: Cube
    steps: list[int]


def _series(run: Folder, question: str, buckets: str, layers: str) -> _Series:
    steps = [row["first_step"] for row in ask(run, buckets, buckets=FINEST)]
    return _Series(make_cube(run.answer(question, {"buckets": FINEST, "layers": layers}), FINEST), steps)


def _trend(sampled: _Series, every: _Series, finding: Finding) -> str:
    named = (row.get("figure") for row in finding.evidence)
    column = next((name for name in named if name in sampled.cube.columns), COLUMN_OF.get(finding.code, "rel_l2"))
    series = every if column == "scale_delta" and column in every.cube.columns else sampled
    row = series.cube.row(layer=finding.layer, tensor=finding.tensor)
    if row is None or column not in series.cube.columns:
        return ""
    values = series.cube.columns[column][row].tolist()
    bad = [None if math.isnan(value) else _badness(finding.code, column, value) for value in values]
    first = min([*sampled.steps[:1], *every.steps[:1]])
    last = max([*sampled.steps[-1:], *every.steps[-1:]])
    worst = by_step(series.steps, bad, first, last)
    return sparkline(
        [math.nan if at in _not_finite(sampled, finding, first, last) else v for at, v in enumerate(worst)]
    )


def _not_finite(sampled: _Series, finding: Finding, first: int, last: int) -> set[int]:
    """The stretches in which the finding's tensor held a NaN or an Inf."""
    row = sampled.cube.row(layer=finding.layer, tensor=finding.tensor)
    column = sampled.cube.columns.get("nonfinite_ratio")
    if row is None or column is None:
        return set()
    counted = by_step(sampled.steps, column[row].tolist(), first, last)
    return {at for at, value in enumerate(counted) if value}


def by_step(steps: Sequence[int], values: Sequence[float | None], first: int, last: int) -> list[float | None]:
    """The largest value in each of ``POINTS`` equal stretches of the steps from ``first`` to ``last``.

    Args:
        steps, values: a value, or None, for each of these steps; values beyond the last step are left out.
    """
    worst: list[float | None] = [None] * min(POINTS, last - first + 1)
    for step, value in zip(steps, values, strict=False):
        at = (step - first) * len(worst) // (last - first + 1)
        if value is not None and not math.isnan(value) and 0 <= at < len(worst):
            worst[at] = max(value, worst[at] or 0.0)
    return worst


def _badness(code: str, column: str, value: float) -> float:
    """How far a figure is from health: a scale that clips is too large, a stale one may be either."""
    if column == "norm_ratio":
        return abs(math.log2(max(value, 1e-37)))
    return max(0.0, value) if code == "saturation" else abs(value)


def sparkline(values: Sequence[float | None]) -> str:
    """Values from 0 up as block characters, the largest as the highest; all equal as the lowest.

    None is a space, NaN is ``NOT_FINITE``.
    """
    known = [v for v in values if v is not None and not math.isnan(v)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = high - low if high > low * 1.02 + 1e-12 else math.inf
    return "".join(_character(v, low, span) for v in values).rstrip()


def _character(value: float | None, low: float, span: float) -> str:
    if value is None:
        return " "
    return NOT_FINITE if math.isnan(value) else BARS[min(7, int(8 * (value - low) / span))]
