from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fp8dbg.analysis.finding import SEVERITIES, Finding, fold, worst_first
from fp8dbg.analysis.plan import Plan, PlanEntry
from fp8dbg.analysis.run import as_planned, gather, origins_first
from fp8dbg.analysis.wording import factor, listed, percent, period, times


def finding(code: str = "underflow", **fields: Any) -> Finding:
    given: dict[str, Any] = {
        "title": "t",
        "severity": "act",
        "layer": "a",
        "tensor": "input",
        "gemm": None,
        "first_step": 10,
        "last_step": 20,
        "summary": "s.",
        "basis": "b",
        "remedy": "r",
        "action": "bf16",
        "harm": 1.0,
    }
    return Finding(code=code, **(given | fields))


EXPLAINS = {"outlier": frozenset({"saturation"})}


def test_severity_comes_before_harm() -> None:
    """A harmless finding to act on is listed before a harmful one to watch."""
    act, watch = finding(harm=0.1), finding(severity="watch", harm=5.0)
    assert worst_first([watch, act]) == [act, watch]


@given(st.permutations([finding(harm=h, layer=name) for h in (0.1, 0.2) for name in "abc"]))
def test_order_does_not_depend_on_the_order_given(findings: list[Finding]) -> None:
    """The same run always gets the same report."""
    assert [(f.harm, f.layer) for f in worst_first(findings)] == [(h, n) for h in (0.2, 0.1) for n in "abc"]


def test_effect_is_folded_into_its_cause() -> None:
    """The cause stays, with the effect's code and evidence and the graver severity."""
    cause = finding("outlier", severity="watch", evidence=[{"x": 1}])
    effect = finding("saturation", severity="act", first_step=15, last_step=15, evidence=[{"y": 2}])
    (only,) = fold([effect, cause], EXPLAINS)
    assert (only.code, only.severity, only.folded) == ("outlier", "act", ("saturation",))
    assert only.evidence == [{"x": 1}, {"y": 2}]


def test_effect_on_another_tensor_or_at_another_time_stays() -> None:
    """What happened elsewhere or earlier has a cause of its own."""
    cause = finding("outlier")
    elsewhere = finding("saturation", tensor="weight")
    before = finding("saturation", first_step=1, last_step=5)
    assert fold([cause, elsewhere, before], EXPLAINS) == [cause, elsewhere, before]


def test_one_event_in_many_layers_is_one_finding_of_the_first_layer() -> None:
    """A batch that clips three layers is named after the first in execution order that is hit hard."""
    hit = [
        finding("saturation", action="scale", layer=name, harm=h) for name, h in (("a", 0.1), ("b", 0.9), ("c", 1.0))
    ]
    (only,) = gather(hit, {"a": 0, "b": 1, "c": 2})
    assert (only.layer, only.harm) == ("b", 1.0)
    assert "c input and a input" in only.summary


def test_findings_that_call_for_bf16_stay_apart() -> None:
    """The plan needs an entry for each."""
    found = [finding(layer="a"), finding(layer="b")]
    assert gather(found, {"a": 0, "b": 1}) == found


def test_origin_comes_before_its_symptom_by_what_the_loss_feels() -> None:
    """The gradient lost whole, which the loss hardly feels, is behind the input lost a little, which it does."""
    origin = finding(layer="fc1", first_step=100, harm=0.025, gemm_harm=2.2)
    symptom = finding(layer="fc2", tensor="grad_output", first_step=102, harm=0.97, gemm_harm=0.085)
    assert origins_first([symptom, origin], {"fc1": 0, "fc2": 1}) == [origin, symptom]


def test_near_ties_are_told_apart_by_onset_then_execution() -> None:
    """Where GEMM harm is not known of all, by the share lost; what asks for something else keeps its place."""
    last = finding(layer="c", harm=1.0, gemm_harm=9.0)
    first, early = finding(layer="a", harm=0.9), finding(layer="b", harm=0.7, first_step=9)
    small, other = (
        finding(layer="a", tensor="weight", harm=0.1, first_step=1),
        finding("dead_tensor", action="software"),
    )
    order = {"a": 0, "b": 1, "c": 2}
    assert origins_first([last, other, first, early, small], order) == [early, other, first, last, small]


def test_symptoms_of_one_code_are_behind_the_first_layer() -> None:
    """Two clipped inputs, as bad as each other: the one that was clipped first, whatever their decimals say."""
    late = finding("saturation", layer="fc2", action="scale", harm=1.04, first_step=101)
    early = finding("saturation", layer="fc1", action="scale", harm=1.03, first_step=100)
    assert origins_first([late, early], {"fc1": 0, "fc2": 1}) == [early, late]


def test_a_remedy_says_what_the_plan_says() -> None:
    """Of a layer's GEMMs those that the plan takes; a layer that it leaves alone; and what it never weighed."""
    asked = finding(remedy="Keep fprop and wgrad of a in BF16.", gemms=("fprop", "wgrad"))
    weighed = {("a", "fprop"), ("a", "wgrad")}
    plan = Plan((PlanEntry("a", ("fprop",), reason=""),))
    assert as_planned(asked, plan, weighed).remedy == (
        "Keep fprop and wgrad of a in BF16. The plan takes its fprop alone: the loss hardly feels wgrad."
    )
    spared = as_planned(asked, Plan((PlanEntry("b", ("fprop",), reason=""),)), weighed)
    assert spared.remedy.startswith("Apply the plan: it leaves fprop and wgrad of this layer in FP8")
    assert as_planned(asked, plan, {("a", "fprop")}) == asked
    assert as_planned(asked, Plan(), weighed) == asked


def test_words_for_figures() -> None:
    """Right words for known figures; a share is never rounded up to a whole."""
    assert [percent(x) for x in (0.97, 0.0031, 0.9999999, 1.0, 0.0, 0.5)] == [
        "97 %",
        "0.31 %",
        "over 99.9 %",
        "100 %",
        "0 %",
        "50 %",
    ]
    assert times(3.0) == "8 times"
    assert times(-3.0) == "8 times"
    assert factor(490_123.0) == "490,000 times"
    assert factor(3.2e9) == "3.2e+09 times"


def test_words_for_periods() -> None:
    """Something that lasts until the last sampled step is still going on."""
    assert period(120, 190, 190) == "since step 120"
    assert period(150, 150, 190) == "on step 150"
    assert period(120, 150, 190) == "from step 120 to 150"
    assert period(190, 190, 190) == "since step 190"
    assert period(None, None, 190) == "throughout"


def test_words_for_lists() -> None:
    """Long lists end in a count."""
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "a and b"
    assert listed(["a", "b", "c", "d"]) == "a, b, c and d"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_severities_are_ordered_from_grave_to_harmless() -> None:
    """Sorting relies on it."""
    assert SEVERITIES == ("act", "watch", "info")
