"""What the efficacy benchmark counts by: effects with their noise, and losses that outlive an interrupted call."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from examples.faults.gallery import GALLERY, Case
from tests.benchmarks.predicted import Prediction, print_predictions
from tests.benchmarks.trials import Effect, Gemm, Ledger, Trial


def test_effect_by_chance_steady_is_held_against_the_usual_noise() -> None:
    """Four values that happen to agree are no proof: the noise is no less than the median of all."""
    found = Trial._effects({"steady": [0.5, 0.5, 0.5, 0.5], "a": [1.0, -1.0, 1.0, -1.0], "b": [2.0, -2.0, 2.0, -2.0]})
    assert found["steady"].mean == pytest.approx(0.5)
    assert found["steady"].noise == found["a"].noise == pytest.approx((4 / 3) ** 0.5)
    assert found["b"].noise == pytest.approx(2 * (4 / 3) ** 0.5)
    assert not found["steady"].matters


def test_jump_is_planted_once_there_are_scales_that_it_can_clip_against() -> None:
    """On the first step a delayed scale is 1, and what is clipped is nothing; other faults begin with the trial."""
    clipped = Trial(GALLERY["jump_everywhere"], Case("small", 0), orders=1)
    assert clipped.loss() < clipped.loss(recipe=None) - 1.0
    assert Trial(GALLERY["stale_scale"], Case("small", 0))._begins == 0


def test_effect_differs_in_either_direction() -> None:
    """A change that lowers the loss is one, too, but no cost."""
    lower = Effect(-0.4, 0.1)
    assert lower.differs
    assert not lower.matters
    assert not Effect(-0.2, 0.1).differs


def test_ledger_measures_a_loss_once_and_keeps_it(tmp_path: Path) -> None:
    """A second call, in another process, reads what the first wrote."""
    path = tmp_path / "losses.jsonl"
    assert Ledger(path).get("a", lambda: 2.25) == 2.25
    assert Ledger(path).get("a", lambda: 7.0) == 2.25
    assert Ledger().get("a", lambda: 7.0) == 7.0


def test_recall_counts_what_matters_alone_or_unhidden(capsys: pytest.CaptureFixture[str]) -> None:
    """Two matter by the fault, one of them only among BF16; one matters anyway, and one is within chance."""
    none, much = Effect(0.0, 0.1), Effect(1.0, 0.1)
    found = [
        Prediction("fault", ("a", "fprop"), True, 0.5, none, much, True),
        Prediction("fault", ("b", "fprop"), False, None, much, none, True),
        Prediction("fault", ("c", "fprop"), True, 0.1, Effect(0.2, 0.1), none, False),
        Prediction("fault", ("d", "fprop"), False, None, much, none, False),
    ]
    assert print_predictions(found) == 0.5
    said = capsys.readouterr().out
    assert "of 4 GEMMs 3 have an effect" in said
    assert "1 of them in a plan; 2 have it by the fault, 1 of them in a plan" in said


def test_an_effect_that_is_there_without_the_fault_is_not_the_faults() -> None:
    """Of one GEMM's effect a twentieth is there without the fault, of the other's all."""
    losses = {
        "planted": {"all": [3.0, 3.2], "a": [2.0, 2.3], "b": [2.9, 3.1]},
        "nothing": {"all": [2.0, 2.2], "a": [1.9, 2.2], "b": [1.9, 2.1]},
    }

    class Known(Trial):
        gemms = [("a", "fprop"), ("b", "fprop")]  # noqa: RUF012  # in place of those of a model

        def losses(self, in_bf16: Collection[Gemm] = (), recipe: str | None = "") -> list[float]:
            kept = {layer for layer, _ in in_bf16}
            return losses[self.fault.name][kept.pop() if len(kept) == 1 and recipe == "" else "all"]

    trial = Known(replace(GALLERY["swiglu_outlier"], name="planted"), Case("small", 0), orders=2)
    trial.well = Known(replace(trial.fault, name="nothing"), trial.case, orders=2)
    trial.alone = {gemm: Effect(mean, 0.02) for gemm, mean in zip(trial.gemms, (0.95, 0.1), strict=True)}
    trial.among_bf16 = dict.fromkeys(trial.gemms, Effect(0.0, 0.02))
    assert trial.by_fault(("a", "fprop"))
    assert trial.alone["b", "fprop"].matters
    assert not trial.by_fault(("b", "fprop"))
