"""A run that never learned: its loss rose or ceased to be finite right at the start.

Sign: within the first steps the loss is not finite, or three quarters of the second half of them end well above where
it began. It is dated to the step that best divides losses near the beginning's from those above.
Cause: mostly not rounding but software and configuration: a scale or a gradient that is wrong from the first step, a
learning rate without warm-up, an initialisation, an unsupported combination of recipe and parallelism.
Remedy: run the same first steps in BF16; if they are fine, compare one layer's forward and backward with BF16 before
changing any recipe.
False alarm when: the loss is not comparable from step to step, as with a curriculum or a changing mixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from fp8dbg.analysis.evidence import Evidence, Row
from fp8dbg.analysis.finding import Finding

CODE = "early_instability"
EXPLAINS: frozenset[str] = frozenset()

EARLY_SHARE, EARLY_LEAST, EARLY_MOST = 0.05, 20, 500
"""The start is this share of the steps, within these bounds."""

BEGIN = 3
"""Steps whose median loss is where the run began."""

RISE = 1.1
"""The loss of a model that learns nothing stays where it began; this much above is worse than nothing."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    """At most one finding, about the run's first steps."""
    rows = evidence.ask("losses")
    early = rows[: min(EARLY_MOST, max(EARLY_LEAST, round(EARLY_SHARE * len(rows))))]
    if len(early) < EARLY_LEAST or early[0]["loss"] is None or early[0]["step"] != evidence.run["first_step"]:
        return
    lost = next((row for row in early if row["loss"] is None), None)
    begin = median(row["loss"] for row in early[:BEGIN] if row["loss"] is not None)
    if lost is not None:
        yield _finding(lost, f"the loss is not finite on step {lost['step']}", begin)
        return
    late = sorted(row["loss"] for row in early[len(early) // 2 :])
    if late[len(late) // 4] > RISE * begin:
        yield _finding(_rose(early, RISE * begin), f"the loss rose from {begin:.3g} to {median(late):.3g}", begin)


def _rose(rows: list[Row], limit: float) -> Row:
    """The row that best divides those with a loss below the limit from those above."""
    above = [row["loss"] > limit for row in rows]
    return rows[min(range(len(rows)), key=lambda i: above[:i].count(True) + above[i:].count(False))]


def _finding(row: Row, what: str, begin: float) -> Finding:
    return Finding(
        code=CODE,
        title="Unstable from the start",
        severity="act",
        layer=None,
        tensor=None,
        gemm=None,
        first_step=row["step"],
        last_step=None,
        summary=f"The run diverged at its start: {what}.",
        basis=f"its own first steps: the loss began at {begin:.3g}",
        remedy="Suspect software and configuration before rounding: run the first steps in BF16 and compare.",
        action="software",
        harm=0.4,
        evidence=[row],
    )
