from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fp8dbg.analysis.run import open_run
from fp8dbg.analysis.spikes import LONE_SCORE, SCORE, Spike, find_spikes, robust_scores, stretches
from tests.synthetic import amax_jump, write_run
from tests.synthetic_tables import Plant


def spikes_of(tmp_path: Path, *plants: Plant) -> list[Spike]:
    return find_spikes(open_run(write_run(tmp_path / "run", plant=plants)).evidence)


@pytest.mark.parametrize("seed", range(20))
def test_noise_on_a_falling_loss_is_no_spike(seed: int) -> None:
    """Gaussian and heavier-tailed (Student, 12 degrees) noise on an exponential fall, 3,000 steps each."""
    random = np.random.default_rng(seed)
    fall = 1.7 + 3 * np.exp(-np.arange(3000) / 200)
    for noise in (random.normal(0, 0.03, 3000), random.standard_t(12, 3000) * 0.02):
        assert np.nanmax(robust_scores(fall + noise)) < SCORE


def test_a_loss_without_noise_has_no_spike() -> None:
    """Where the spread is 0, a rise of a hair's width must not score without bound."""
    loss = np.full(200, 2.0)
    loss[150] = 2.001
    assert np.nanmax(robust_scores(loss)) == 0


@pytest.mark.parametrize(("height", "found"), [(4.0, [(150, 150)]), (1.0, [])])
def test_a_loss_that_none_came_near_needs_a_lower_score(height: float, found: list[tuple[int, int]]) -> None:
    """Losses of small batches wander by a sixth: 6 after 2 is a spike all the same, and a hard batch is none."""
    loss = np.random.default_rng(0).normal(2.0, 0.33, 200)
    loss[150] = 2.0 + height
    scores = robust_scores(loss)
    assert LONE_SCORE * (height / 4) < scores[150] < SCORE
    assert stretches(loss, scores) == found


@pytest.mark.parametrize("seed", range(20))
def test_hard_batches_are_no_spike(seed: int) -> None:
    """One batch in fifty rises twice as far, 1,000 steps: the window has had others of its kind."""
    random = np.random.default_rng(seed)
    loss = 2.0 + random.gamma(2.0, 0.2, 1000) * np.where(random.random(1000) < 0.02, 2.0, 1.0)
    assert stretches(loss, robust_scores(loss)) == []


def test_spike_is_dated_and_scored(tmp_path: Path) -> None:
    """One step 2.5 times its neighbours: that step, its loss, far beyond the threshold."""
    (spike,) = spikes_of(tmp_path, {"table": "steps", "from_step": 150, "to_step": 150, "loss_times": 2.5})
    assert (spike.step, spike.last_step) == (150, 150)
    assert spike.loss == pytest.approx(2.5 * 1.9, rel=0.1)
    assert spike.score is not None
    assert spike.score > 50


def test_spike_of_several_steps_is_one(tmp_path: Path) -> None:
    """Its first step dates it, its last step ends it."""
    (spike,) = spikes_of(tmp_path, {"table": "steps", "from_step": 120, "to_step": 124, "loss_times": 2.0})
    assert (spike.step, spike.last_step) == (120, 124)


def test_loss_that_ceases_to_be_finite_is_a_spike_without_a_score(tmp_path: Path) -> None:
    """NULL from step 121 on is one spike that lasts."""
    (spike,) = spikes_of(tmp_path, {"table": "steps", "from_step": 121, "loss": None})
    assert (spike.step, spike.last_step, spike.loss, spike.score) == (121, 199, None, None)


def test_loss_that_was_never_logged_has_no_spike(tmp_path: Path) -> None:
    """No loss is not a NaN loss."""
    assert spikes_of(tmp_path, {"table": "steps", "loss": None}) == []


def test_loss_logged_from_some_step_on_has_no_spike_before(tmp_path: Path) -> None:
    """Steps before the first loss are unknown, not lost."""
    assert spikes_of(tmp_path, {"table": "steps", "to_step": 30, "loss": None}) == []


def test_first_movers_come_first_with_their_lead(tmp_path: Path) -> None:
    """The layer whose amax jumped five steps before the loss leads, with what it did to the cast when sampled."""
    early = amax_jump(145, layer="layers.1.down", until=149)
    late = amax_jump(150, layer="layers.3.up")
    loss: Plant = {"table": "steps", "from_step": 150, "to_step": 150, "loss_times": 3.0}
    (spike,) = spikes_of(tmp_path, loss, *early, *late)
    first = spike.first_movers[0]
    assert (first["layer"], first["tensor"], first["figure"]) == ("layers.1.down", "input", "amax")
    assert (first["first_step"], first["steps_before"]) == (145, 5)
    assert first["value"] == pytest.approx(30 * first["usual"], rel=0.2)
    assert {m["layer"] for m in spike.first_movers} == {"layers.1.down", "layers.3.up"}


