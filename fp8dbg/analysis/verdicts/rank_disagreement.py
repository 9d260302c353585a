"""Ranks that hold different scales for a tensor whose scale they should share.

Sign: scales of one role agree across the ranks in nearly all layers, and in this one they do not. Under delayed scaling
the cause may be older by up to the amax history: scales part only once the window's largest values do.
Cause: an amax that is not reduced over the group on one rank, a rank that resumed without its state, replicas that have
drifted apart.
Remedy: reduce amax over the whole group for this layer; compare the ranks' weights.
False alarm when: ranks hold different shards of the tensor (tensor or expert parallelism) and their host does not
reduce amax over them; then hardly any layer agrees and nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Row
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.scales import recipe_of
from fp8dbg.analysis.wording import percent, times

CODE = "rank_disagreement"
EXPLAINS = frozenset({"saturation", "underflow"})

SHARED = 0.7
"""Share of a role's layers on whose scales the ranks must agree for the role to be one with shared scales."""

APART = 1e-3
"""log2 of the largest over the smallest scale that counts as apart: a shared scale is the same to the last bit."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    """Findings for layers on whose scale the ranks disagree although they agree elsewhere."""
    if len(evidence.run["ranks"] or []) < 2:
        return
    rows = _in_force(evidence, evidence.ask("rank_scales"))
    for role in sorted({row["tensor"] for row in rows}):
        group = [row for row in rows if row["tensor"] == role]
        together = sum((row["worst"] or 0) <= APART for row in group) / len(group)
        for row in group if together >= SHARED else ():
            if (row["worst"] or 0) > APART:
                yield _finding(evidence, row, together)


def _in_force(evidence: Evidence, rows: list[Row]) -> list[Row]:
    """Those of layers that compute in FP8, where any does: an emulated scale beside them has never been reduced."""
    real = {(row["layer"], row["tensor"]) for row in evidence.operands if row["what_if"] is None}
    return [row for row in rows if (row["layer"], row["tensor"]) in real] if real else rows


def _finding(evidence: Evidence, row: Row, together: float) -> Finding:
    return Finding(
        code=CODE,
        title="Ranks disagree on a scale",
        severity="act" if row["steps_apart"] > 1 else "watch",
        layer=row["layer"],
        tensor=row["tensor"],
        gemm=None,
        first_step=row["first_step"],
        last_step=row["last_step"],
        summary=f"The ranks' scales of {row['tensor']} are up to {times(row['worst'])} apart on {row['steps_apart']} "
        f"of {row['steps']} steps, first on step {row['first_step']}{_hidden(evidence, row)}; "
        f"rank {row['lone_rank']} is the odd one.",
        basis=f"the ranks agree on {percent(together)} of the layers' scales of {row['tensor']}",
        remedy="Reduce amax over the whole group for this layer, and compare the ranks' weights.",
        action="software",
        harm=0.6,
        evidence=[row],
    )


def _hidden(evidence: Evidence, row: Row) -> str:
    """How much older the cause may be: until they leave the window, larger values before it give every rank's scale."""
    facts = next((r for r in evidence.operands if (r["layer"], r["tensor"]) == (row["layer"], row["tensor"])), None)
    recipe = None if facts is None else recipe_of(facts)
    if recipe is None or recipe.parameters.get("algorithm") != "max":
        return ""
    window = min(int(recipe.parameters["history"]), row["first_step"])
    return f" (its cause up to {window} steps earlier: the amax history hides it so long)"
