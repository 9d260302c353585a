"""Charts hold the figures that SQL gives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8dbg.analysis.run import Run, open_run
from fp8dbg.numerics.formats import FORMATS
from fp8dbg.render import figures
from fp8dbg.render.cube import make_cube, packed
from fp8dbg.render.heatmap import MEANINGS, Meaning, coloured, heat_map
from fp8dbg.render.html import charts
from fp8dbg.render.page_data import PageData
from fp8dbg.render.palette import DARK, LIGHT, painted
from fp8dbg.render.timeline import Marks, timeline
from fp8dbg.runs.folder import RunWriter
from fp8dbg.runs.queries import ask
from tests.synthetic import amax_jump, swiglu_outlier, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """20 layers, 20 sampled steps, the demo's fault from step 100."""
    return open_run(write_run(tmp_path_factory.mktemp("run") / "r", plant=swiglu_outlier()))


def meaning(column: str) -> Meaning:
    return next(m for m in MEANINGS if m.column == column and m.of == "tensor")


@pytest.mark.parametrize(
    ("name", "scale", "underflow", "subnormal", "saturated"),
    [
        ("e4m3", 1.0, -10.0, -6.0, math.log2(464)),
        ("e4m3", 448.0, -10.0 - math.log2(448), -6.0 - math.log2(448), math.log2(464 / 448)),
        ("e5m2", 1.0, -17.0, -14.0, math.log2(61440)),
    ],
)
def test_the_representable_range_follows_format_and_scale(
    name: str, scale: float, underflow: float, subnormal: float, saturated: float
) -> None:
    """Half the smallest subnormal still becomes 0; the rounding boundary, not the maximum, is where values clip."""
    wanted = {"underflow": underflow, "subnormal": subnormal, "saturated": saturated}
    assert figures.representable(FORMATS[name], scale) == pytest.approx(wanted)


def test_with_block_scales_only_what_no_block_holds_is_out_of_range() -> None:
    """The largest scale reaches lowest, the smallest highest."""
    found = figures.representable(FORMATS["e4m3"], 1.0, 8.0)
    assert found["underflow"] == pytest.approx(-13.0)
    assert found["saturated"] == pytest.approx(math.log2(464))


def test_a_series_is_drawn_at_its_axis_floor_and_hover_tells_the_truth() -> None:
    """0 has no logarithm: it lies on the axis; a missing figure is a gap; an absent column no line."""
    chart = figures.draw(figures.lost_values(), {"step": [0, 10, 20], "underflow_ratio": [0.0, None, 0.5]})
    (trace,) = chart["data"]
    assert trace["name"] == "underflow"
    assert trace["y"] == [figures.SMALLEST_RATIO, None, 0.5]
    assert trace["customdata"] == [0.0, None, 0.5]


def test_what_a_logarithmic_axis_cannot_hold_is_a_gap() -> None:
    """An rms of 0 is no line to minus infinity."""
    chart = figures.draw(figures.magnitudes(), {"step": [0, 1], "rms": [0.0, 2.0]})
    assert chart["data"][0]["y"] == [None, 2.0]


def test_a_line_of_many_points_has_no_markers() -> None:
    """Its dashes would not show below them."""
    charts_of = {n: figures.draw(figures.noise(), {"step": range(n), "sqnr_db": [1.0] * n}) for n in (100, 101)}
    assert [charts_of[n]["data"][0]["mode"] for n in (100, 101)] == ["lines+markers", "lines"]


def test_a_jump_between_sampled_steps_shows(tmp_path: Path) -> None:
    """amax and scale are known at every step: 30 times too large on step 155, which no sample saw."""
    run = open_run(write_run(tmp_path / "r", plant=amax_jump(155, layer="layers.1.up")))
    buckets, cube = PageData(run, [], []).every
    row = cube.row(layer="layers.1.up", tensor="input")
    assert row is not None
    column = [bucket.first_step for bucket in buckets].index(155)
    assert cube.columns["scale_delta"][row, column] == pytest.approx(math.log2(30), abs=0.2)
    assert abs(cube.columns["scale_delta"][row, column - 1]) < 0.3
    assert math.isnan(cube.columns["scale_delta"][row, 0])


