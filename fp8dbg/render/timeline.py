"""The timeline: loss and gradient norm with spikes, onsets of findings, sampled steps and gaps marked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fp8dbg.render.figures import Chart, layout

MOST_ONSETS = 12


@dataclass(frozen=True, slots=True)
class Marks:
    """What is marked on the timeline.

    Attributes:
        onsets: (step, number of the finding on the page).
        spikes: steps of loss spikes.
        sampled: (first step, last step) of each stretch of the page's charts.
        gaps: steps on which something was not seen.
        triggers: steps on which something made the run measure in full.
    """

    onsets: Sequence[tuple[int, int]] = ()
    spikes: Sequence[int] = ()
    sampled: Sequence[tuple[int, int]] = ()
    gaps: Sequence[int] = ()
    triggers: Sequence[int] = ()


def timeline(rows: Sequence[dict[str, Any]], marks: Marks) -> Chart:
    """Loss over the steps, the gradient norm below it where there is one, and a strip of sampled steps.

    Args:
        rows: answers of the question ``page_steps``.
        marks: what is marked.
    """
    with_norm = any(row["grad_norm"] is not None for row in rows)
    loss_at = {row["step"]: row["loss"] for row in rows}
    data = [_line(rows, "loss", "--ink", "y"), _spikes(loss_at, marks.spikes), _sampled(marks.sampled)]
    if with_norm:
        data.append(_line(rows, "grad_norm", "--green", "y2"))
    if marks.gaps:
        data.append(_ticks(marks.gaps, "not seen", "--act", "x-thin-open"))
    if marks.triggers:
        data.append(_ticks(marks.triggers, "trigger", "--purple", "diamond"))
    chart = layout("loss", height=330 if with_norm else 260)
    chart["margin"] |= {"t": 40}
    chart["legend"] |= {"y": 1.07}
    chart["yaxis"] |= {"domain": [0.42 if with_norm else 0.14, 1.0], "type": _axis_type(rows, "loss")}
    chart["yaxis2"] = chart["yaxis"] | {"domain": [0.13, 0.36], "title": {"text": "grad norm", "standoff": 4}}
    chart["yaxis2"] |= {"nticks": 3, "visible": with_norm, "type": _axis_type(rows, "grad_norm")}
    chart["yaxis3"] = {"domain": [0.0, 0.08], "visible": False, "fixedrange": True, "range": [-1, 1]}
    chart["xaxis"] |= {"anchor": "y3", "showline": False}
    chart["shapes"], chart["annotations"] = _onsets(marks.onsets, rows[-1]["step"] - rows[0]["step"] if rows else 0)
    return {"data": [trace for trace in data if len(trace["x"])], "layout": chart}


def _axis_type(rows: Sequence[dict[str, Any]], column: str) -> str:
    """Logarithmic where a linear axis would press everything but one spike onto its edge."""
    values = [row[column] for row in rows if row[column] is not None]
    wide = bool(values) and min(values) > 0 and max(values) > 50 * sorted(values)[len(values) // 2]
    return "log" if wide else "linear"


def _line(rows: Sequence[dict[str, Any]], column: str, colour: str, axis: str) -> Chart:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": column.replace("grad_norm", "gradient norm"),
        "x": [row["step"] for row in rows],
        "y": [row[column] for row in rows],
        "yaxis": axis,
        "line": {"color": colour, "width": 1.3},
        "hovertemplate": "%{y:.5~g}",
    }


def _spikes(loss_at: dict[int, float | None], steps: Iterable[int]) -> Chart:
    shown = [step for step in steps if loss_at.get(step) is not None]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "loss spike",
        "x": shown,
        "y": [loss_at[step] for step in shown],
        "marker": {"symbol": "triangle-down", "size": 11, "color": "--act"},
        "hovertemplate": "step %{x}",
    }


def _sampled(stretches: Sequence[tuple[int, int]]) -> Chart:
    """A tick for each sampled stretch, at its first step."""
    return _ticks([first for first, _ in stretches], "sampled", "--blue", "line-ns-open")


def _ticks(steps: Sequence[int], name: str, colour: str, symbol: str) -> Chart:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": list(steps),
        "y": [0] * len(steps),
        "yaxis": "y3",
        "marker": {"symbol": symbol, "size": 9, "color": colour, "line": {"width": 1, "color": colour}},
        "hovertemplate": "%{x}",
    }


def _onsets(onsets: Sequence[tuple[int, int]], steps: int) -> tuple[list[Chart], list[Chart]]:
    """A dotted line at each step where findings begin, with their numbers above it; close ones share a label."""
    at: dict[int, list[str]] = {}
    for step, number in onsets:
        near = next((known for known in at if abs(known - step) * 25 <= steps), step)
        at.setdefault(near, []).append(str(number))
    first = dict(list(at.items())[:MOST_ONSETS])
    return [_onset_line(step) for step in first], [_onset_label(*item) for item in first.items()]


def _onset_line(step: int) -> Chart:
    ends = {"x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper"}
    return {"type": "line", "line": {"color": "--orange", "width": 1, "dash": "dot"}} | ends


def _onset_label(step: int, numbers: list[str]) -> Chart:
    place = {"x": step, "y": 1.0, "yref": "paper", "yanchor": "bottom", "showarrow": False}
    return {"text": _few(numbers), "font": {"size": 11, "color": "--orange"}} | place


def _few(numbers: list[str]) -> str:
    return ", ".join(numbers[:3]) + (f" +{len(numbers) - 3}" if len(numbers) > 3 else "")
