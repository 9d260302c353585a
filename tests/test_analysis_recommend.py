from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8dbg.analysis.recommend import Recommendation
from fp8dbg.analysis.run import open_run
from fp8dbg.errors import NothingRecordedError
from fp8dbg.runs.schema import arrow_schema
from tests.synthetic import amax_jump, outlier, write_run

BROKEN: dict[str, Any] = {"impact": 0.08, "sensitivity": 3e-4}
QUIET: dict[str, Any] = {"impact": 1e-5, "sensitivity": 1e-8}


def recommended(path: Path, plant: Any = (), **options: Any) -> Recommendation:
    with open_run(write_run(path / "run", plant=plant, **options)) as run:
        return run.recommendation()


def drowned(layer: str, tensor: str, **gemm: Any) -> list[dict[str, Any]]:
    """An outlier in one tensor, and what fprop of its layer measures of it."""
    where = {"layer": layer, "from_step": 100}
    figures = {"amax_times": 1e6, "underflow_ratio": 0.97, "peak_to_median": 7e6}
    return [where | {"tensor": tensor} | figures, where | {"gemm": "fprop"} | gemm]


def gemms(found: Recommendation) -> dict[str, list[str]]:
    return {entry.layer: list(entry.gemms) for entry in found.plan.entries}


SETTLED = [{"table": "steps", "loss": 1.7}]
"""A loss that no longer falls: gradients that are lost cost nothing that could be measured."""


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_healthy_run_gets_no_advice(recipe: str, tmp_path: Path) -> None:
    """No plan, no curve, nothing instead, nothing left over."""
    found = recommended(tmp_path, recipe=recipe)
    assert found == Recommendation()
    assert "Nothing to change" in found.headline


def test_gemm_whose_gradients_cost_nothing_stays_in_fp8(tmp_path: Path) -> None:
    """The forward product carries the harm; dgrad, which reads the same weight, is on the curve and not in the plan."""
    found = recommended(tmp_path, [*drowned("layers.2.up", "weight", **BROKEN), *SETTLED])
    assert gemms(found) == {"layers.2.up": ["fprop"]}
    assert [(p.gemm, p.in_plan) for p in found.curve] == [("fprop", True), ("dgrad", False)]
    assert found.curve[0].harm_removed == pytest.approx(1.0)
    assert any("layers.2.up dgrad stays in FP8" in sentence for sentence in found.not_fixed)


def test_gemm_whose_gradients_cost_enough_is_in_the_plan(tmp_path: Path) -> None:
    """While the loss still falls fast, a lost gradient is worth more than 5 % of the fault."""
    found = recommended(tmp_path, drowned("layers.2.up", "weight", impact=0.01, sensitivity=3e-5))
    assert gemms(found) == {"layers.2.up": ["fprop", "dgrad"]}
    assert [p.harm_removed for p in found.curve][-1] == pytest.approx(1.0)


def test_flops_given_up_are_the_gemms_share_of_all(tmp_path: Path) -> None:
    """2mnk over that of every GEMM: up is 256 x 688 of each block, and fprop a third of its work."""
    found = recommended(tmp_path, [*drowned("layers.2.up", "weight", **BROKEN), *SETTLED])
    block = 256 * 768 + 256 * 256 + 3 * 256 * 688
    assert found.curve[0].flops_given_up == pytest.approx(256 * 688 / (3 * 4 * block))
    assert found.curve[1].flops_given_up == pytest.approx(2 * 256 * 688 / (3 * 4 * block))


def test_hidden_gemm_is_in_the_plan_and_alone_neither_buys_anything(tmp_path: Path) -> None:
    """down's product is lost whole but does not reach the loss, because up's is broken: both, or nothing is gained."""
    up = drowned("layers.2.up", "weight", **BROKEN)
    down = drowned("layers.2.down", "input", rel_l2=1.0, **QUIET)
    found = recommended(tmp_path, [*up, *down, *SETTLED])
    assert gemms(found) == {"layers.2.up": ["fprop"], "layers.2.down": ["fprop"]}
    points = [p for p in found.curve if p.in_plan]
    assert [(p.layer, p.hidden) for p in points] == [("layers.2.up", False), ("layers.2.down", True)]
    assert [p.harm_removed for p in points] == [pytest.approx(0.0), pytest.approx(1.0)]


def test_two_faults_that_do_not_touch_are_both_repaired(tmp_path: Path) -> None:
    """A small fault is not forgotten for being small beside a large one."""
    large = drowned("layers.3.down", "input", impact=1.0, sensitivity=4e-3)
    small = drowned("layers.0.up", "weight", impact=0.02, sensitivity=1e-4)
    found = recommended(tmp_path, [*large, *small, *SETTLED])
    assert gemms(found) == {"layers.3.down": ["fprop"], "layers.0.up": ["fprop"]}


