from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8dbg.analysis.run import open_run
from fp8dbg.analysis.summary import Summary, summarise
from tests.synthetic import amax_jump, dead_layer, loss_spike, non_finite, outlier, swiglu_outlier, write_run


def summary_of(path: Path, **options: Any) -> Summary:
    return summarise(open_run(write_run(path / "run", **options)))


def test_healthy_run_is_called_healthy(tmp_path: Path) -> None:
    """No finding, an empty plan, and a headline that says what was looked at."""
    summary = summary_of(tmp_path)
    assert summary.healthy
    assert not summary.plan
    assert summary.headline == "Healthy: nothing found in 20 layers over 20 sampled steps."


def test_planted_layers_come_first_with_their_onset_and_then_the_jump(tmp_path: Path) -> None:
    """The demo's two faults: both planted layers first, dated; the jump after them, dated."""
    summary = summary_of(tmp_path, plant=swiglu_outlier(2, 103) + amax_jump(157))
    first, second, third = summary.findings
    assert {first.layer, second.layer} == {"layers.2.up", "layers.2.down"}
    assert (first.first_step, second.first_step) == (103, 103)
    assert (third.code, third.first_step) == ("saturation", 157)
    assert [e.layer for e in summary.plan.entries] == [first.layer, second.layer]
    assert summary.headline == (
        "layers.2.up: 97 % of weight is flushed to zero since step 103: its largest value is 7,000,000 times the "
        "median; keep layers.2.up and layers.2.down in BF16."
    )


def test_a_loss_spike_is_never_called_healthy(tmp_path: Path) -> None:
    """Nothing else moved: there is nothing to act on, and the headline says that the loss spiked, and when."""
    summary = summary_of(tmp_path, plant=loss_spike(150))
    assert not any(f.severity in ("act", "watch") for f in summary.findings)
    assert not summary.healthy
    assert summary.headline == (
        "Nothing to act on, but the loss spiked on step 150: no figure of any layer moved before step 150: look at the "
        "data first."
    )


def test_a_spike_of_a_bf16_run_is_put_down_to_what_moved_not_to_casts_that_never_were(tmp_path: Path) -> None:
    """Compared with FP8 only: an activation's rms tells, what the cast would have clipped does not."""
    moved = [{"layer": "layers.1.down", "tensor": "input", "from_step": 150, "to_step": 150, "rms": 80.0}]
    clipped = [{"layer": "layers.0.gate", "tensor": "input", "from_step": 150, "to_step": 150, "saturated_ratio": 0.2}]
    (spike,) = summary_of(tmp_path, what_if=True, plant=loss_spike(150) + moved + clipped).spikes
    assert [(m["layer"], m["tensor"], m["figure"]) for m in spike.first_movers] == [("layers.1.down", "input", "rms")]


@pytest.mark.parametrize("steps", [1, 11])
def test_a_run_hardly_looked_at_is_not_called_healthy(steps: int, tmp_path: Path) -> None:
    """One and two sampled steps without a finding: too little, and what to do about it."""
    summary = summary_of(tmp_path, steps=steps, every=10)
    assert not summary.healthy
    assert summary.headline.startswith(f"Too little to judge: {summary.run.sampled_steps} sampled of {steps} steps.")


def test_the_headline_names_the_layer_that_hurts_the_loss_not_the_one_that_loses_most(tmp_path: Path) -> None:
    """A quarter of an input, which the loss feels, is before nearly all of a gradient, which it hardly does."""
    values, gemm = outlier("layers.0.gate", "input", 100)
    origin = [{**values, "underflow_ratio": 0.25, "rel_l2": 0.3}, {**gemm, "impact": 1.0}]
    symptom = {"layer": "layers.3.down", "tensor": "grad_output", "from_step": 100, "underflow_ratio": 0.97}
    summary = summary_of(tmp_path, plant=[symptom | {"rel_l2": 0.3}, *origin])
    first, second = summary.findings
    assert (first.layer, second.layer) == ("layers.0.gate", "layers.3.down")
    assert second.harm > 2 * first.harm
    assert first.gemm_harm == pytest.approx(1.0, rel=1e-3)
    assert second.gemm_harm == pytest.approx(0.029, rel=0.05)
    assert summary.headline.startswith("layers.0.gate: 25 % of input")
    assert first.remedy.endswith("The plan takes its fprop alone: the loss hardly feels wgrad.")


