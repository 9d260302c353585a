"""The loss of two runs: noise, openings, drifts, and runs that learned nothing."""

from __future__ import annotations

import numpy as np
import pytest

from fp8dbg.analysis.loss_gap import Floats, LossGap, has_learned, loss_gap

STEPS = 300


def falling(seed: int, noise: float = 0.1, steps: int = STEPS, correlation: float = 0.0) -> Floats:
    """A loss from 5 to 2 with Gaussian noise, whose neighbours are correlated where asked for."""
    random = np.random.default_rng(seed)
    noises = random.normal(0, noise, steps)
    for i in range(1, steps):
        noises[i] = correlation * noises[i - 1] + np.sqrt(1 - correlation**2) * noises[i]
    return np.asarray(2 + 3 * np.exp(-np.arange(steps) / 20) + noises)


def gap_of(a: Floats, b: Floats, interval: int = 10) -> LossGap:
    found = loss_gap(range(len(a)), a, b, interval)
    assert found is not None
    return found


def test_the_noise_is_that_of_a_step() -> None:
    """Two losses of noise 0.1 have a gap of noise 0.1 x sqrt 2, and no autocorrelation."""
    found = gap_of(falling(0), falling(1))
    assert found.noise == pytest.approx(0.141, rel=0.2)
    assert found.inflation < 2


@pytest.mark.parametrize("correlation", [0.0, 0.6, 0.9])
def test_other_seeds_are_the_same(correlation: float) -> None:
    """Of 60 pairs none differs, also where batches are correlated: the band widens with them."""
    losses = [falling(seed, 0.1, 800, correlation) for seed in range(120)]
    pairs = [gap_of(a, b) for a, b in zip(losses[::2], losses[1::2], strict=True)]
    assert sum(pair.differs or pair.drifts for pair in pairs) == 0


def test_correlated_steps_widen_the_band() -> None:
    """Means over correlated steps scatter more than their number promises."""
    plain, tied = (gap_of(falling(0, 0.3, 900, c), falling(1, 0.3, 900, c)) for c in (0.0, 0.9))
    assert tied.inflation > 2 * plain.inflation


@pytest.mark.parametrize("at", [60, 123, 240])
def test_a_jump_opens_the_gap_at_its_step(at: int) -> None:
    """A loss 1 higher from a step on is dated to within a window, and ends beyond the band."""
    b = falling(1)
    b[at:] += 1.0
    found = gap_of(falling(0), b)
    assert found.opening is not None
    assert abs(found.opening.step - at) <= 10
    assert found.differs


def test_a_slow_drift_is_seen_at_the_end() -> None:
    """0.004 a step from step 150 on: the tail is beyond its band and still moves."""
    b = falling(1)
    b[150:] += 0.004 * np.arange(STEPS - 150)
    found = gap_of(falling(0), b)
    assert found.differs
    assert found.drifts
    assert found.tail_slope == pytest.approx(0.004, rel=0.2)


def test_a_loss_that_stops_being_finite_opens_the_gap_there() -> None:
    """None against a number is no noise."""
    b = falling(1)
    b[77:] = np.nan
    found = gap_of(falling(0), b)
    assert found.opening is not None
    assert (found.opening.step, found.opening.gap, found.tail_gap) == (77, None, None)


def test_a_steep_start_a_few_steps_late_is_no_difference() -> None:
    """A fall by 3 within 20 steps makes a large gap of a small delay."""
    a = falling(0)
    assert gap_of(a, np.concatenate([a[:2], a[:-2]])).opening is None


def test_few_steps_say_nothing() -> None:
    """Below twenty common steps with a loss there is no gap."""
    assert loss_gap(range(19), falling(0, steps=19), falling(1, steps=19)) is None


@pytest.mark.parametrize(("level", "noise"), [(5.0, 0.3), (5.0, 0.0), (0.0, 0.1)])
def test_a_flat_loss_never_learned(level: float, noise: float) -> None:
    """Noise about a level, and a level without noise."""
    for seed in range(20):
        assert not has_learned(level + np.random.default_rng(seed).normal(0, noise, 400))


def test_a_loss_that_fell_and_rose_again_did_learn() -> None:
    """Whether it learned is about the best, not the end."""
    assert has_learned(np.concatenate([falling(0, steps=100), np.full(100, 6.0)]))
