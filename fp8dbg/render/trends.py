"""Sparklines: how the figure of a finding went over the run, in eight characters or so."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from fp8dbg.analysis.finding import Finding
from fp8dbg.render.cube import Cube, make_cube
from fp8dbg.runs.folder import Folder

BARS = "▁▂▃▄▅▆▇█"
POINTS = 10
"""Characters of a sparkline."""
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

    Each character stands for the worst of its share of the sampled steps (of all steps for the scale); a space is a
    stretch without the figure.
    """
    placed = [f for f in findings[:MOST] if f.layer is not None and f.tensor is not None]
    if not placed:
        return ["" for _ in findings]
    layers = json.dumps(sorted({f.layer for f in placed if f.layer is not None}))
    sampled, every = (_cube(run, question, layers) for question in ("page_tensors", "page_amax"))
    return [_trend(sampled, every, finding) if finding in placed else "" for finding in findings]


def _cube(run: Folder, question: str, layers: str) -> Cube:
    return make_cube(run.answer(question, {"buckets": POINTS, "layers": layers}), POINTS)


def _trend(sampled: Cube, every: Cube, finding: Finding) -> str:
    named = (row.get("figure") for row in finding.evidence)
    column = next((name for name in named if name in sampled.columns), COLUMN_OF.get(finding.code, "rel_l2"))
    cube = every if column == "scale_delta" and column in every.columns else sampled
    row = cube.row(layer=finding.layer, tensor=finding.tensor)
    if row is None or column not in cube.columns:
        return ""
    values = [None if math.isnan(value) else value for value in cube.columns[column][row].tolist()]
    return sparkline([value if value is None else _badness(finding.code, column, value) for value in values])


def _badness(code: str, column: str, value: float) -> float:
    """How far a figure is from health: a scale that clips is too large, a stale one may be either."""
    if column == "norm_ratio":
        return abs(math.log2(max(value, 1e-37)))
    return max(0.0, value) if code == "saturation" else abs(value)


def sparkline(values: Sequence[float | None]) -> str:
    """Values from 0 up as block characters, the largest as the highest; None as a space; all equal as the lowest."""
    known = [v for v in values if v is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = high - low if high > low * 1.02 + 1e-12 else math.inf
    return "".join(" " if v is None else BARS[min(7, int(8 * (v - low) / span))] for v in values).rstrip()
