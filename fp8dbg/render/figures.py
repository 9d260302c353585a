"""The charts, as plotly figures: every look is decided here once, for the page and for pictures.

A chart is a plain plotly figure dict whose traces say in ``meta`` which column fills which axis. ``draw`` fills one
from columns; the page fills the same dict in the browser (page_charts.js), for whatever tensor the reader picks.
Colours are names of ``palette``; ``palette.painted`` turns them into a theme's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fp8dbg.numerics.formats import Format

Chart = dict[str, Any]
Columns = Mapping[str, Sequence[Any]]

SMALLEST_RATIO = 1e-6
"""Ratios are drawn on a log axis down to here; 0 lies on the axis itself and is labelled so."""


MOST_MARKED = 100
"""Points of a line that each have a marker; more would hide the line, and its dashes."""


def draw(chart: Chart, columns: Columns) -> Chart:
    """A copy of the chart filled from columns, each of one value per step; None is a gap, and so is
    what a logarithmic axis cannot hold.

    A trace whose column is missing is left out. Steps are in ``step``, or where the trace's meta says.
    """
    log = chart["layout"]["yaxis"]["type"] == "log"
    traces = [_filled(trace, columns, log) for trace in chart["data"] if _wanted(trace["meta"], columns)]
    return {"data": traces, "layout": _with_ticks(chart["layout"], [trace["y"] for trace in traces])}


def _wanted(meta: Chart, columns: Columns) -> bool:
    values = columns.get(meta["y"], ())
    return any(v is not None and v > 0 for v in values) if meta.get("optional") else meta["y"] in columns


def _with_ticks(layout: Chart, drawn: Sequence[Sequence[float | None]]) -> Chart:
    """The layout, with ticks for the values drawn where its y axis is logarithmic and has none of its own."""
    positive = [v for values in drawn for v in values if v is not None and v > 0]
    if layout["yaxis"]["type"] != "log" or "tickvals" in layout["yaxis"] or not positive:
        return layout
    values = log_ticks(min(positive), max(positive))
    if not values:
        return layout
    ticks = {"tickvals": values, "ticktext": [power_text(value) for value in values]}
    return {**layout, "yaxis": layout["yaxis"] | ticks}


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis for values from ``low`` to ``high``, both above 0: powers of ten, at most about 6.

    Over less than two decades multiples of them too; none below a factor of 2.5, where plotly's own do better.
    """
    span = math.log10(high / low)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 5))
    digits = () if span < 0.4 else (1, 1.5, 2, 3, 5, 7) if span < 1 else (1, 2, 5) if span < 2 else (1,)
    ticks = [float(f"{digit}e{power}") for power in range(first, last + 1, every) for digit in digits]
    return [tick for tick in ticks if low / 2 <= tick <= 2 * high]


def power_text(value: float) -> str:
    """A tick's label: plain digits from 0.001 to 9999, else 10⁶ or 2·10⁶."""
    if 1e-3 <= value < 1e4:
        return f"{value:g}"
    digits, exponent = f"{value:.0e}".split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if digits == "1" else f"{digits}·{power}"


def _filled(trace: Chart, columns: Columns, log: bool) -> Chart:
    meta = trace["meta"]
    values = list(columns[meta["y"]])
    mode = "lines" if len(values) > MOST_MARKED else trace["mode"]
    floor = meta.get("floor", -math.inf)
    held = [None if v is None or v != v else max(v, floor) for v in values]
    drawn = [v if v is None or v > 0 or not log else None for v in held]
    return {**trace, "x": list(columns[meta.get("x", "step")]), "y": drawn, "customdata": values, "mode": mode}


