"""Figures of a run as PNG files, for a slide or an issue: the timeline, and a heat map for each figure that has values.

Drawn by kaleido, which drives a Chromium or Chrome of the machine's own; both are optional.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from fp8dbg.errors import UsageError, optional_library
from fp8dbg.render.cube import Cube, Floats
from fp8dbg.render.figures import Chart
from fp8dbg.render.heatmap import MEANINGS, Meaning, heat_map
from fp8dbg.render.names import shorten
from fp8dbg.render.page_data import Bucket, PageData
from fp8dbg.render.page_words import marks
from fp8dbg.render.palette import LIGHT
from fp8dbg.render.timeline import timeline
from fp8dbg.runs.files import write_whole
from fp8dbg.runs.queries import ask

if TYPE_CHECKING:
    from fp8dbg.analysis.run import Run
    from fp8dbg.analysis.summary import Summary

WIDTH = 1100
"""Pixels, before the scale of 2 that makes them sharp."""

MOST_LAYERS = 100
"""Rows of a heat map: the layers whose worst is worst, in the order of execution."""


def write_pictures(drawn: Iterable[tuple[str, Chart]], folder: Path) -> list[Path]:
    """Write figures into a folder; what was there under these names is replaced.

    Args:
        drawn: names and charts, as `charts` gives them.
        folder: made if missing.

    Raises:
        UsageError: kaleido or a browser is missing, or the folder cannot be written.
    """
    optional_library("kaleido", "png")
    written = []
    try:
        for name, chart in drawn:
            data = _png(chart)
            path = folder / f"{name}.png"
            write_whole(path, partial(_put, data))
            written.append(path)
    except OSError as error:
        raise UsageError(f"Cannot write {folder}: {error.strerror}.", "Give another folder with --png.") from error
    return written


def _put(data: bytes, file: IO[bytes]) -> None:
    file.write(data)


def charts(run: Run, summary: Summary) -> Iterator[tuple[str, Chart]]:
    """Each figure's file name and its Plotly chart, coloured."""
    data = PageData(run, [], [])
    steps = ask(run, "page_steps")
    if steps:
        yield "timeline", themed(timeline(steps, marks(run, summary, data)))
    for meaning in MEANINGS:
        grid = data.grid
        cube = grid.tensors if meaning.of == "tensor" else grid.gemms
        values = _values(cube, meaning)
        if values is not None and np.nanmax(np.abs(values)) > 0:
            yield f"{meaning.of}-{meaning.column}", themed(_heat(meaning, cube, values, data.layers, grid.buckets))


def _values(cube: Cube, meaning: Meaning) -> Floats | None:
    """The figure by tensor and bucket; None if no tensor has it. ``excess_db`` is formed here, as the page does."""
    if meaning.column != "excess_db":
        return cube.columns.get(meaning.column)
    if "rel_l2" not in cube.columns:
        return None
    floors = np.array([np.nan if f is None else f for f in cube.keys["floor"]], np.float32)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = 20 * np.log10(cube.columns["rel_l2"] / floors)
    return None if np.isnan(excess).all() else excess.astype(np.float32)


def _heat(meaning: Meaning, cube: Cube, values: Floats, layers: list[str], buckets: list[Bucket]) -> Chart:
    """Each cell is the worst of the layer's tensors; rows are the layers that have the figure."""
    harm = np.maximum(8 * values, -values) if meaning.worst == "scale" else values
    rows: dict[str, Floats] = {}
    for layer in layers:
        mine = [i for i, name in enumerate(cube.keys["layer"]) if name == layer]
        if mine and not np.isnan(values[mine]).all():
            at = np.where(np.isnan(harm[mine]), -np.inf, harm[mine]).argmax(axis=0)
            rows[layer] = values[mine][at, np.arange(values.shape[1])]
    worst = sorted(rows, key=lambda layer: -float(np.nanmax(np.abs(rows[layer]))))[:MOST_LAYERS]
    shown = [layer for layer in rows if layer in set(worst)]
    cells = [[None if np.isnan(v) else float(v) for v in rows[layer]] for layer in shown]
    chart = heat_map(meaning, [shorten(layer, 30) for layer in shown], [_label(b) for b in buckets], cells)
    chart["layout"] |= {"title": {"text": meaning.title, "x": 0.01, "font": {"size": 14}}}
    chart["layout"]["margin"] |= {"t": 40}
    chart["layout"]["height"] += 60
    return chart


def _label(bucket: Bucket) -> str:
    first, last = bucket.first_step, bucket.last_step
    return str(first) if first == last else f"{first}-{last}"


def themed(value: Any) -> Any:
    """A chart with the names of colours replaced by the light page's colours."""
    if isinstance(value, dict):
        return {k: _scale(v) if k == "colorscale" else themed(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [themed(v) for v in value]
    return LIGHT[value] if isinstance(value, str) and value in LIGHT else value


def _scale(name: str) -> list[list[Any]]:
    colours = LIGHT[name]
    return [[i / (len(colours) - 1), colour] for i, colour in enumerate(colours)]


def _png(chart: Chart) -> bytes:
    from plotly.io import to_image

    try:
        image: bytes = to_image(chart, "png", width=WIDTH, height=chart["layout"].get("height", 400), scale=2)
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise UsageError(
            f"The figures could not be drawn ({why}).", "kaleido needs a Chromium or Chrome: plotly_get_chrome."
        ) from error
    return image
