"""Figures as files, the recommendation's curve, and the marks of triggers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fp8dbg.analysis.recommend import Point
from fp8dbg.analysis.run import open_run
from fp8dbg.analysis.summary import summarise
from fp8dbg.render.curve import curve
from fp8dbg.render.page_data import PageData
from fp8dbg.render.page_words import marks
from fp8dbg.render.pictures import charts, write_pictures
from fp8dbg.render.timeline import timeline
from tests.command_line import in_a_process
from tests.synthetic import outlier, write_run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an outlier, and an event that triggered a closer look."""
    plant = [
        *outlier("layers.1.up", step=60),
        {"from_step": 60, "to_step": 60, "event": "trigger", "detail": "a spike"},
    ]
    return write_run(tmp_path_factory.mktemp("pictures") / "run", blocks=2, steps=120, plant=plant)


def strings(value: Any) -> Iterator[str]:
    """Every text in a chart."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from strings(inner)
    elif isinstance(value, str):
        yield value


def test_every_figure_with_values_is_drawn_in_real_colours(folder: Path) -> None:
    """The timeline and the heat maps; no name of a colour is left that only the page would know."""
    with open_run(folder) as run:
        drawn = dict(charts(run, summarise(run)))
    assert {"timeline", "tensor-underflow_ratio", "tensor-scale_delta", "gemm-excess_db"} <= set(drawn)
    assert "tensor-nonfinite_ratio" not in drawn
    assert not [text for chart in drawn.values() for text in strings(chart) if text.startswith("--")]


def test_a_cell_is_the_worst_of_its_layers_tensors(folder: Path) -> None:
    """From step 60 on the faulty layer's row holds the share of the weight that is lost."""
    with open_run(folder) as run:
        chart = dict(charts(run, summarise(run)))["tensor-underflow_ratio"]
        worst = run.rows(
            "select max(underflow_ratio) as worst from tensor_steps where layer = 'layers.1.up' and step = 60"
        )
    rows, steps = chart["layout"]["yaxis"]["ticktext"], chart["layout"]["xaxis"]["ticktext"]
    trace = chart["data"][0]
    assert "60" in steps
    place = [str(step) for step in range(0, 120, 120 // len(trace["x"]))].index("60")
    assert trace["customdata"][rows.index("layers.1.up")][place] == pytest.approx(worst[0]["worst"], rel=1e-6)


@pytest.mark.slow
def test_figures_become_png_files(folder: Path, tmp_path: Path) -> None:
    """One file a figure, each a picture of its own; needs kaleido and a Chromium."""
    pytest.importorskip("kaleido")
    with open_run(folder) as run:
        written = write_pictures(islice(charts(run, summarise(run)), 2), tmp_path / "png")
    assert [path.stem for path in written] == ["timeline", "tensor-underflow_ratio"]
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n") for path in written)


def test_without_kaleido_there_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    """The report itself is printed all the same."""
    arguments = ("report", folder, "--no-html", "--png", tmp_path / "png")
    done = in_a_process(*arguments, before="sys.modules['kaleido'] = None")
    assert done.code == 2
    assert "layers.1.up" in done.out
    assert done.err.strip() == "fp8dbg: kaleido is not installed. pip install 'fp8dbg[png]' brings it."


def test_triggers_are_marked_on_the_timeline(folder: Path) -> None:
    """At their steps, by a sign of their own."""
    with open_run(folder) as run:
        marked = marks(run, summarise(run), PageData(run, [], []))
    assert marked.triggers == [60]
    chart = timeline([{"step": s, "loss": 1.0, "grad_norm": None} for s in range(3)], marked)
    assert next(trace["x"] for trace in chart["data"] if trace["name"] == "trigger") == [60]


def point(layer: str, removed: float | None, flops: float, in_plan: bool = False) -> Point:
    return Point(layer, "fprop", in_plan, "bf16", 0.1, False, removed, flops, "It reads the faulty weight.")


def test_the_curve_climbs_from_nothing_to_what_was_measured() -> None:
    """A dot for each measured point, filled where the plan has it; higher is lower in SVG."""
    drawn = curve(
        [point("a", 0.5, 0.02, True), point("b", 0.96, 0.06, True), point("c", None, 0.07), point("d", 1.0, 0.1)]
    )
    svg = ElementTree.fromstring(drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')).find(f"{SVG}svg")
    assert svg is not None
    dots = svg.findall(f"{SVG}circle")
    assert [dot.get("fill") for dot in dots] == ["var(--blue)", "var(--blue)", "var(--paper)"]
    heights = [float(dot.get("cy") or 0) for dot in dots]
    assert heights == sorted(heights, reverse=True)
    across = [float(dot.get("cx") or 0) for dot in dots]
    assert across == sorted(across)


def test_a_hostile_layer_name_is_text_in_the_curve() -> None:
    """Escaped; the drawing stays well-formed."""
    drawn = curve([point('<script>"x"</script>', 0.5, 0.1), point("b", 1.0, 0.2)])
    assert "<script" not in drawn
    ElementTree.fromstring(drawn)


def test_a_curve_of_one_point_is_not_drawn() -> None:
    """There is nothing to weigh."""
    assert curve([point("a", 1.0, 0.1)]) == curve([]) == ""
