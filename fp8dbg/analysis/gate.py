"""One gate of `check` and how it came out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Gate:
    """One gate, judged.

    Attributes:
        rule: as it is written in a rules file.
        passed: whether the run passes.
        told: one sentence: the figure nearest to the limit (or beyond it) and where it is.
        basis: why the limit is where it is.
        value, limit: the figure and its limit; None for a gate without a number.
        used: how much of the limit is used: 0.2 is far from it, above 1 beyond it; None where there is no number.
        layer, name, step: where that is.
        failing: on how many tensors (or GEMMs, or findings) it fails.
        line: line of the rules file; 0 for a default.
    """

    rule: str
    passed: bool
    told: str
    basis: str
    value: float | None = None
    limit: float | None = None
    used: float | None = None
    layer: str | None = None
    name: str | None = None
    step: int | None = None
    failing: int = 0
    line: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @property
    def distance(self) -> str:
        """How near the limit is, in words: "12 % of the limit"; "" where there is no number."""
        if self.used is None:
            return ""
        if not math.isfinite(self.used):
            return "beyond any limit"
        return f"{100 * self.used:.0f} % of the limit" if self.used < 10 else f"{self.used:.3g} times the limit"


@dataclass(frozen=True)
class Judged:
    """One figure of one tensor or GEMM against its limit.

    Attributes:
        row: of gate_tensors or gate_gemms.
        value, limit: the figure and its limit.
        below: whether the figure must stay below.
        step: where the value is from; None for a median.
        basis: why the limit is there.
    """

    row: Mapping[str, Any]
    value: float
    limit: float
    below: bool
    step: int | None
    basis: str

    @property
    def used(self) -> float:
        """How much of the limit is used; above 1 it is broken. Exactly at the limit is beyond it."""
        if self.below:
            ratio = self.value / self.limit if self.limit > 0 else math.inf if self.value >= self.limit else 0.0
        else:
            ratio = self.limit / self.value if self.value > 0 else math.inf if self.value <= self.limit else 0.0
        broken = self.value >= self.limit if self.below else self.value <= self.limit
        return max(ratio, math.nextafter(1.0, 2.0)) if broken else min(ratio, 1.0)


def nearest(rule: str, judged: Iterable[Judged], *, what: str, line: int = 0) -> Gate:
    """The gate over many figures: it fails where any does, and tells of the one nearest to its limit.

    Args:
        rule: as it is written.
        judged: the figures.
        what: the figure's name, for the sentence.
        line: of the rules file.
    """
    every = list(judged)
    if not every:
        return Gate(
            rule, False, f"No {what} was measured here: there is nothing to judge.", "missing data fails", line=line
        )
    worst = max(every, key=lambda one: one.used)
    beyond = [one for one in every if one.used > 1]
    row = worst.row
    at = "" if worst.step is None else f" on step {worst.step}"
    more = f"; {len(beyond)} of {len(every)} are beyond theirs" if len(beyond) > 1 else ""
    side = "below" if worst.below else "above"
    return Gate(
        rule,
        not beyond,
        f"{what} of {row['layer']} {row['name']} is {worst.value:.3g}{at}, to stay {side} {worst.limit:.3g}{more}.",
        worst.basis,
        value=worst.value,
        limit=worst.limit,
        used=worst.used,
        layer=row["layer"],
        name=row["name"],
        step=worst.step,
        failing=len(beyond),
        line=line,
    )
