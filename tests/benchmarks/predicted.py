"""What was predicted of single GEMMs beside what they do to the loss: a table, and a drawing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8dbg.analysis.recommend import Recommendation
from tests.benchmarks.trials import TIMES_NOISE, Effect, Gemm, Trial


@dataclass(frozen=True)
class Prediction:
    """One GEMM of one trial: what was predicted of it, and what was measured.

    Attributes:
        trial: fault and model.
        gemm: which.
        in_plan: whether the plan keeps it in BF16.
        predicted: harm, in units of the loss; None where none was predicted or it could not be told.
        alone, among_bf16: measured (tests/benchmarks/trials.py).
    """

    trial: str
    gemm: Gemm
    in_plan: bool
    predicted: float | None
    alone: Effect
    among_bf16: Effect

    @property
    def matters(self) -> bool:
        """Whether either effect is beyond chance."""
        return self.alone.matters or self.among_bf16.matters

    @property
    def measured(self) -> Effect:
        """The larger effect."""
        return max(self.alone, self.among_bf16, key=lambda effect: effect.mean)

    @property
    def name(self) -> str:
        """Trial and GEMM."""
        return f"{self.trial}: {self.gemm[0]} {self.gemm[1]}"


def predictions(trial: Trial, found: Recommendation, plan: Collection[Gemm]) -> Iterator[Prediction]:
    """Every GEMM of a trial, in execution order."""
    harm = {(point.layer, point.gemm): point.harm for point in found.curve}
    name = f"{trial.fault.name} {trial.case.size} {trial.case.seed}"
    for gemm in trial.gemms:
        yield Prediction(name, gemm, gemm in plan, harm.get(gemm), *trial.surely(gemm))


def print_predictions(found: Sequence[Prediction]) -> float:
    """Print those that were predicted to harm, or do; returns the share of those that do which a plan has."""
    print(f"\n{'GEMM':58}{'plan':>5}{'predicted':>11}{'alone':>9}{'noise':>8}{'in BF16':>9}{'noise':>8}{'matters':>9}")
    for one in found:
        if one.matters or one.predicted or one.in_plan:
            effects = "".join(f"{e.mean:>9.4f}{e.noise:>8.4f}" for e in (one.alone, one.among_bf16))
            mark, matters = ("yes" if flag else "" for flag in (one.in_plan, one.matters))
            harm = "-" if one.predicted is None else f"{one.predicted:.4f}"
            print(f"{one.name:58}{mark:>5}{harm:>11}{effects}{matters:>9}")
    matter = [one for one in found if one.matters]
    recall = sum(one.in_plan for one in matter) / len(matter) if matter else 1.0
    print(
        f"of {len(found)} GEMMs {len(matter)} have an effect over {TIMES_NOISE:g} times its noise; "
        f"{100 * recall:.1f} % of those are in a plan"
    )
    return recall


def plot(found: Sequence[Prediction], path: Path) -> None:
    """Draw predicted against measured, both on a logarithmic axis; what lies outside of one lies on its edge.

    Args:
        found: GEMMs of any number of trials.
        path: .html, or a picture (.png, .svg, .pdf), for which plotly needs kaleido and a Chromium.
    """
    import plotly.graph_objects as go

    figure = go.Figure([_equal(), *(_group(found, *group) for group in _GROUPS)], _layout())
    if path.suffix == ".html":
        figure.write_html(path, include_plotlyjs=True)
    else:
        figure.write_image(path, width=1040, height=620, scale=2)


LEAST, MOST = 1e-5, 10.0
"""Range of both axes, in units of the loss."""

_GROUPS = (
    ("within chance", "#b8bec8", lambda one: not one.matters and not one.in_plan),
    ("in a plan, within chance", "#8ab4f8", lambda one: not one.matters and one.in_plan),
    ("beyond chance, in a plan", "#1a56c4", lambda one: one.matters and one.in_plan),
    ("beyond chance, in no plan", "#c5221f", lambda one: one.matters and not one.in_plan),
)
"""Name, colour, and which GEMMs; the last is drawn on top."""


def _group(found: Sequence[Prediction], name: str, colour: str, belongs: Callable[[Prediction], bool]) -> Any:
    import plotly.graph_objects as go

    part = [one for one in found if belongs(one)]
    beyond = any(one.matters for one in part)
    return go.Scatter(
        x=[_within(one.predicted or 0.0) for one in part],
        y=[_within(one.measured.mean) for one in part],
        error_y={"array": [one.measured.noise for one in part], "thickness": 1, "width": 3, "visible": beyond},
        customdata=[[one.name, one.predicted or 0.0, one.measured.mean, one.measured.noise] for one in part],
        hovertemplate="%{customdata[0]}<br>predicted %{customdata[1]:.2g}<br>"
        "measured %{customdata[2]:.2g} ± %{customdata[3]:.2g}<extra></extra>",
        mode="markers",
        marker={"color": colour, "size": 9 if beyond else 6, "line": {"color": "white", "width": 0.5}},
        name=f"{name} ({len(part)})",
    )


def _within(value: float) -> float:
    return min(max(value, LEAST), MOST)


def _equal() -> Any:
    import plotly.graph_objects as go

    line = {"color": "#8a919c", "width": 1, "dash": "dot"}
    return go.Scatter(x=[LEAST, MOST], y=[LEAST, MOST], mode="lines", line=line, name="predicted = measured")


def _layout() -> dict[str, Any]:
    powers = range(round(math.log10(LEAST)), round(math.log10(MOST)) + 1)
    names = [f"{10.0**power:g}" for power in powers]
    axis = {
        "type": "log",
        "range": [powers[0] - 0.2, powers[-1]],
        "tickvals": [10.0**power for power in powers],
        "ticktext": ["none", *names[1:]],
        "gridcolor": "#e6e9ee",
        "zeroline": False,
    }
    return {
        "template": "none",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "title": {"text": "What a single GEMM in FP8 does to the loss: predicted and measured", "x": 0.02},
        "xaxis": axis | {"title": {"text": "predicted harm (a rank, in units of the loss)"}},
        "yaxis": axis | {"title": {"text": "measured effect on the loss, ± its noise", "standoff": 8}},
        "legend": {"x": 1.02, "y": 1.0},
        "margin": {"l": 90, "r": 20, "t": 50, "b": 60},
    }