@pytest.mark.parametrize("plant", [[{"layer": "*", "gemm": "*", "drop": True}], []])
def test_where_the_gemms_say_nothing_all_readers_are_kept(plant: Any, tmp_path: Path) -> None:
    """GEMMs that were not measured, or that contradict the tensor: none is left out on a guess, and a note says so."""
    found = recommended(tmp_path, [*outlier()[:1], *plant])
    assert gemms(found) == {"layers.2.up": ["fprop", "dgrad"]}
    assert all(point.harm_removed is None for point in found.curve)
    assert "layers.2.up" in found.notes[0]


def test_another_action_is_named_instead_of_bf16(tmp_path: Path) -> None:
    """A jump of 30 times under delayed scaling: current scaling, as no margin is worth it; no plan."""
    found = recommended(tmp_path, amax_jump())
    assert not found.plan
    assert [(a.kind, a.recipe, a.first_step) for a in found.instead] == [("give the scale room", "current", 150)]
    assert found.headline == "BF16 is not the answer here: give the scale room."


def test_jump_that_a_margin_holds_gets_that_margin(tmp_path: Path) -> None:
    """3.5 times beyond: two binades."""
    found = recommended(tmp_path, amax_jump(times=3.5))
    assert [a.recipe for a in found.instead] == ["delayed:margin=2"]


def test_finding_to_watch_is_repeated_with_its_action(tmp_path: Path) -> None:
    """A jump of one tensor between sampled steps: nothing to act on yet, and not "nothing to change"."""
    found = recommended(tmp_path, amax_jump(155, layer="layers.2.down"))
    assert not found.plan
    assert [(a.severity, a.layer, a.how[:29]) for a in found.instead] == [
        ("watch", "layers.2.down", "Look at the batch of step 155")
    ]
    assert found.headline == "Nothing asks for BF16; one thing to watch: give the scale room."


def test_spike_in_a_long_history_gets_the_most_recent_amax(tmp_path: Path) -> None:
    """A window of any length keeps the scale stale for as long."""
    spike = {"layer": "layers.1.up", "tensor": "input", "from_step": 65, "to_step": 65, "amax_times": 1e5}
    found = recommended(tmp_path, [spike], history=1024)
    assert not found.plan
    assert [(a.code, a.recipe) for a in found.instead] == [
        ("stale_scale", "delayed:history=1,algorithm=most_recent"),
        ("saturation", "current"),
    ]


def test_narrow_gradients_get_the_other_format(tmp_path: Path) -> None:
    """E4M3 gradients that are flushed: the run's own recipe with E5M2."""
    plant = [{"layer": "*.down", "tensor": "grad_output", "from_step": 80, "underflow_ratio": 0.6}]
    found = recommended(tmp_path, plant, recipe="delayed:history=16,hybrid=false", gradients="e4m3")
    assert not found.plan
    assert [(a.kind, a.recipe) for a in found.instead] == [("use E5M2 for gradients", "delayed:history=16")]


def test_trouble_of_the_start_asks_for_bf16_at_the_start_only(tmp_path: Path) -> None:
    """A tensor flushed for the first 30 of 200 steps."""
    plant = [{"layer": "layers.1.up", "tensor": "input", "to_step": 30, "underflow_ratio": 0.5}]
    found = recommended(tmp_path, plant, recipe="current")
    assert not found.plan
    assert [a.kind for a in found.instead] == ["use BF16 for the first 31 steps"]


@pytest.mark.parametrize(("underflow", "recipe"), [(0, "rowwise"), (40_000, "bf16")])
def test_finer_recipe_is_offered_where_it_was_recorded_and_holds(underflow: int, recipe: str, tmp_path: Path) -> None:
    """Rows under which the outlier keeps to itself: fprop stays in FP8, and no FLOPs are given up for it."""
    path = write_run(tmp_path / "run", plant=[*drowned("layers.2.up", "weight", **BROKEN), *SETTLED])
    beside = {"layer": "layers.2.up", "tensor": "weight", "recipe": "rowwise", "what_if": "rowwise", "format": "e4m3"}
    figures = {"granularity": "row", "numel": 176_128, "zeros": 0, "underflow": underflow, "rel_l2": 0.0265}
    place = {"microbatch": 0, "call": 0, "rank": 0, "nan": 0, "inf": 0, "saturated": 0}
    rows = [{"step": step, **place, **beside, **figures} for step in range(0, 200, 10)]
    part = path / "tensors" / "rank=00000" / "part-000009.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=arrow_schema("tensors")), part)
    with open_run(path) as run:
        found = run.recommendation()
    assert [(e.layer, e.gemms, e.recipe) for e in found.plan.entries] == [("layers.2.up", ("fprop",), recipe)]
    assert (found.curve[0].flops_given_up == 0.0) == (recipe == "rowwise")


