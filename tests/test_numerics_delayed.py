"""Delayed scaling's state against Transformer Engine's update kernel, transcribed line by line."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8dbg.errors import UsageError
from fp8dbg.numerics.recipes import DelayedState, recipe_named

FLT_MAX = torch.finfo(torch.float32).max


def te_kernel(history: list[float], scale: float, amax: float, most_recent: bool, largest: float) -> float:
    """delayed_scaling.cu, line by line, on a Python list of float32 values; returns the scale, changes the history."""
    last = amax if amax != 0 else history[0]
    window = 0.0
    if last != 0:
        rolled = []
        for i in range(len(history)):
            a = history[i + 1] if i < len(history) - 1 else last
            if not math.isnan(a):
                window = max(window, a)
            rolled.append(a if i > 0 else 0.0)
        history[:] = rolled
    chosen = last if most_recent else window
    if math.isfinite(chosen) and chosen > 0:
        scale = (torch.tensor(largest) / torch.tensor(chosen)).item()
    return FLT_MAX if math.isinf(scale) else scale


amaxes = st.lists(
    st.sampled_from([0.0, math.inf, math.nan, 2.0**-147, 1.0, 2.0, 100.0]) | st.floats(0, 2.0**100, width=32),
    max_size=12,
)


@given(amaxes, st.integers(1, 5), st.sampled_from(["max", "most_recent"]), st.integers(-2, 3))
def test_delayed_state_is_the_fused_kernel(seen: list[float], length: int, algorithm: str, margin: int) -> None:
    """Scale and history equal a transcription of TE's kernel after every update, for any amaxes."""
    state = DelayedState(recipe_named("delayed", history=length, algorithm=algorithm, margin=margin), "grad_output")
    history, scale = [0.0] * length, 1.0
    for amax in seen:
        scale = te_kernel(history, scale, amax, algorithm == "most_recent", 57344.0 * 2.0**-margin)
        assert state.update(amax) == scale
        assert np.array_equal(state.history, history, equal_nan=True)


def test_observed_amaxes_are_rolled_in_together() -> None:
    """Casts of one step collect their largest amax in slot 0, NaN left out; a reduced amax given takes precedence."""
    state = DelayedState(recipe_named("delayed", history=3), "input")
    for amax in (1.0, 4.0, math.nan, 2.0):
        state.observe(amax)
    assert state.history == [4.0, 0.0, 0.0]
    assert state.update() == 112.0
    assert state.history == [0.0, 0.0, 4.0]
    state.observe(1.0)
    assert state.update(8.0) == 56.0
    assert state.history == [0.0, 4.0, 8.0]


def test_a_step_without_amax_changes_nothing() -> None:
    """An amax of 0 neither rolls the window nor moves the scale."""
    state = DelayedState(recipe_named("delayed", history=2), "input")
    state.update(4.0)
    before = state.state_dict()
    assert state.update(0.0) == 112.0
    assert state.state_dict() == before


def test_initial_until_a_scale_was_set() -> None:
    """The first scale is 1 and said to be initial, also after an update that could not set one."""
    state = DelayedState(recipe_named("delayed"), "input")
    assert (state.scale, state.initial) == (1.0, True)
    state.update(math.inf)
    assert (state.scale, state.initial) == (1.0, True)
    state = DelayedState(recipe_named("delayed"), "input")
    state.update(448.0)
    assert (state.scale, state.initial) == (1.0, False)


def test_delayed_state_saves_and_loads() -> None:
    """A state loaded from JSON goes on exactly as the one saved."""
    recipe = recipe_named("delayed", history=3)
    saved, loaded = DelayedState(recipe, "input"), DelayedState(recipe, "input")
    for amax in (3.0, math.inf, 0.1):
        saved.update(amax)
    loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    for amax in (1.0, 2.0, 0.3, 0.4):
        assert loaded.update(amax) == saved.update(amax)
    assert loaded.state_dict() == saved.state_dict()


def test_loading_another_history_length_is_refused() -> None:
    """The message gives both lengths."""
    state = DelayedState(recipe_named("delayed", history=3), "input")
    with pytest.raises(UsageError, match="holds 2 values, this recipe's 3"):
        state.load_state_dict({"scale": 1.0, "history": [0.0, 1.0], "initial": False})
