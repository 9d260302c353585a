"""A part of the gallery of planted faults; ``python -m tests.benchmarks.faults`` does the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8dbg
from examples.faults.gallery import EVERY, GALLERY, Case, record, record_healthy
from examples.faults.lab import SIZES, resume, trained
from fp8dbg.analysis.run import open_run
from tests.benchmarks.faults import score

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Mismatch dtype"),
]

CASE = Case("small", 1)


@pytest.mark.parametrize("name", ["swiglu_outlier", "stale_scale", "dead_layer"])
def test_planted_fault_is_ranked_first_with_its_onset_and_action(name: str, tmp_path: Path) -> None:
    """One fault for each kind of answer: BF16, another setting of the recipe, the program."""
    with open_run(record(tmp_path / "run", GALLERY[name], CASE)) as run:
        got = score(run, GALLERY[name], CASE)
    assert (got.verdict, got.place, got.onset, got.action) == (True, True, True, True), got.said


@pytest.mark.parametrize(("recipe", "in_force"), [("delayed:history=16", True), ("mxfp8", False)])
def test_healthy_run_has_nothing_to_act_on(recipe: str, in_force: bool, tmp_path: Path) -> None:
    """FP8 in force, and BF16 compared with FP8."""
    with open_run(record_healthy(tmp_path / "run", recipe, in_force, CASE)) as run:
        assert [f for f in run.findings() if f.severity == "act"] == []
        assert not run.recommendation().plan


def test_plan_that_is_applied_stays_the_plan_and_leaves_nothing_to_act_on(tmp_path: Path) -> None:
    """Recorded again with the plan in force, the fault is watched and the plan is the same."""
    fault = GALLERY["swiglu_outlier"]
    with open_run(record(tmp_path / "before", fault, CASE)) as run:
        plan = run.plan()
    scene = resume(trained(SIZES[CASE.size], CASE.seed), fault.recipe, plan.as_fallback())
    with fp8dbg.attach(scene.model, tmp_path / "after", optimizer=scene.optimizer, every=EVERY) as session:
        fault.plant(scene, CASE)
        for _ in range(24):
            session.log(loss=scene.step())
    with open_run(tmp_path / "after") as run:
        assert [f for f in run.findings() if f.severity == "act"] == []
        assert {entry.layer: entry.gemms for entry in run.plan().entries} == {e.layer: e.gemms for e in plan.entries}
