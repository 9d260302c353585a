from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8dbg.analysis.plan import Plan, PlanEntry, as_shown, in_words, plan_for
from fp8dbg.errors import UsageError
from tests.test_analysis_finding import finding

ENTRIES = st.builds(
    PlanEntry,
    layer=st.text(min_size=1),
    gemms=st.lists(st.sampled_from(["fprop", "dgrad", "wgrad"]), unique=True, min_size=1).map(tuple),
    recipe=st.sampled_from(["bf16", "block", "delayed:history=16"]),
    reason=st.text(),
)


@given(st.lists(ENTRIES))
def test_plan_survives_json(entries: list[PlanEntry]) -> None:
    """Any layer name and any order comes back as it was."""
    plan = Plan(tuple(entries))
    assert Plan.from_json(plan.to_json()) == plan


def test_gemms_of_one_layer_are_joined_in_their_order() -> None:
    """A weight and an input that are both at fault ask for all three GEMMs."""
    found = [
        finding(layer="up", tensor="weight", gemms=("fprop", "dgrad"), summary="one."),
        finding(layer="up", tensor="input", gemms=("fprop", "wgrad"), summary="two."),
    ]
    assert plan_for(found).entries == (PlanEntry("up", ("fprop", "dgrad", "wgrad"), "bf16", "one. two."),)


def test_plan_is_silent_where_bf16_is_not_the_remedy() -> None:
    """A scale to repair, or a finding to watch, keeps no layer in BF16."""
    found = [finding(action="scale"), finding(severity="watch", gemms=("fprop",))]
    assert not plan_for(found)


def test_plan_keeps_what_made_the_run_healthy() -> None:
    """A layer that is in BF16 because of a plan stays in the plan for as long as FP8 would hurt it."""
    would = finding(layer="up", severity="info", what_if="delayed", gemms=("fprop", "dgrad"))
    assert [e.layer for e in plan_for([would], {"up": ["fprop", "dgrad"]}).entries] == ["up"]
    assert not plan_for([would], {"down": ["fprop"]})


def test_plan_follows_the_order_in_which_findings_are_shown() -> None:
    """Worst first; what no finding is about comes last, and a layer's entries stay as they are among themselves."""
    up, up_finer, down, head = (
        PlanEntry(layer, ("fprop",), recipe)
        for layer, recipe in (("up", "bf16"), ("up", "block"), ("down", "bf16"), ("head", "bf16"))
    )
    shown = [finding(layer="down"), finding(layer="up"), finding(layer="down")]
    assert as_shown(Plan((head, up, up_finer, down)), shown).entries == (down, up, up_finer, head)


def test_plan_in_words_calls_each_recipe_by_its_name() -> None:
    """A layer under two recipes is told apart by its GEMMs, not named twice and all of it called BF16."""
    up, down = PlanEntry("up", ("fprop", "dgrad")), PlanEntry("down", ("wgrad",))
    assert in_words(Plan((up, down))) == "up and down in BF16"
    mixed = Plan((PlanEntry("up", ("fprop",), "mxfp8"), PlanEntry("up", ("dgrad", "wgrad")), down))
    assert in_words(mixed) == "up (fprop) in mxfp8, and up (dgrad and wgrad) and down in BF16"


def test_plan_as_fallback_is_what_simulate_takes() -> None:
    """layer -> GEMM -> recipe."""
    plan = Plan((PlanEntry("up", ("fprop", "dgrad"), "block"),))
    assert plan.as_fallback() == {"up": {"fprop": "block", "dgrad": "block"}}
    mixed = Plan((*plan.entries, PlanEntry("up", ("wgrad",))))
    assert mixed.as_fallback() == {"up": {"fprop": "block", "dgrad": "block", "wgrad": "bf16"}}
    assert plan
    assert not Plan()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"entries": 3}',
        '{"entries": [3]}',
        '{"entries": [{"layer": 3}]}',
        '{"entries": [{"layer": "a", "gemms": ["fprop", "bprop"]}]}',
        '{"entries": [{"layer": "a", "gemms": "fprop"}]}',
        '{"version": 99, "entries": []}',
        "[" * 100_000,
    ],
)
def test_what_is_no_plan_is_refused_in_a_sentence(text: str) -> None:
    """A file of something else, a later version, a GEMM that does not exist."""
    with pytest.raises(UsageError) as error:
        Plan.from_json(text)
    assert len(str(error.value)) < 500
