from __future__ import annotations

from typing import Any

import pytest

from fp8dbg.analysis.limits import DEVIATIONS, Rule, noise_floor

RULE = Rule("rel_l2", 2.0, 4.0, "the format's noise")


def limit(usual: float | None, spread: float | None = 0.0) -> float:
    return RULE.limit({"usual_rel_l2": usual, "spread_rel_l2": spread}, scale=0.01).value


def test_floor_holds_where_the_window_is_quieter_than_the_format() -> None:
    """A window far below the floor does not tighten the limit: the format's noise is no fault."""
    assert limit(0.001, 0.0001) == pytest.approx(0.02)


def test_noisy_but_healthy_window_widens_the_limit_up_to_the_cap() -> None:
    """Median plus eight robust deviations, never beyond the cap."""
    assert limit(0.015, 0.001) == pytest.approx(0.015 + DEVIATIONS * 1.4826 * 0.001)
    assert limit(0.015, 1.0) == pytest.approx(0.04)


def test_a_window_that_is_itself_at_fault_is_not_believed() -> None:
    """A fault from the first step on cannot hide in the run's own window."""
    assert limit(0.5, 0.3) == pytest.approx(0.02)


def test_no_window_leaves_the_floor() -> None:
    """Too few steps for a window, or a figure that never existed in it."""
    assert limit(None, None) == pytest.approx(0.02)


def test_basis_says_where_the_limit_comes_from() -> None:
    """From the format, or from the run's own window, with the figures."""
    assert "the format's noise" in RULE.limit({"usual_rel_l2": 0.001, "spread_rel_l2": 0.0}).basis
    own = RULE.limit({"usual_rel_l2": 0.015, "spread_rel_l2": 0.001}, scale=0.01).basis
    assert own == "its own healthy window: median rel_l2 0.015, limit rel_l2 0.027"


@pytest.mark.parametrize(
    ("row", "floor"),
    [
        ({"format": "e4m3", "recipe": "delayed"}, 0.0265),
        ({"format": "e5m2", "recipe": "current"}, 0.0526),
        ({"format": "e2m1", "recipe": "nvfp4:stochastic"}, 2 * 0.095),
        ({"format": "e4m3", "recipe": None}, 0.0265),
        ({"format": "posit8", "recipe": "x"}, None),
        ({"format": None, "recipe": None}, None),
    ],
)
def test_noise_floor_is_the_formats(row: dict[str, Any], floor: float | None) -> None:
    """metrics.md's healthy table; stochastic rounding may have twice the error; unknown formats have none."""
    assert noise_floor(row) == floor
