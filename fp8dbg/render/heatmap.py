"""Layer x step heat maps: one colour scale per meaning, the same in every run, so that two pages compare by eye."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp8dbg.render.figures import Chart, canvas


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one heat map shows.

    Attributes:
        column: the figure.
        title: its name on the page.
        note: what a cell says, in one sentence.
        of: "tensor" or "gemm", what its rows belong to.
        scale: colour scale, a name of ``palette``.
        low, high: values at the ends of the colour scale; what lies outside takes the end's colour.
        log: whether colours follow the logarithm.
        digits: format of a value, as d3 writes it.
        worst: "high", or "scale": of two scales the one too large is worse, eight times. How cells and rows are ranked.
    """

    column: str
    title: str
    note: str
    of: str
    scale: str
    low: float
    high: float
    log: bool
    digits: str
    worst: str = "high"


MEANINGS = (
    Meaning(
        column="underflow_ratio",
        title="Underflow ratio",
        note="Share of the non-zero elements that the cast turns into zero.",
        of="tensor",
        scale="--scale-lost",
        low=1e-4,
        high=1.0,
        log=True,
        digits=".3~%",
    ),
    Meaning(
        column="saturated_ratio",
        title="Saturated ratio",
        note="Share of the elements that the cast clips to the format's maximum.",
        of="tensor",
        scale="--scale-clipped",
        low=1e-6,
        high=1.0,
        log=True,
        digits=".3~%",
    ),
    Meaning(
        column="scale_delta",
        title="Scale in force over scale wanted (log2)",
        note="Above 0 the scale is too large and values clip; below 0 only the smallest values are lost.",
        of="tensor",
        scale="--scale-delta",
        low=-6.0,
        high=6.0,
        log=False,
        digits="+.2f",
        worst="scale",
    ),
    Meaning(
        column="excess_db",
        title="Noise above the format's floor (dB)",
        note="SQNR lost against healthy Gaussian data in the same format; 0 is as good as the format can be.",
        of="tensor",
        scale="--scale-error",
        low=0.0,
        high=30.0,
        log=False,
        digits="+.1f",
    ),
    Meaning(
        column="peak_to_median",
        title="Outliers: amax over median",
        note="Largest absolute value over the median absolute value.",
        of="tensor",
        scale="--scale-outlier",
        low=5.0,
        high=1e5,
        log=True,
        digits=".3~g",
    ),
    Meaning(
        column="nonfinite_ratio",
        title="NaN and Inf ratio",
        note="Share of the elements that are NaN or infinite.",
        of="tensor",
        scale="--scale-broken",
        low=1e-6,
        high=1.0,
        log=True,
        digits=".3~%",
    ),
    Meaning(
        column="excess_db",
        title="GEMM error above the floor (dB)",
        note="Error of the GEMM's output against healthy operands in the same formats; 6 dB is twice the error.",
        of="gemm",
        scale="--scale-error",
        low=0.0,
        high=30.0,
        log=False,
        digits="+.1f",
    ),
    Meaning(
        column="sensitivity",
        title="GEMM harm: sensitivity (loss²)",
        note="How strongly the loss feels this GEMM's error, in Fisher form; measured on fprop.",
        of="gemm",
        scale="--scale-lost",
        low=1e-10,
        high=1e-2,
        log=True,
        digits=".2~e",
    ),
)


def catalogue() -> list[dict[str, Any]]:
    """The meanings as plain data, for the page."""
    return [asdict(meaning) for meaning in MEANINGS]


def coloured(meaning: Meaning, value: float | None) -> float | None:
    """Where a value lies on the colour axis; None for a missing one. The page does the same (heatmap.js)."""
    if value is None or value != value:
        return None
    bounded = min(max(value, meaning.low), meaning.high)
    return math.log10(bounded) if meaning.log else bounded


def heat_map(
    meaning: Meaning, rows: Sequence[str] = (), steps: Sequence[str] = (), values: Sequence[Sequence[float | None]] = ()
) -> Chart:
    """One heat map.

    Args:
        meaning: what it shows.
        rows: a label for each layer, top first.
        steps: a label for each column: a step, or "120-160" where a cell is the worst of several.
        values: the figure, by row and column; None where there is none.
    """
    trace = {
        "type": "heatmap",
        "z": [[coloured(meaning, value) for value in row] for row in values],
        "customdata": [list(row) for row in values],
        "x": list(range(len(steps))),
        "y": list(range(len(rows))),
        "hoverongaps": False,
        "colorscale": meaning.scale,
        "zmin": coloured(meaning, meaning.low),
        "zmax": coloured(meaning, meaning.high),
        "colorbar": _colour_bar(meaning),
        "hovertemplate": f"%{{customdata:{meaning.digits}}}<extra></extra>",
    }
    axis: Chart = {"showgrid": False, "zeroline": False, "fixedrange": True, "ticks": "outside", "tickcolor": "--line"}
    layout = {
        "margin": {"l": 210, "r": 10, "t": 10, "b": 38},
        "height": 60 + 18 * len(rows),
        "xaxis": axis | _labels(steps, 10) | {"title": {"text": "step", "standoff": 4}},
        "yaxis": axis | _labels(rows, 60) | {"autorange": "reversed"},
        **canvas(),
        "plot_bgcolor": "--void",
    }
    return {"data": [trace], "layout": layout}


def _labels(names: Sequence[str], most: int) -> Chart:
    """Tick labels for positions 0, 1, ...: every so many of them, so that at most ``most`` are written."""
    shown = range(0, len(names), max(1, math.ceil(len(names) / most)))
    return {"tickmode": "array", "tickvals": list(shown), "ticktext": [names[i] for i in shown]}


def _colour_bar(meaning: Meaning) -> Chart:
    low, high = (coloured(meaning, end) for end in (meaning.low, meaning.high))
    bar: Chart = {"thickness": 10, "len": 1.0, "outlinewidth": 0, "ticks": "outside", "tickcolor": "--line", "xpad": 6}
    if not meaning.log or low is None or high is None:
        return bar | {"nticks": 6}
    decades = range(math.ceil(low), math.floor(high) + 1, 2 if high - low > 4 else 1)
    percent = meaning.digits.endswith("%")
    text = [f"{100 * 10.0**d:g} %" if percent else f"{10.0**d:g}" for d in decades]
    return bar | {"tickvals": list(decades), "ticktext": text}
