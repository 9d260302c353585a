"""The answer of ``fp8dbg whatif`` in a sentence: for which tensors the recipe is better, worse, or cannot be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from fp8dbg.analysis.whatif_tally import Between
from fp8dbg.analysis.wording import percent

Side = Literal["better", "worse", "same", "unknown"]
Figures = Mapping[str, Between | None]

LIMITS = {"underflow_ratio": 0.02, "saturated_ratio": 0.01}
"""Shares of lost values beyond which a cast is judged by them: those of the verdicts underflow and saturation."""

FACTOR = 1.25
"""A figure that moves by less is the same: another recipe's rounding alone does that much."""


class Told(Protocol):
    """What is judged of an answer of ``whatif``."""

    @property
    def layer(self) -> str:
        """Layer."""

    @property
    def tensor(self) -> str:
        """Role of the tensor."""

    @property
    def now(self) -> Mapping[str, Between | None]:
        """Figures as they were."""

    @property
    def then(self) -> Mapping[str, Between | None]:
        """Figures as they would have been."""


def deciding(now: Figures, then: Figures) -> str:
    """The figure that a cast is judged by: the first share of lost values that is, or surely would be, past its limit.

    Where nothing much is lost either way it is ``rel_l2``, which cannot tell where an outlier is all that it sees.
    """
    for figure, limit in LIMITS.items():
        was, would = now.get(figure), then.get(figure)
        if (was is not None and was[0] >= limit) or (would is not None and would[0] >= limit):
            return figure
    return "rel_l2"


def side(now: Figures, then: Figures) -> Side:
    """Whether the recipe asked about is better for one tensor; by more than ``FACTOR``, whatever the bounds leave open.

    Args:
        now, then: figures as (lower, upper) bound, as ``whatif.Answer`` has them; smaller is better.
    """
    figure = deciding(now, then)
    was, would = now.get(figure), then.get(figure)
    if was is None or would is None:
        return "unknown"
    if would[1] * FACTOR < was[0]:
        return "better"
    if would[0] > was[1] * FACTOR:
        return "worse"
    return "same" if would[1] <= was[0] * FACTOR and would[0] * FACTOR >= was[1] else "unknown"


def conclusion(recipe: str, answers: Sequence[Told], how: str) -> str:
    """What the table says, in one or two sentences: what is better, what is worse, what cannot be told and what to do.

    Args:
        recipe: label of the recipe asked about.
        answers: one for each tensor.
        how: how to record what is missing.
    """
    by_side: dict[Side, list[Told]] = {"better": [], "worse": [], "same": [], "unknown": []}
    for answer in answers:
        by_side[side(answer.now, answer.then)].append(answer)
    said = [
        f"{word} for {len(found)} of {len(answers)} tensors ({_example(found)})"
        for word, found in (
            ("better", by_side["better"]),
            ("worse", by_side["worse"]),
            ("no different", by_side["same"]),
        )
        if found
    ]
    sentences = [f"{recipe} would have been {', '.join(said)}."] if said else []
    if unknown := by_side["unknown"]:
        worst = max(unknown, key=_lost)
        sentences.append(
            f"Whether {recipe} is better for {worst.layer} {worst.tensor} "
            + (f"and {len(unknown) - 1} more of {len(answers)} tensors " if len(unknown) > 1 else "")
            + f"cannot be told from what was recorded: record again with {how}."
        )
    return " ".join(sentences)


def _lost(answer: Told) -> float:
    """How much a tensor loses now: what one wants to know of first."""
    return max((bounds[0] for f in LIMITS if (bounds := answer.now.get(f)) is not None), default=0.0)


def _example(found: Sequence[Told]) -> str:
    """The tensor that loses most now or would: its deciding figure on both sides."""
    worst = max(found, key=_lost)
    figure = deciding(worst.now, worst.then)
    was, would = (_shown(figures[figure], figure) for figures in (worst.now, worst.then))
    return f"{worst.layer} {worst.tensor}: {figure} {was} → {would}"


def _shown(value: Between | None, figure: str) -> str:
    if value is None:
        return "-"
    low, high = (percent(end) if figure in LIMITS else f"{end:.2g}" for end in value)
    return low if low == high else f"{low} to {high}"
