"""Delta debugging: the set it ends with does, and nothing of it can be left out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8dbg.analysis.bisect import SPACES, Criterion, Unit, ddmin, search
from fp8dbg.errors import NothingRecordedError
from fp8dbg.runs.schema import GEMMS

UNITS = [(f"layers.{i}", gemm) for i in range(8) for gemm in GEMMS]


@given(size=st.integers(1, 24), seed=st.sets(st.integers(0, 23), min_size=1))
@settings(deadline=None)
def test_what_is_needed_is_found_exactly(size: int, seed: set[int]) -> None:
    """Where a set does if it holds all of the hidden units, exactly those are left, in order."""
    hidden = {i % size for i in seed}
    assert ddmin(range(size), lambda some: hidden <= set(some)) == sorted(hidden)


@given(size=st.integers(1, 12), good=st.sets(st.frozensets(st.integers(0, 11)), max_size=40))
@settings(deadline=None)
def test_nothing_of_the_result_can_be_left_out(size: int, good: set[frozenset[int]]) -> None:
    """For any judgement at all, one that more is not always better: the result is good, or all of it; and 1-minimal."""

    def does(some: Sequence[int]) -> bool:
        return frozenset(some) in good

    found = ddmin(range(size), does)
    assert len(found) == size or does(found)
    if len(found) > 1:
        assert not any(does([i for i in found if i != left_out]) for left_out in found)


@given(size=st.integers(1, 32), hidden=st.integers(0, 31))
@settings(deadline=None)
def test_one_unit_is_found_by_halves(size: int, hidden: int) -> None:
    """In at most two trials for each halving, and no set is tried twice."""
    tried: list[tuple[int, ...]] = []

    def does(some: Sequence[int]) -> bool:
        tried.append(tuple(some))
        return hidden % size in some

    assert ddmin(range(size), does) == [hidden % size]
    assert len(tried) <= 2 * math.ceil(math.log2(size)) if size > 1 else not tried
    assert len(tried) == len(set(tried))


class Losses:
    """A program whose loss is 1, and 0.4 more for each GEMM that must be in BF16 and is not."""

    def __init__(self, needed: set[Unit]) -> None:
        self.needed = needed
        self.trials = 0

    def __call__(self, units: Sequence[Unit]) -> float:
        self.trials += 1
        return 1.0 + 0.4 * len(self.needed - set(units))


def test_the_search_ends_with_the_gemms_that_are_needed() -> None:
    """Two GEMMs of different layers and kinds among 24, in far fewer trials than there are sets of two."""
    losses = Losses({("layers.2", "fprop"), ("layers.6", "wgrad")})
    found = search(UNITS, "gemms", Criterion(1.0, losses([]), 0.01, 0.01), losses)
    assert found.plan.as_fallback() == {"layers.2": {"fprop": "bf16"}, "layers.6": {"wgrad": "bf16"}}
    assert losses.trials < 40
    assert "2 of 24 GEMMs" in found.detail


@pytest.mark.parametrize(
    ("space", "gemms"), [("layers", {"layers.2": 3, "layers.6": 3}), ("kinds", dict.fromkeys(dict(UNITS), 2))]
)
def test_a_coarser_space_stops_earlier(space: str, gemms: dict[str, int]) -> None:
    """Whole layers, or kinds of GEMM over all layers."""
    losses = Losses({("layers.2", "fprop"), ("layers.6", "wgrad")})
    found = search(UNITS, space, Criterion(1.0, losses([]), 0.01, 0.01), losses)
    assert {layer: len(kept) for layer, kept in found.plan.as_fallback().items()} == gemms


@pytest.mark.parametrize("space", SPACES)
def test_where_fp8_costs_nothing_nothing_is_tried(space: str) -> None:
    """A difference within the repeats' noise is none."""
    losses = Losses(set())
    found = search(UNITS, space, Criterion.from_repeats([1.0, 1.1], [1.05, 1.12]), losses)
    assert not found.plan
    assert losses.trials == 0
    assert "nothing needs BF16" in found.detail


def test_what_counts_as_recovered() -> None:
    """95 % of the gap, or the noise where that is wider; a trial that diverged never, BF16 that did is an error."""
    still = Criterion.from_repeats([1.0, 1.0], [2.0, 2.0])
    assert still.limit == pytest.approx(1.05)
    noisy = Criterion.from_repeats([0.9, 1.1], [2.0, 2.0])
    assert noisy.limit == pytest.approx(1.0 + 3 * 0.02**0.5)
    chaotic = Criterion.from_repeats([1.0, 1.0], [1.8, 2.2])  # broken runs scatter; a set that is well does not
    assert chaotic.limit == pytest.approx(1.05)
    assert chaotic.harmed
    assert not Criterion.from_repeats([1.0, 1.0], [0.8, 2.2]).harmed
    diverged = Criterion.from_repeats([1.0], [math.inf])
    assert diverged.harmed
    assert diverged.recovered(1.04)
    assert not diverged.recovered(math.inf)
    with pytest.raises(NothingRecordedError):
        Criterion.from_repeats([math.inf], [1.0])