def line(
    column: str, name: str, colour: str, *, digits: str = ".3~g", dash: str = "solid", floor: float = 0.0
) -> Chart:
    """One column over the steps. A ``floor`` above 0 is where smaller values are drawn; hover tells the truth."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "meta": {"y": column} | ({"floor": floor} if floor else {}),
        "line": {"color": colour, "width": 1.5, "dash": dash},
        "marker": {"size": 3, "color": colour},
        "hovertemplate": f"%{{customdata:{digits}}}",
    }


def layout(unit: str, *, log: bool = False, height: int = 210, **extra: Any) -> Chart:
    """Layout that all line charts share: step along x, one unit along y."""
    return {
        "height": height,
        "margin": {"l": 56, "r": 10, "t": 26, "b": 34},
        "hovermode": "x unified",
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "font": {"size": 11}},
        "xaxis": _axis(title={"text": "step", "standoff": 4}, tickformat="d"),
        "yaxis": _axis(title={"text": unit, "standoff": 4}, type="log" if log else "linear"),
        **canvas(),
        **extra,
    }


def canvas() -> Chart:
    """Background, type and hover label that all charts share."""
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 11, "color": "--muted", "family": "system-ui, sans-serif"},
        "hoverlabel": {"bgcolor": "--panel", "bordercolor": "--line", "font": {"color": "--ink", "size": 12}},
    }


def _axis(**extra: Any) -> Chart:
    plain = {"gridcolor": "--grid", "linecolor": "--line", "automargin": False}
    return {**plain, "fixedrange": True, "showline": True, "zeroline": False, "nticks": 6, **extra}


def lost_values() -> Chart:
    """What the cast loses: underflow, saturation and values at the maximum, as ratios."""
    ratio = {"digits": ".3~%", "floor": SMALLEST_RATIO}
    traces = [
        line("underflow_ratio", "underflow", "--orange", **ratio),  # type: ignore[arg-type]
        line("saturated_ratio", "saturated", "--purple", **ratio),  # type: ignore[arg-type]
        line("zero_ratio", "already zero", "--grey", dash="dot", **ratio),  # type: ignore[arg-type]
    ]
    traces[2]["meta"]["optional"] = True  # drawn where the tensor has zeros at all
    chart: Chart = {"data": traces, "layout": layout("ratio", log=True)}
    chart["layout"]["yaxis"] |= {
        "range": [-6.15, 0.15],
        "tickvals": [1e-6, 1e-4, 1e-2, 1],
        "ticktext": ["0", "0.01 %", "1 %", "100 %"],
    }
    return chart


def scales() -> Chart:
    """Scale in force against the scale current scaling would choose; block scales as their smallest and largest."""
    traces = [
        line("scale", "in force", "--blue"),
        line("scale_current", "wanted", "--orange", dash="dash"),
        line("scale_min", "smallest block scale", "--blue", dash="dot"),
        line("scale_max", "largest block scale", "--blue"),
    ]
    return {"data": traces, "layout": layout("scale", log=True)}


def noise() -> Chart:
    """Signal over quantisation noise, with the floor of the format as healthy Gaussian data have it."""
    traces = [
        line("sqnr_db", "SQNR", "--blue", digits=".1f"),
        line("floor_db", "healthy", "--grey", digits=".1f", dash="dot"),
    ]
    return {"data": traces, "layout": layout("dB")}


def magnitudes() -> Chart:
    """How large the values are: amax, rms and the smallest non-zero one."""
    names = [("amax", "amax", "--orange"), ("rms", "rms", "--blue"), ("amin", "amin", "--grey")]
    every = line("amax_every", "amax, every step", "--orange")
    every |= {"mode": "lines", "meta": {"y": "amax_every", "x": "every_step"}, "opacity": 0.5}
    return {"data": [*(line(*name) for name in names), every], "layout": layout("absolute value", log=True)}


def outliers() -> Chart:
    """The outlier measures, which move before the loss does."""
    traces = [
        line("peak_to_median", "amax / median", "--green"),
        line("kurtosis", "kurtosis (Gaussian: 3)", "--blue"),
    ]
    return {"data": traces, "layout": layout("ratio", log=True)}


def gain() -> Chart:
    """Gain and bias of the cast: 1 and 0 in health."""
    return {"data": [line("norm_ratio", "norm ratio", "--blue", digits=".4f")], "layout": layout("ratio")}


def not_finite() -> Chart:
    """Share of elements that are NaN or infinite."""
    trace = line("nonfinite_ratio", "NaN or Inf", "--purple", digits=".3~%", floor=SMALLEST_RATIO)
    chart: Chart = {"data": [trace], "layout": layout("ratio", log=True)}
    chart["layout"]["yaxis"] |= lost_values()["layout"]["yaxis"]
    return chart


def blame(gemm: str, operands: tuple[str, str]) -> Chart:
    """Error of one GEMM, split: either operand alone in FP8, and what neither explains."""
    traces = [
        line("rel_l2", gemm, "--ink"),
        line("error_from_a", operands[0], "--blue", dash="dash"),
        line("error_from_b", operands[1], "--orange", dash="dash"),
        line("error_unexplained", "unexplained", "--purple"),
        line("floor", "healthy", "--grey", dash="dot"),
    ]
    return {"data": traces, "layout": layout("rel_l2", log=True)}


def histogram() -> Chart:
    """Counts per binade of the absolute value, to be shaded by ``representable``."""
    bars = {
        "type": "bar",
        "name": "elements",
        "meta": {"y": "share"},
        "marker": {"color": "--blue"},
        "width": 0.9,
        "hovertemplate": "2^%{x}: %{customdata:.3~%}<extra></extra>",
    }
    chart: Chart = {
        "data": [bars],
        "layout": layout("share of non-zero elements", showlegend=False, height=230, bargap=0.1),
    }
    chart["layout"]["hovermode"] = "closest"
    chart["layout"]["xaxis"] |= {"title": {"text": "log2 of the absolute value", "standoff": 4}, "tickformat": None}
    chart["layout"]["yaxis"] |= {"tickformat": ".0%", "rangemode": "tozero"}
    return chart


def representable(fmt: Format, scale_low: float, scale_high: float | None = None) -> dict[str, float]:
    """Where the format's range lies for values that are multiplied by the scale before the cast, in log2 of the value.

    Args:
        fmt: the number format.
        scale_low: the scale in force, or the smallest block scale; finite and above 0.
        scale_high: the largest block scale; None where one scale serves all.

    Returns:
        ``underflow``: values below become 0 whatever their block (half the smallest subnormal, a tie, still does).
        ``subnormal``: values below have fewer bits. ``saturated``: values above clip whatever their block.
    """
    low, high = math.log2(scale_low), math.log2(scale_high or scale_low)
    return {
        "underflow": math.log2(fmt.smallest_subnormal / 2) - high,
        "subnormal": math.log2(fmt.smallest_normal) - high,
        "saturated": math.log2(fmt.boundary) - low,
    }
