"""Where keeping GEMMs in BF16 is not the answer: what to do instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8dbg.analysis.evidence import Evidence, Row
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.headroom import CHASING, WORTH
from fp8dbg.analysis.scales import recipe_of
from fp8dbg.analysis.verdicts.shared import FLUSHED, error_matters
from fp8dbg.errors import UsageError
from fp8dbg.numerics.recipes import recipe_named

KINDS = {
    "frozen_scale": "repair the scale state",
    "stale_scale": "shorten the amax history",
    "saturation": "give the scale room",
    "wrong_format": "use E5M2 for gradients",
    "early_instability": "suspect software and configuration",
}
"""Verdict -> what is to be done."""

BY_ACTION = {"scale": "repair the scale", "recipe": "use another recipe", "software": "repair the program"}

EARLY = 0.2
"""Share of the run's steps within which trouble is one of its start."""


@dataclass(frozen=True)
class Action:
    """One thing to do that is not a fallback.

    Attributes:
        kind: what to do, in a few words.
        code: the verdict that asks for it.
        layer, tensor: where; None: the run.
        first_step: since when.
        recipe: the recipe that does it, where it is one; None otherwise.
        why: the finding's sentence.
        how: the first thing to do.
        severity: the finding's, "act" or "watch".
    """

    kind: str
    code: str
    layer: str | None
    tensor: str | None
    first_step: int | None
    recipe: str | None
    why: str
    how: str
    severity: str = "act"


def instead_of_bf16(evidence: Evidence, findings: Sequence[Finding], passing: Sequence[Finding]) -> Iterator[Action]:
    """The other things to do, worst first.

    Args:
        evidence: of the run.
        findings: on it, worst first.
        passing: those among them that ask for BF16 and concern the run's start alone.
    """
    for finding in findings:
        if finding in passing:
            steps = (finding.last_step or 0) + 1
            how = f"Keep {finding.layer} in BF16 for the first {steps} steps, then go on in FP8."
            yield _action(finding, f"use BF16 for the first {steps} steps", "bf16", how)
        elif finding.severity in ("act", "watch") and finding.action in BY_ACTION:
            kind = KINDS.get(finding.code, BY_ACTION[finding.action])
            yield _action(finding, kind, _recipe(evidence, finding), finding.remedy)


def _action(finding: Finding, kind: str, recipe: str | None, how: str) -> Action:
    where = (finding.layer, finding.tensor, finding.first_step)
    return Action(kind, finding.code, *where, recipe, finding.summary, how, finding.severity)


def early_only(evidence: Evidence, finding: Finding) -> bool:
    """Whether a fault was there from the first sampled step, and only for the run's start."""
    first, end = evidence.run["first_sampled"], evidence.run["last_sampled"]
    if finding.last_step is None or finding.first_step is None or not end:
        return False
    return bool(finding.first_step <= first + evidence.interval and finding.last_step <= first + EARLY * (end - first))


def _recipe(evidence: Evidence, finding: Finding) -> str | None:
    """The run's own recipe with the one parameter changed that the finding asks to change, or current scaling."""
    row = next((r for r in evidence.operands if (r["layer"], r["tensor"]) == (finding.layer, finding.tensor)), None)
    recipe = None if row is None else recipe_of(row)
    if recipe is None or not {"history", "hybrid"} & set(recipe.parameters):
        return None
    change: dict[str, bool | int | float | str] = {}
    if finding.code == "stale_scale":
        # a window of 16 keeps the scale stale for 16 steps: it won back 73 % of the loss, the most recent amax 96 %
        change = {"history": 1, "algorithm": "most_recent"}
    elif finding.code == "saturation" and recipe.name not in CHASING:
        margin = finding.evidence[0].get("margin_needed")
        if margin is None or margin > WORTH:
            return recipe_named("current", hybrid=recipe.parameters.get("hybrid", True)).label
        change = {"margin": margin}
    elif finding.code == "wrong_format":
        change = {"hybrid": True}
    try:
        return recipe_named(recipe, **change).label if change else None
    except UsageError:
        return None


def finer_recipe(evidence: Evidence, layer: str, findings: Sequence[Finding]) -> str | None:
    """A recipe recorded beside the run's under which this layer's faulty tensors keep their values; None if none does.

    Only what was recorded (``attach(what_if=...)``) is offered: whether blocks or rows are finer than an outlier
    depends on where it lies.
    """
    faulty = {f.tensor for f in findings if f.layer == layer}
    in_force = {f.what_if for f in findings if f.layer == layer}
    rows: dict[str, dict[str, Row]] = {}
    for row in evidence.tensors:
        if row["layer"] == layer and row["what_if"] and row["what_if"] not in in_force and row["tensor"] in faulty:
            rows.setdefault(row["what_if"], {})[row["tensor"]] = row
    for label, found in sorted(rows.items()):
        if set(found) == faulty and all(_holds(row) for row in found.values()):
            return label
    return None


def _holds(row: Row) -> bool:
    """Whether a tensor loses neither values nor precision under a row's recipe."""
    lost = row["worst_underflow_ratio"]
    return lost is not None and lost <= FLUSHED.floor and not error_matters(row, row["worst_rel_l2"])
