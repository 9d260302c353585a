"""Whether another recipe would have been better, from figures between bounds."""

from __future__ import annotations

import pytest

from fp8dbg.analysis.whatif import Answer
from fp8dbg.analysis.whatif_scales import Clips
from fp8dbg.analysis.whatif_tally import Between
from fp8dbg.analysis.whatif_verdict import conclusion, deciding, side

Figures = dict[str, Between | None]


def figures(underflow: Between = (0.0, 0.0), rel_l2: Between = (0.026, 0.026), saturated: float = 0.0) -> Figures:
    """Of one cast."""
    return {"underflow_ratio": underflow, "saturated_ratio": (saturated, saturated), "rel_l2": rel_l2}


@pytest.mark.parametrize(
    ("now", "then", "figure", "expected"),
    [
        (figures((0.4, 0.4)), figures(), "underflow_ratio", "better"),
        (figures(), figures((0.4, 0.4)), "underflow_ratio", "worse"),
        (figures((0.40, 0.40), (0.2, 0.2)), figures((0.43, 0.43)), "underflow_ratio", "same"),
        (figures((0.4, 0.4)), figures((0.0, 0.43)), "underflow_ratio", "unknown"),
        (figures((0.4, 0.4)), figures((0.0, 0.1)), "underflow_ratio", "better"),
        (figures(saturated=0.3), figures(), "saturated_ratio", "better"),
        (figures(), figures(), "rel_l2", "same"),
        (figures(), figures(rel_l2=(0.053, 0.053)), "rel_l2", "worse"),
        (figures(), figures((0.0, 0.3), (0.0, 0.09)), "rel_l2", "unknown"),
    ],
)
def test_a_recipe_is_judged_by_what_is_lost_then_by_its_error(
    now: Figures, then: Figures, figure: str, expected: str
) -> None:
    """An outlier hides loss from rel_l2, so shares past their limit come first; wide bounds answer nothing."""
    assert deciding(now, then) == figure
    assert side(now, then) == expected


def test_what_has_no_figure_is_unknown() -> None:
    """Only the clipped steps are known of it."""
    assert side(figures(), {"underflow_ratio": None, "saturated_ratio": None, "rel_l2": None}) == "unknown"


def _answer(tensor: str, now: Figures, then: Figures) -> Answer:
    return Answer("up", tensor, "bounds", 9, "delayed", True, now, then, Clips(0, 0, 9))


def test_the_conclusion_names_what_loses_most() -> None:
    """One sentence for what is known, one for what is not, with how to record it."""
    known = [_answer("weight", figures((0.4, 0.4)), figures()), _answer("input", figures(), figures())]
    assert conclusion("mxfp8", known, "codes") == (
        "mxfp8 would have been better for 1 of 2 tensors (up weight: underflow_ratio 40 % → 0 %), "
        "no different for 1 of 2 tensors (up input: rel_l2 0.026 → 0.026)."
    )
    open_ones = [_answer(role, figures((0.4, 0.4)), figures((0.0, 0.5))) for role in ("weight", "input")]
    assert conclusion("mxfp8", open_ones, "attach(what_if=['mxfp8'])") == (
        "Whether mxfp8 is better for up weight and 1 more of 2 tensors cannot be told from what was recorded: "
        "record again with attach(what_if=['mxfp8'])."
    )
