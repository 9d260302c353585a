"""The page of a comparison: one file that opens offline, in the looks of report.html."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp8dbg.analysis.compare import BASIS, SAME, Comparison
from fp8dbg.analysis.differences import GEMM_FIGURES, Difference
from fp8dbg.analysis.paired import Paired, paired
from fp8dbg.analysis.run import Run
from fp8dbg.render import sections
from fp8dbg.render.figures import Chart, layout, log_ticks, power_text
from fp8dbg.render.markup import Heading, definitions, escaped, named, number, prose, section, table
from fp8dbg.render.names import shorten
from fp8dbg.render.palette import PALETTES
from fp8dbg.render.shell import document, write_page

SCRIPTS = ("page_charts.js", "compare.js", "page.js")
POINTS = 1500
"""Points of a line; more steps than that are averaged in equal stretches, and the page says so."""

CHARTS, ROWS = 8, 200
"""Differences that are drawn, and that are listed."""

Points = tuple[list[int], list[float | None], list[float | None]]


def write_comparison(a: Run, b: Run, comparison: Comparison, path: Path) -> Path:
    """Write the page of a comparison; returns its path.

    Args:
        a, b: the runs, still open: the figures that differ are drawn from them.
        comparison: what ``compare`` said of them.
        path: the file.

    Raises:
        UsageError: it cannot be written there.
    """
    return write_page(path, page(a, b, comparison))


def page(a: Run, b: Run, comparison: Comparison) -> str:
    """The page as text."""
    drawn = comparison.figures.found[:CHARTS]
    charts = _loss_charts(comparison) | _figure_charts(a, b, drawn)
    parts = [
        ("verdict", "Verdict", _verdict(comparison)),
        ("loss", "Loss", _loss(comparison, charts)),
        ("differences", "Differences", _differences(comparison, drawn)),
        ("figures", "Side by side", _side_by_side(comparison)),
        ("made", "Made differently", _made(comparison)),
        ("notes", "Not compared", _notes(comparison)),
    ]
    payload = {"layers": [], "palettes": PALETTES, "drawn": charts}
    return document(parts, payload, SCRIPTS, f"{comparison.a} and {comparison.b}")


def _verdict(comparison: Comparison) -> str:
    css = "fine" if comparison.verdict == SAME else "act"
    first = comparison.first
    said = definitions(
        [
            ("A", named(comparison.a)),
            ("B", named(comparison.b)),
            ("First", f"{named(first.layer)}, {escaped(first.name)}: {escaped(first.title)}" if first else ""),
            ("Since", f"step {number(comparison.since)}" if comparison.since is not None else ""),
        ]
    )
    banner = f'<div class="verdict {css}"><h1>{prose(comparison.headline, 420)}</h1>{said}</div>'
    return f'<section id="verdict">{banner}{_facts(comparison)}</section>'


def _facts(comparison: Comparison) -> str:
    figures, gap = comparison.figures, comparison.loss
    pairs = [
        ("Sampled steps in common", number(len(figures.steps))),
        ("Layers in common", number(len(figures.layers))),
        ("Figures that differ", number(len(figures.found))),
    ]
    if gap is not None:
        pairs += [
            ("Gap of the loss at the end (B − A)", number(gap.tail_gap)),
            ("Of that, noise", f"± {number(gap.tail_band)}"),
            ("Gap per step at the end", number(gap.tail_slope)),
        ]
    return (
        '<dl class="facts">'
        + "".join(f"<div><dt>{escaped(term)}</dt><dd>{value}</dd></div>" for term, value in pairs)
        + "</dl>"
    )


def _chart(key: str, title: str) -> str:
    label = escaped(title)
    chart = f'<div class="chart" role="img" aria-label="{label}" data-compare="{escaped(key)}"></div>'
    return f'<figure class="box"><figcaption>{label}</figcaption>{chart}</figure>'


def _loss(comparison: Comparison, charts: dict[str, Chart]) -> str:
    if "loss" not in charts:
        return section("loss", "Loss", "<p>No step has a loss in both runs.</p>")
    each = math.ceil(len(comparison.losses) / POINTS)
    thinned = f" Each point is the mean of {each} steps." if each > 1 else ""
    note = (
        '<p class="note">Dotted: where the runs begin to differ. Shaded: the mean gap of the last third that noise '
        f"accounts for.{thinned}</p>"
    )
    gap = _chart("gap", "Gap of the loss: B less A") if "gap" in charts else ""
    return section("loss", "Loss", _chart("loss", "Loss of both runs") + gap + note)


def _differences(comparison: Comparison, drawn: Sequence[Difference]) -> str:
    found = comparison.figures.found
    if not found:
        return section("differences", "Differences", "<p>No figure of any layer differs beyond noise.</p>")
    boxes = "".join(_chart(f"difference-{i}", _title(d)) for i, d in enumerate(drawn))
    headings = (
        Heading("first_step", "since step"),
        Heading("layer", "layer", form="name"),
        Heading("name", "tensor or GEMM", form="text"),
        Heading("title", "figure", form="text"),
        Heading("a", "A at its worst"),
        Heading("b", "B there"),
        Heading("beyond", "gap over threshold"),
        Heading("worst_step", "worst step"),
        Heading("steps", "sampled steps"),
    )
    more = f" The first {ROWS} of {len(found)}: --json has all." if len(found) > ROWS else ""
    note = f'<p class="note">Earliest first, then in order of execution. Press a heading to sort.{more}</p>'
    rows = [d.to_dict() for d in found[:ROWS]]
    body = f'<div class="charts">{boxes}</div>{note}{table(headings, rows, sortable=True)}'
    return section("differences", f"Differences ({len(found)})", body, "long")


def _title(found: Difference) -> str:
    return f"{found.title} of {shorten(found.layer, 50)} {found.name}"


def _side_by_side(comparison: Comparison) -> str:
    headings = (
        Heading("title", "figure", form="text"),
        Heading("name", "of", form="text"),
        Heading("a", "A, median"),
        Heading("b", "B, median"),
        Heading("largest", "largest gap"),
        Heading("threshold", "threshold"),
        Heading("unit", "in", form="text"),
        Heading("layer", "largest in", form="name"),
        Heading("differing", "layers that differ"),
    )
    chosen = [row for row in comparison.figures.side_by_side if row.differing or row.figure != "non_finite"]
    chosen.sort(key=lambda row: -abs(row.largest) / (row.threshold or 1e-9))
    rows = [row.to_dict() | {"unit": "log2" if row.log2 else ""} for row in chosen]
    note = '<p class="note">Medians over all layers and common sampled steps; gaps are B less A, step by step.</p>'
    return section("figures", "Side by side", note + table(headings, rows, sortable=True), "long")


def _made(comparison: Comparison) -> str:
    headings = (
        Heading("key", "in run.json", form="text"),
        Heading("a", "A", form="text"),
        Heading("b", "B", form="text"),
    )
    rows = [{"key": c.key, "a": _value(c.a), "b": _value(c.b)} for c in comparison.fingerprint]
    return section("made", "Made differently", table(headings, rows) if rows else "<p>Nothing in run.json differs.</p>")


def _value(value: Any) -> str | None:
    if isinstance(value, list):
        value = "; ".join(map(str, value)) or "nothing"
    return None if value is None else shorten(str(value), 300)


def _notes(comparison: Comparison) -> str:
    listed = sections.unseen(comparison.notes).split("</h2>", 1)[1].removesuffix("</section>")
    return section("notes", "Not compared, and how it is judged", f'{listed}<p class="note">{prose(BASIS)}</p>')


def _loss_charts(comparison: Comparison) -> dict[str, Chart]:
    if not comparison.losses:
        return {}
    points = _thinned(comparison.losses)
    steps, a, b = points
    charts = {"loss": _two_lines(points, "loss", comparison.since, height=300)}
    if comparison.loss is None:
        return charts
    gap = [y - x if x is not None and y is not None else None for x, y in zip(a, b, strict=True)]
    chart = layout("B − A", height=200, showlegend=False)
    chart["shapes"] = [
        _band(comparison.loss.tail_from, steps[-1], comparison.loss.tail_band),
        *_since(comparison.since),
    ]
    charts["gap"] = {"data": [_line(steps, gap, "gap", "--ink")], "layout": chart}
    return charts


def _thinned(rows: Sequence[tuple[int, float | None, float | None]]) -> Points:
    each = math.ceil(len(rows) / POINTS)
    stretches = [rows[i : i + each] for i in range(0, len(rows), each)]
    return [s[0][0] for s in stretches], [_mean(s, 1) for s in stretches], [_mean(s, 2) for s in stretches]


def _mean(rows: Sequence[tuple[int, float | None, float | None]], column: int) -> float | None:
    """None where any is: a loss that was not finite shows as a gap."""
    values = [row[column] for row in rows]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _band(start: int, end: int, band: float) -> Chart:
    place = {"x0": start, "x1": end, "y0": -band, "y1": band}
    return {"type": "rect", "fillcolor": "--shade-lost", "line": {"width": 0}, "layer": "below"} | place


def _since(step: int | None) -> list[Chart]:
    if step is None:
        return []
    ends = {"x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper"}
    return [{"type": "line", "line": {"color": "--act", "width": 1, "dash": "dot"}} | ends]


def _line(steps: Sequence[int], values: Sequence[float | None], name: str, colour: str) -> Chart:
    return {
        "type": "scatter",
        "mode": "lines" if len(steps) > 100 else "lines+markers",
        "name": name,
        "x": list(steps),
        "y": list(values),
        "line": {"color": colour, "width": 1.4},
        "marker": {"size": 3, "color": colour},
        "hovertemplate": "%{y:.5~g}",
    }


def _two_lines(points: Points, unit: str, since: int | None, *, log: bool = False, height: int = 210) -> Chart:
    steps, a, b = points
    chart = layout(unit, log=log, height=height)
    chart["shapes"] = _since(since)
    values = [value for value in (*a, *b) if value is not None and value > 0]
    if log and values and (ticks := log_ticks(min(values), max(values))):
        chart["yaxis"] |= {"tickvals": ticks, "ticktext": [power_text(tick) for tick in ticks]}
    return {"data": [_line(steps, a, "A", "--blue"), _line(steps, b, "B", "--orange")], "layout": chart}


def _figure_charts(a: Run, b: Run, drawn: Sequence[Difference]) -> dict[str, Chart]:
    """A chart for each difference, with both runs' values on their common sampled steps."""
    gemms = {figure.name for figure in GEMM_FIGURES}
    tables: dict[str, Paired] = {}
    charts = {}
    for i, found in enumerate(drawn):
        question = "compare_gemms" if found.figure in gemms else "compare_tensors"
        if question not in tables:
            tables[question] = paired(a, b, question)
        logarithmic = found.log2 and found.figure != "scale_delta"
        points = _points(tables[question], found)
        charts[f"difference-{i}"] = _two_lines(points, found.title, found.first_step, log=logarithmic)
    return charts


def _points(table: Paired, found: Difference) -> Points:
    block = next(block for block in table.blocks if block.name == found.name)
    rows = np.flatnonzero(block.layer == block.layers.index(found.layer))
    one, other = block.a[found.figure][rows], block.b[found.figure][rows]
    values = zip(block.step[rows].tolist(), one.tolist(), other.tolist(), strict=True)
    return _thinned([(step, _undone(x, found), _undone(y, found)) for step, x, y in values])


def _undone(value: float, found: Difference) -> float | None:
    if math.isnan(value):
        return None
    return 2.0 ** min(value, 1000.0) if found.log2 and found.figure != "scale_delta" else value