def test_of_a_scale_too_large_and_one_too_small_a_bucket_shows_the_former(tmp_path: Path) -> None:
    """Clipping does far more harm: the jump is not hidden by the sixteen stale steps after it."""
    run = open_run(write_run(tmp_path / "r", plant=amax_jump(155, layer="layers.1.up")))
    rows = ask(run, "page_amax", buckets=4, layers='["layers.1.up"]')
    (row,) = (r for r in rows if r["tensor"] == "input")
    assert row["scale_delta"][3] == pytest.approx(math.log2(30), abs=0.2)


def test_zeros_are_drawn_only_where_there_are_some() -> None:
    """A tensor without zeros has no line of zeros."""
    base: figures.Columns = {"step": [0, 1], "underflow_ratio": [0.1, 0.1]}
    names = [[t["name"] for t in figures.draw(figures.lost_values(), {**base, "zero_ratio": z})["data"]]
             for z in ([0.0, 0.0], [0.0, 0.25])]  # fmt: skip
    assert names == [["underflow"], ["underflow", "already zero"]]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1e-6, 1e6, [1e-6, 1e-3, 1.0, 1e3, 1e6]),
        (3.0, 9.0, [1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0]),
        (3.0, 70.0, [2.0, 5.0, 10.0, 20.0, 50.0, 100.0]),
        (4.0, 4.1, []),
    ],
)
def test_logarithmic_axes_have_few_ticks(low: float, high: float, ticks: list[float]) -> None:
    """Powers of ten over many decades, multiples of them over few, plotly's own over less."""
    assert figures.log_ticks(low, high) == ticks


@pytest.mark.parametrize(("value", "text"), [(1.0, "1"), (0.001, "0.001"), (1e6, "10⁶"), (2e-7, "2·10⁻⁷")])
def test_powers_are_written_as_a_reader_would(value: float, text: str) -> None:
    """No 1e+06 on an axis."""
    assert figures.power_text(value) == text


def test_a_heat_cell_is_the_figure_that_sql_gives(run: Run) -> None:
    """The value below the colour is the ratio of the step's counts; the colour its logarithm."""
    (wanted,) = run.rows(
        "select sum(underflow) / sum(numel - zeros) as ratio from tensors "
        "where layer = 'layers.2.up' and tensor = 'weight' and step = 120"
    )
    data = PageData(run, [], [])
    row = data.grid.tensors.row(layer="layers.2.up", tensor="weight")
    column = [bucket.first_step for bucket in data.grid.buckets].index(120)
    cells = data.grid.tensors.columns["underflow_ratio"]
    assert row is not None
    assert cells[row, column] == pytest.approx(wanted["ratio"], rel=1e-6) == pytest.approx(0.97, abs=1e-4)
    chart = heat_map(meaning("underflow_ratio"), ["up"], ["120"], [[float(cells[row, column])]])
    assert chart["data"][0]["z"][0][0] == pytest.approx(math.log10(wanted["ratio"]), rel=1e-6)
    assert chart["data"][0]["customdata"][0][0] == pytest.approx(wanted["ratio"], rel=1e-6)


def test_colours_end_at_the_scale_and_a_missing_figure_has_none() -> None:
    """Beyond the ends nothing is lost but the shade."""
    delta = meaning("scale_delta")
    assert [coloured(delta, v) for v in (-20.0, -3.0, 20.0, None, math.nan)] == [-6.0, -3.0, 6.0, None, None]