def test_fault_already_in_bf16_keeps_its_plan_and_is_only_watched(tmp_path: Path) -> None:
    """The plan of a run that follows it is the same plan, and nothing is left to act on."""
    plant = [*drowned("layers.2.up", "weight", **BROKEN), *SETTLED]
    path = write_run(tmp_path / "run", plant=plant)
    facts = json.loads((path / "run.json").read_text(encoding="utf-8"))
    for layer in facts["layers"]:
        layer["bf16_gemms"] = ["fprop"] if layer["layer"] == "layers.2.up" else []
    (path / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    with open_run(path) as run:
        assert [(f.severity, f.layer) for f in run.findings()] == [("watch", "layers.2.up")]
        assert gemms(run.recommendation()) == {"layers.2.up": ["fprop"]}


@pytest.mark.parametrize("options", [{"steps": 5}, {"plant": [{"layer": "*", "tensor": "*", "drop": True}]}])
def test_too_little_evidence_says_how_to_record_more(options: dict[str, Any], tmp_path: Path) -> None:
    """One sampled step, or none at all, calls no run healthy."""
    with open_run(write_run(tmp_path / "run", **options)) as run, pytest.raises(NothingRecordedError) as error:
        run.recommendation()
    assert error.value.exit_code == 3
    assert "attach" in str(error.value)


@pytest.mark.parametrize(
    ("layer", "tensor", "noise", "chosen"),
    [
        ("layers.2.up", "weight", 0.0, ["fprop", "dgrad"]),
        ("layers.2.up", "weight", 1.5, ["fprop", "dgrad"]),
        ("layers.2.down", "input", 0.0, ["fprop", "wgrad"]),
        ("layers.2.down", "input", 1.5, ["fprop"]),
    ],
)
def test_doubtful_progress_counts_for_dgrad_and_not_for_wgrad(
    layer: str, tensor: str, noise: float, chosen: list[str], tmp_path: Path
) -> None:
    """One fall of the loss, clear or drowned in the batches' scatter: a lost wgrad costs only in the first."""
    falling = [
        {"table": "steps", "from_step": step, "to_step": step, "loss": 4.0 - 0.01 * step + noise * (-1) ** step}
        for step in range(200)
    ]
    found = recommended(tmp_path, [*drowned(layer, tensor, impact=0.01, sensitivity=3e-5), *falling])
    assert gemms(found) == {layer: chosen}


def test_where_only_gradients_suffer_and_nothing_was_learned_both_readers_are_kept(tmp_path: Path) -> None:
    """No harm can be told apart: neither dgrad nor wgrad is left out."""
    plant = [{"layer": "layers.1.up", "tensor": "grad_output", "from_step": 80, "underflow_ratio": 0.9}, *SETTLED]
    found = recommended(tmp_path, plant, recipe="current")
    assert gemms(found) == {"layers.1.up": ["dgrad", "wgrad"]}
    assert any("cannot be told GEMM by GEMM" in note for note in found.notes)


def test_layers_that_a_fault_empties_are_named_as_not_seen(tmp_path: Path) -> None:
    """Zeros behind a fault say nothing of what else is wrong: record again with the plan."""
    emptied = {"layer": "layers.2.down", "tensor": "input", "from_step": 101, "zeros_ratio": 1.0}
    found = recommended(tmp_path, [*drowned("layers.2.up", "weight", **BROKEN), emptied, *SETTLED])
    assert any(note.startswith("Nothing but zeros reaches layers.2.down") for note in found.notes)


@pytest.mark.parametrize(("times", "chosen"), [(1.0, ["fprop"]), (100.0, ["fprop", "wgrad"])])
def test_lost_weight_gradient_of_the_layer_that_learns_most_is_in_the_plan(
    times: float, chosen: list[str], tmp_path: Path
) -> None:
    """Whatever its harm: no other layer makes up for it."""
    leading = {"layer": "layers.2.down", "tensor": "grad_weight", "amax_times": times, "rms": 1e-3 * times}
    found = recommended(tmp_path, [*drowned("layers.2.down", "input", **BROKEN), leading, *SETTLED])
    assert gemms(found) == {"layers.2.down": chosen}