def test_a_data_spike_moves_nothing_first(tmp_path: Path) -> None:
    """A loss spike alone leaves the list empty."""
    (spike,) = spikes_of(tmp_path, {"table": "steps", "from_step": 150, "to_step": 150, "loss_times": 3.0})
    assert spike.first_movers == []


def test_what_moved_on_one_step_is_told_in_execution_order(tmp_path: Path) -> None:
    """Forward before backward, whatever moved furthest; backward from the last layer; the sentence says it is a tie."""
    loss: Plant = {"table": "steps", "from_step": 150, "to_step": 150, "loss_times": 3.0}
    jumps = [
        {"layer": layer, "tensor": tensor, "from_step": 150, "to_step": 150, "amax_times": times}
        for layer, tensor, times in (
            ("layers.0.gate", "grad_output", 5000.0),
            ("layers.3.up", "grad_output", 900.0),
            ("layers.1.down", "input", 30.0),
        )
    ]
    (spike,) = spikes_of(tmp_path, loss, *jumps)
    order = dict.fromkeys((m["layer"], m["tensor"]) for m in spike.first_movers)
    assert list(order) == [
        ("layers.1.down", "input"),
        ("layers.3.up", "grad_output"),
        ("layers.0.gate", "grad_output"),
    ]
    assert spike.first_move().endswith(
        "of layers.1.down input moved first in execution order of all that moved on step 150"
    )


def test_an_earlier_step_is_first_without_a_tie(tmp_path: Path) -> None:
    """A later layer that moved five steps before is simply first."""
    loss: Plant = {"table": "steps", "from_step": 150, "to_step": 150, "loss_times": 3.0}
    early = amax_jump(145, layer="layers.3.up", until=149)
    (spike,) = spikes_of(tmp_path, loss, *early, *amax_jump(150, layer="layers.0.gate"))
    assert spike.first_move() == "amax of layers.3.up input moved first, on step 145"


def test_what_had_moved_long_before_is_not_first(tmp_path: Path) -> None:
    """A figure out of its range since step 120, of which the usual range knows nothing yet, did not move at 145."""
    loss: Plant = {"table": "steps", "from_step": 150, "to_step": 150, "loss_times": 3.0}
    long_before = {"layer": "layers.1.down", "tensor": "input", "from_step": 120, "amax_times": 30.0}
    (spike,) = spikes_of(tmp_path, loss, long_before)
    assert spike.first_movers == []
    later = tmp_path / "later"
    (spike,) = spikes_of(later, loss, long_before, *amax_jump(150, layer="layers.3.up"))
    assert {(m["layer"], m["first_step"]) for m in spike.first_movers} == {("layers.3.up", 150)}


@pytest.mark.parametrize(("times", "moved"), [(3.0, False), (30.0, True)])
def test_what_has_just_been_as_far_away_by_itself_is_no_mover(times: float, moved: bool, tmp_path: Path) -> None:
    """An amax that was three times its usual at 130 and 137 is so again at 145; only ten times as far tells."""
    loss: Plant = {"table": "steps", "from_step": 150, "to_step": 150, "loss_times": 3.0}
    wandering = [plant for step in (130, 137) for plant in amax_jump(step, 3.0, "layers.1.down")]
    (spike,) = spikes_of(tmp_path, loss, *wandering, *amax_jump(145, times, "layers.1.down"))
    assert [(m["figure"], m["first_step"]) for m in spike.first_movers[:1]] == [("amax", 145)] * moved


@pytest.mark.parametrize(("tensor", "moved"), [("grad_weight", False), ("weight", True)])
def test_the_kurtosis_of_a_gradient_is_no_sign(tensor: str, moved: bool, tmp_path: Path) -> None:
    """It swings by a factor of 20 in healthy training; that of a weight does not."""
    loss: Plant = {"table": "steps", "from_step": 150, "to_step": 150, "loss_times": 3.0}
    heavy: Plant = {"layer": "layers.1.down", "tensor": tensor, "from_step": 150, "to_step": 150, "kurtosis": 400.0}
    (spike,) = spikes_of(tmp_path, loss, heavy)
    assert [m["figure"] for m in spike.first_movers] == (["kurtosis"] if moved else [])


def test_a_tensor_that_became_all_zero_moved(tmp_path: Path) -> None:
    """Its sizes have no logarithm and its cast loses nothing: its zeros tell."""
    loss: Plant = {"table": "steps", "from_step": 150, "to_step": 150, "loss_times": 3.0}
    zero: Plant = {"layer": "layers.1.down", "tensor": "input", "from_step": 150, "zeros_ratio": 1.0}
    (spike,) = spikes_of(tmp_path, loss, zero)
    first = spike.first_movers[0]
    assert (first["layer"], first["tensor"], first["figure"], first["value"]) == (
        "layers.1.down",
        "input",
        "zero_ratio",
        1.0,
    )