def test_a_bucket_holds_its_worst_step(run: Run) -> None:
    """Four buckets of five sampled steps: largest ratio, most harmful scale_delta, smallest amin."""
    values: dict[str, Any] = {"buckets": 4, "layers": '["layers.2.down"]'}
    rows = ask(run, "page_tensors", **values)
    (row,) = (r for r in rows if r["tensor"] == "input")
    steps = run.rows(
        "select step // 50 as bucket, max(underflow / (numel - zeros)) as ratio, min(amin) as amin, "
        "arg_max(scale_delta, greatest(8 * scale_delta, -scale_delta)) as delta from tensors "
        "where layer = 'layers.2.down' and tensor = 'input' group by 1 order by 1"
    )
    assert row["bucket"] == [0, 1, 2, 3]
    assert row["underflow_ratio"] == pytest.approx([s["ratio"] for s in steps])
    assert row["scale_delta"] == pytest.approx([s["delta"] for s in steps])
    assert row["amin"] == pytest.approx([s["amin"] for s in steps])


def test_counts_of_a_step_add_before_a_ratio_is_formed(tmp_path: Path) -> None:
    """Two microbatches, 90 of 100 and 0 of 900 lost: 9 % of the step, not 90 %; amax is the larger."""
    with_counts = [(0, 100, 90, 12.0), (1, 900, 0, 3.0)]
    writer = RunWriter(tmp_path / "r", rank=0, fingerprint={})
    for microbatch, numel, lost, amax in with_counts:
        counts = {"numel": numel, "zeros": 0, "nan": 0, "inf": 0, "underflow": lost, "saturated": 0, "amax": amax}
        keys = {"step": 0, "microbatch": microbatch, "call": 0, "rank": 0, "layer": "a", "tensor": "input"}
        writer.append("tensors", [keys | counts | {"recipe": "delayed", "format": "e4m3"}])
    writer.close()
    (row,) = ask(open_run(tmp_path / "r"), "page_tensors")
    assert (row["underflow_ratio"], row["amax"]) == ([pytest.approx(0.09)], [12.0])


def test_thinning_the_loss_keeps_every_extreme(tmp_path: Path) -> None:
    """One spike among 5,000 steps and one step without a loss are still there at 50 buckets."""
    writer = RunWriter(tmp_path / "r", rank=0, fingerprint={})
    losses = [{"step": s, "rank": 0, "loss": 9.0 if s == 1234 else 2.0 - s / 1e5} for s in range(5000)]
    losses[2345]["loss"] = math.nan
    writer.append("steps", losses)
    writer.close()
    rows = ask(open_run(tmp_path / "r"), "page_steps", buckets=50)
    loss = {row["step"]: row["loss"] for row in rows}
    assert len(rows) <= 150
    assert (loss[1234], loss[2345]) == (9.0, None)


def test_the_timeline_marks_spikes_onsets_and_gaps(run: Run) -> None:
    """A spike lies on the loss, an onset carries the finding's number, near onsets share a label."""
    rows = ask(run, "page_steps")
    marks = Marks(onsets=[(100, 1), (101, 2), (150, 3)], spikes=[150], sampled=[(0, 0), (10, 10)], gaps=[60])
    chart = timeline(rows, marks)
    traces = {trace["name"]: trace for trace in chart["data"]}
    loss = {row["step"]: row["loss"] for row in rows}
    assert (traces["loss spike"]["x"], traces["loss spike"]["y"]) == ([150], [loss[150]])
    assert (traces["sampled"]["x"], traces["not seen"]["x"]) == ([0, 10], [60])
    assert [(note["x"], note["text"]) for note in chart["layout"]["annotations"]] == [(100, "1, 2"), (150, "3")]


def test_packed_numbers_keep_five_digits() -> None:
    """The page unpacks the upper three bytes of a float32; NaN stays NaN."""
    import base64

    values = np.array([0.0, 1.0, -3.14159, 1e-30, 3e38, np.nan, 4.6e-7], np.float32)
    octets = np.frombuffer(base64.b64decode(packed(values)), np.uint8).reshape(-1, 3)
    back = np.concatenate([np.zeros((7, 1), np.uint8), octets], axis=1).copy().view("<f4").ravel()
    assert np.isnan(back[5])
    np.testing.assert_allclose(back, values, rtol=1e-5)


