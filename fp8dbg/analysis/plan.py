"""From findings to a fallback plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.wording import listed
from fp8dbg.runs.plan import Plan, PlanEntry
from fp8dbg.runs.schema import GEMMS

__all__ = ["Plan", "PlanEntry", "as_shown", "asks_for_bf16", "in_words", "plan_for"]


def plan_for(findings: Iterable[Finding], kept: Mapping[str, Iterable[str]] | None = None) -> Plan:
    """All that findings ask for: every GEMM that reads a faulty tensor, in BF16; ``recommend`` chooses among them.

    Only findings to act on whose remedy is BF16 count. Where the right action is another (repair a scale, a shorter
    history, another format) the plan stays silent and the finding's remedy says it.

    Args:
        findings: of one run, worst first; the plan's entries follow their order.
        kept: layers that already have GEMMs in BF16 in this run. What would be wrong with them in FP8 still counts:
            the plan that made a run healthy must not vanish because it did.
    """
    entries: dict[str, PlanEntry] = {}
    for finding in findings:
        if finding.layer is None or not asks_for_bf16(finding, kept):
            continue
        old = entries.get(finding.layer)
        gemms = tuple(g for g in GEMMS if g in finding.gemms or (old and g in old.gemms))
        reason = f"{old.reason} {finding.summary}" if old else finding.summary
        entries[finding.layer] = PlanEntry(finding.layer, gemms, reason=reason)
    return Plan(tuple(entries.values()))


def asks_for_bf16(finding: Finding, kept: Mapping[str, Iterable[str]] | None = None) -> bool:
    """Whether a finding asks to keep GEMMs in BF16: one to act on, or one about GEMMs that are kept in it already."""
    if finding.layer is None or finding.action != "bf16":
        return False
    if finding.severity == "act":
        return True
    return finding.what_if is not None and not set(finding.gemms).isdisjoint((kept or {}).get(finding.layer, ()))


def as_shown(plan: Plan, findings: Sequence[Finding]) -> Plan:
    """The plan with its layers in the order in which findings on them are shown; those without one come last."""
    layers = [finding.layer for finding in findings]
    return Plan(tuple(sorted(plan.entries, key=lambda e: layers.index(e.layer) if e.layer in layers else len(layers))))


def in_words(plan: Plan) -> str:
    """ "up and down in BF16"; GEMMs where a layer's follow several: "up (dgrad) in BF16, and up (fprop) in mxfp8"."""
    entries = Counter(entry.layer for entry in plan.entries)
    by_recipe: dict[str, list[str]] = {}
    for entry in plan.entries:
        name = entry.layer if entries[entry.layer] == 1 else f"{entry.layer} ({' and '.join(entry.gemms)})"
        by_recipe.setdefault("BF16" if entry.recipe == "bf16" else entry.recipe, []).append(name)
    return ", and ".join(f"{listed(names)} in {recipe}" for recipe, names in by_recipe.items())