def test_run_facts(tmp_path: Path) -> None:
    """What was run, as recorded."""
    run = summary_of(tmp_path, steps=120, every=10, ranks=2).run
    assert (run.state, run.first_step, run.last_step, run.steps) == ("finished", 0, 119, 120)
    assert (run.sampled_steps, run.ranks, run.layers) == (12, [0, 1], 20)
    assert (run.hosts, run.recipes, run.what_if, run.formats) == (["simulated"], ["delayed"], [], ["e4m3", "e5m2"])
    assert run.overhead_share == pytest.approx(0.01)
    assert run.fingerprint["schema_version"] == 1


@pytest.mark.parametrize("plant", [(), swiglu_outlier(), non_finite(), dead_layer(), amax_jump(155)])
def test_summary_is_plain_json(plant: list[dict[str, Any]], tmp_path: Path) -> None:
    """--json prints it: no NaN, no type that JSON lacks, and the same keys whatever was found."""
    data = json.loads(json.dumps(summary_of(tmp_path, plant=plant).to_dict(), allow_nan=False))
    assert list(data) == ["run", "coverage", "headline", "healthy", "findings", "spikes", "worst", "plan"]


def test_worst_tensors_are_ordered_by_what_they_lost(tmp_path: Path) -> None:
    """The planted tensors lead, with how far they are above their format's floor."""
    worst = summary_of(tmp_path, plant=swiglu_outlier()).worst
    assert {(r["layer"], r["tensor"]) for r in worst[:2]} == {("layers.2.up", "weight"), ("layers.2.down", "input")}
    assert worst[0]["excess"] > 0.9
    assert worst[2]["excess"] < 0.1


def test_nothing_recorded_is_said(tmp_path: Path) -> None:
    """A run of steps without figures is neither healthy nor an error."""
    nothing = [{"layer": "*", "tensor": "*", "drop": True}, {"layer": "*", "gemm": "*", "drop": True}]
    summary = summary_of(tmp_path, plant=nothing)
    assert not summary.healthy
    assert summary.headline.startswith("No figures were recorded: of 200 steps none was sampled.")
    assert summary.run.sampled_steps == 0


def test_run_without_a_row_is_summarised(tmp_path: Path) -> None:
    """An attach that never saw a step: every part of the summary exists."""
    summary = summary_of(tmp_path, steps=0)
    assert [f.code for f in summary.findings] == ["nothing_recorded"]
    assert (summary.run.steps, summary.run.first_loss, summary.spikes, summary.worst) == (0, None, [], [])


def test_notes_say_what_the_figures_cannot(tmp_path: Path) -> None:
    """A BF16 run, without losses or GEMMs: three notes, and still healthy."""
    summary = summary_of(
        tmp_path, what_if=True, plant=[{"table": "steps", "loss": None}, {"layer": "*", "gemm": "*", "drop": True}]
    )
    assert summary.healthy
    assert [note.split(":")[0] for note in summary.coverage.notes] == [
        "No layer computes in FP8",
        "No loss was recorded",
        "No GEMM was measured",
    ]


def test_a_killed_run_is_summarised_as_far_as_it_got(tmp_path: Path) -> None:
    """What the journals hold counts; the state says that it was not closed."""
    summary = summary_of(tmp_path, close=False, plant=swiglu_outlier())
    assert summary.run.state in ("alive", "killed")
    assert [f.code for f in summary.findings] == ["outlier", "outlier"]
