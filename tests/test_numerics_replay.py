"""Delayed scaling replayed at once, against the state that is updated one amax at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8dbg.numerics.recipes import DelayedState, recipe_named
from fp8dbg.numerics.replay import replay

AMAX = st.one_of(
    st.floats(0.0, 1e4, width=32),
    st.sampled_from([0.0, math.inf, 1e-36, 3.0e38, 1.0]),
)


def one_by_one(recipe: str, role: str, amaxes: list[float]) -> list[float]:
    """The slow way; NaN for a scale that no update has set."""
    state = DelayedState(recipe_named(recipe), role)
    scales = []
    for amax in amaxes:
        scales.append(math.nan if state.initial else state.scale)
        state.update(amax)
    return scales


@given(
    amaxes=st.lists(AMAX, max_size=40),
    history=st.integers(1, 6),
    margin=st.integers(-2, 3),
    algorithm=st.sampled_from(["max", "most_recent"]),
    role=st.sampled_from(["input", "grad_output"]),
)
@settings(deadline=None)
def test_every_scale_is_bit_for_bit_the_states(
    amaxes: list[float], history: int, margin: int, algorithm: str, role: str
) -> None:
    """Zeros roll nothing, Inf holds the scale, spikes leave with the window, whatever the history and margin."""
    recipe = f"delayed:history={history},margin={margin},algorithm={algorithm}"
    wanted = np.asarray(one_by_one(recipe, role, amaxes))
    assert np.array_equal(replay(recipe_named(recipe), role, amaxes), wanted, equal_nan=True)


@pytest.mark.parametrize(
    ("amaxes", "scales"),
    [
        ([1, 2, math.inf, 1, 1, 1, 1, 1], [448, 224, 224, 224, 224, 224, 448]),
        ([1, 100, 1, 1, 1, 1, 1], [448, 4.48, 4.48, 4.48, 4.48, 448]),
    ],
)
def test_known_series(amaxes: list[float], scales: list[float]) -> None:
    """History 4, max: Inf in the window keeps the scale, a spike keeps it small, until either has left."""
    found = replay(recipe_named("delayed:history=4"), "input", amaxes)
    assert math.isnan(found[0])
    assert found[1:].tolist() == [float(np.float32(s)) for s in scales]