def test_figures_beyond_float32_are_drawn_at_its_ends(tmp_path: Path) -> None:
    """An amax of 1e300 is still on the chart."""
    writer = RunWriter(tmp_path / "r", rank=0, fingerprint={})
    keys = {"step": 0, "microbatch": 0, "call": 0, "rank": 0, "layer": "a", "tensor": "input"}
    writer.append("tensors", [keys | {"amax": 1e300, "amin": 1e-300}])
    writer.close()
    run = open_run(tmp_path / "r")
    from fp8dbg.runs.queries import QUESTIONS

    table = run.sql(QUESTIONS["page_tensors"].sql, {"buckets": 1, "layers": None}).to_arrow_table()
    columns = make_cube(table, 1).columns
    assert (columns["amax"][0, 0], columns["amin"][0, 0]) == (np.float32(3e38), np.float32(1e-37))


@pytest.mark.parametrize(
    "damaged",
    [
        {"exponent": None, "counts": [5, 3], "codes": [0x3F80]},
        {"exponent": 0, "counts": [5, None], "codes": None},
        {"exponent": None, "counts": [5], "codes": [None]},
    ],
)
def test_a_damaged_histogram_is_left_out_of_the_page(damaged: dict[str, Any], tmp_path: Path) -> None:
    """Of a foreign part: numbers missing, or not one count for each code; the others are shown."""
    keys = {"step": 0, "microbatch": 0, "call": 0, "rank": 0, "tensor": "input", "numel": 4, "dtype": "bfloat16"}
    whole = {"exponent": 0, "counts": [4], "codes": None}
    with RunWriter(tmp_path / "r") as writer:
        for layer, histogram in (("a", damaged), ("b", whole)):
            writer.append("tensors", [keys | {"layer": layer, "histogram": histogram, "amax": 1.0}])
    (found,) = PageData(open_run(tmp_path / "r"), [], []).histograms()
    assert [entry[:4] for entry in found["of"]] == [[1, "input", 0, [4]]]


def test_fine_histograms_fold_into_binades(tmp_path: Path) -> None:
    """bfloat16 codes of 1, 1.5, -2, 0 and Inf: two values in binade 0, one in binade 1, no zero, no Inf."""
    histogram = {"exponent": None, "counts": [5, 3, 2, 7, 1], "codes": [0x3F80, 0x3FC0, 0xC000, 0x0000, 0x7F80]}
    writer = RunWriter(tmp_path / "r", rank=0, fingerprint={})
    keys = {"step": 0, "microbatch": 0, "call": 0, "rank": 0, "layer": "a", "tensor": "input"}
    writer.append("tensors", [keys | {"numel": 18, "dtype": "bfloat16", "histogram": histogram, "amax": 2.0}])
    writer.close()
    ((entry,),) = [found["of"] for found in PageData(open_run(tmp_path / "r"), [], []).histograms()]
    assert entry[2:4] == [0, [8, 2]]


def test_both_themes_name_the_same_colours_and_paint_every_chart() -> None:
    """No colour name is left over in either theme."""
    assert set(LIGHT) == set(DARK)
    for palette in (LIGHT, DARK):
        for chart in (*charts().values(), *(heat_map(m) for m in MEANINGS)):
            assert '"--' not in str(painted(chart, palette)).replace("'", '"')


def test_plotly_accepts_every_chart(run: Run) -> None:
    """What is drawn in the browser is a valid figure for plotly itself, as pictures need it."""
    import plotly.graph_objects as go

    data = PageData(run, [], [])
    columns = {name: values[0].tolist() for name, values in data.grid.tensors.columns.items()}
    columns["step"] = [bucket.first_step for bucket in data.grid.buckets]
    drawn = [figures.draw(chart, columns) for name, chart in charts().items() if name != "histogram"]
    drawn += [heat_map(m, ["a"], ["0"], [[1.0]]) for m in MEANINGS]
    drawn.append(timeline(ask(run, "page_steps"), Marks(onsets=[(3, 1)])))
    for chart in drawn:
        figure = painted(chart, LIGHT)
        figure["data"] = [{k: v for k, v in trace.items() if k != "meta"} for trace in figure["data"]]
        assert go.Figure(figure).to_dict()["layout"]
