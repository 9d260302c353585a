"""What the efficacy benchmark counts by: effects with their noise, and losses that outlive an interrupted call."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest

from examples.faults.gallery import GALLERY, Case
from tests.benchmarks.predicted import Prediction, print_predictions
from tests.benchmarks.trials import MANY, Effect, Gemm, Ledger, Trial


def test_effect_by_chance_steady_is_held_against_the_usual_noise() -> None:
    """Four values that happen to agree are no proof: the noise is no less than the median of all."""
    found = Trial._effects({"steady": [0.5, 0.5, 0.5, 0.5], "a": [1.0, -1.0, 1.0, -1.0], "b": [2.0, -2.0, 2.0, -2.0]})
    assert found["steady"].mean == pytest.approx(0.5)
    assert found["steady"].noise == found["a"].noise == pytest.approx((4 / 3) ** 0.5)
    assert found["b"].noise == pytest.approx(2 * (4 / 3) ** 0.5)
    assert not found["steady"].matters


def test_effect_that_comes_near_is_measured_over_many_orders() -> None:
    """0.9 in each of four orders, by chance: over twenty it is 0.5 with as much noise."""
    gain = [0.9] * 4 + [0.5 + 0.5 * (-1) ** order for order in range(16)]

    class Known(Trial):
        gemms = [("a", "fprop"), ("b", "fprop")]  # noqa: RUF012  # in place of those of a model
        many = 0

        def losses(self, in_bf16: Collection[Gemm] = (), recipe: str | None = "") -> list[float]:
            Known.many += len(self._orders) == MANY
            better = list(in_bf16) == [("a", "fprop")]
            return [3.0 - better * gain[order] for order in self._orders]

    trial = Known(GALLERY["swiglu_outlier"], Case("small", 0))
    trial.alone = {("a", "fprop"): Effect(0.9, 0.1), ("b", "fprop"): Effect(0.2, 0.1)}
    trial.among_bf16 = dict.fromkeys(trial.gemms, Effect(0.0, 0.0))
    assert trial.surely(("b", "fprop")) == (Effect(0.2, 0.1), Effect(0.0, 0.0))
    assert Known.many == 0
    alone, among = trial.surely(("a", "fprop"))
    assert alone.mean == pytest.approx(np.mean(gain))
    assert alone.noise == pytest.approx(np.std(gain, ddof=1))
    assert not alone.matters
    assert among == Effect(0.0, 0.0)


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
    """Of two GEMMs that matter, one only among BF16, one is in a plan; the third is within chance."""
    none, much = Effect(0.0, 0.1), Effect(1.0, 0.1)
    found = [
        Prediction("fault", ("a", "fprop"), True, 0.5, none, much),
        Prediction("fault", ("b", "fprop"), False, None, much, none),
        Prediction("fault", ("c", "fprop"), True, 0.1, Effect(0.2, 0.1), none),
    ]
    assert print_predictions(found) == 0.5
    assert "of 3 GEMMs 2 have an effect" in capsys.readouterr().out
