"""The smallest plan that works: which GEMMs to keep in BF16, what that buys and costs, and what to do instead of it.

A fault's GEMMs are added by the harm predicted of them (fp8dbg.analysis.harm) until ``ENOUGH`` of the fault's harm is
gone; GEMMs that hide one another's harm are added together, as one alone buys nothing. Harm ranks GEMMs; how far the
loss will fall it does not say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fp8dbg.analysis.evidence import Evidence
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.harm import Fault, GemmHarm, HarmModel
from fp8dbg.analysis.instead import Action, early_only, finer_recipe, instead_of_bf16
from fp8dbg.analysis.plan import Plan, PlanEntry, asks_for_bf16, plan_for
from fp8dbg.analysis.verdicts import nothing_recorded
from fp8dbg.analysis.verdicts.coverage import unseen_layers
from fp8dbg.analysis.wording import listed, percent
from fp8dbg.errors import NothingRecordedError
from fp8dbg.runs.schema import GEMMS

ENOUGH = 0.95
"""Share of a fault's harm that the plan takes away."""

FINER_FOR = ("fprop",)
"""GEMMs that a finer recipe is offered for: figures of rows and blocks are of the direction that fprop sums over."""

FEWEST = 3
"""Sampled steps that a run needs before "nothing is wrong" can be said of it: on the first, every scale is 1."""


@dataclass(frozen=True)
class Point:
    """One step along the curve: a GEMM more in BF16, and what all of them so far buy and cost.

    Attributes:
        layer, gemm: what is added.
        in_plan: whether the plan has it.
        recipe: "bf16", or the finer recipe that the plan gives it.
        harm: what ranks it: predicted, in the loss's units, and no forecast of the loss; None where not measured.
        hidden: whether another fault hides its harm.
        harm_removed: share of all harm that is gone by now; None where it is not measured.
        flops_given_up: share of all recorded GEMMs' FLOPs that is not in FP8 by now.
        reason: why, in a sentence.
    """

    layer: str
    gemm: str
    in_plan: bool
    recipe: str
    harm: float | None
    hidden: bool
    harm_removed: float | None
    flops_given_up: float
    reason: str


@dataclass(frozen=True)
class Recommendation:
    """What to do about a run.

    Attributes:
        plan: GEMMs to keep in BF16 or give a finer recipe; empty where none needs it.
        curve: GEMMs in the order in which to add them, those of the plan first.
        instead: what to do where BF16 is not the answer.
        not_fixed: what the plan leaves as it is, a sentence each.
        notes: what was not recorded and would have told more, a sentence each.
        unseen: layers that nothing but zeros reaches since the faults began: what else is wrong there is not known.
    """

    plan: Plan = field(default_factory=Plan)
    curve: tuple[Point, ...] = ()
    instead: tuple[Action, ...] = ()
    not_fixed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """What to do, in one sentence."""
        if self.plan:
            removed = next((p.harm_removed for p in reversed(self.curve) if p.in_plan), None)
            given_up = next((p.flops_given_up for p in reversed(self.curve) if p.in_plan), 0.0)
            count = sum(len(e.gemms) for e in self.plan.entries)
            what = "1 GEMM" if count == 1 else f"{count} GEMMs"
            buys = f"takes away {percent(removed)} of the predicted harm and " if removed is not None else ""
            return f"Take {what} out of the run's recipe: that {buys}gives up {percent(given_up)} of the FP8 FLOPs."
        if self.instead and all(action.severity == "watch" for action in self.instead):
            return f"Nothing asks for BF16; one thing to watch: {self.instead[0].kind}."
        if self.instead:
            return f"BF16 is not the answer here: {self.instead[0].kind}."
        return "Nothing to change: no finding asks for BF16 or for anything else."

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"headline": self.headline, **asdict(self), "plan": self.plan.to_dict()}


def recommend(
    evidence: Evidence, findings: Sequence[Finding], kept: Mapping[str, Iterable[str]] | None = None
) -> Recommendation:
    """The recommendation for a run.

    Args:
        evidence: of the run.
        findings: on it, worst first.
        kept: layers that already have GEMMs in BF16 in this run.
    """
    kept = kept if evidence.in_force else {}  # a run wholly in BF16 follows no plan
    wanted = [f for f in findings if asks_for_bf16(f, kept)]
    passing = [f for f in wanted if early_only(evidence, f)]
    lasting = [f for f in wanted if f not in passing]
    faults = HarmModel(evidence, lasting).faults()
    in_bf16 = {(layer, gemm) for layer, gemms in (kept or {}).items() for gemm in gemms} & _read(lasting)
    open_faults = [fault for fault in faults if not _settled(fault, in_bf16)]
    chosen = in_bf16 | {(g.layer, g.gemm) for fault in open_faults for g in chosen_gemms(fault)}
    finer = {layer: finer_recipe(evidence, layer, lasting) for layer in {f.layer or "" for f in lasting}}
    plan = _plan(plan_for(lasting, kept), chosen, finer)
    after = _may_follow(findings, lasting, evidence.interval)
    others = [f for f in findings if f not in after]
    unseen = _emptied(evidence) if faults else ()
    return Recommendation(
        plan,
        tuple(_curve(faults, chosen, finer)),
        tuple(instead_of_bf16(evidence, others, passing)),
        tuple(_not_fixed(others, faults, chosen)),
        tuple(_notes(evidence, faults, after, unseen)),
        unseen,
    )


def require_enough(evidence: Evidence, findings: Sequence[Finding]) -> None:
    """Refuse to call a run healthy that has hardly been looked at.

    Raises:
        NothingRecordedError: what is missing, and how to record it.
    """
    sampled = evidence.run["sampled_steps"] or 0
    if not evidence.tensors or not evidence.operands:
        raise NothingRecordedError(
            "No figures of any tensor that FP8 casts were recorded.",
            nothing_recorded.remedy(evidence),
        )
    if sampled < FEWEST and not any(f.severity == "act" for f in findings):
        raise NothingRecordedError(
            f"Only {sampled} of {evidence.run['steps']} steps were sampled: too few to say that nothing is wrong.",
            f"Record at least {FEWEST}: attach with a smaller every=, or train on.",
        )


def chosen_gemms(fault: Fault) -> tuple[GemmHarm, ...]:
    """The fewest GEMMs of a fault that take away ``ENOUGH`` of its harm, and those that lead the learning.

    All of them where harm is not measured.
    """
    if not fault.measured:
        return fault.gemms
    forward = tuple(g for g in fault.gemms if g.gemm == "fprop" and (g.harm or g.hidden))
    removed, chosen = max((g.harm or 0.0 for g in forward), default=0.0), list(forward)
    for gemm in fault.gemms:
        if gemm not in forward and (gemm.leads or removed < ENOUGH * fault.harm or not chosen):
            chosen.append(gemm)
            removed += gemm.harm or 0.0
    return tuple(chosen)


def _settled(fault: Fault, in_bf16: set[tuple[str, str]]) -> bool:
    """Whether a plan already took the forward part away: the run then shows what is left, not what was chosen from."""
    forward = {(g.layer, g.gemm) for g in fault.gemms if g.gemm == "fprop"}
    return bool(forward) and forward <= in_bf16


def _may_follow(findings: Sequence[Finding], lasting: Sequence[Finding], interval: int) -> list[Finding]:
    """Scales that clip right after a fault for BF16 began: a broken product is a jump for all that comes after it."""
    onsets = [f.first_step or 0 for f in lasting]
    return [
        f
        for f in findings
        if f.code == "saturation" and any(0 <= (f.first_step or 0) - onset <= 2 * interval for onset in onsets)
    ]


def _read(findings: Sequence[Finding]) -> set[tuple[str, str]]:
    return {(f.layer or "", gemm) for f in findings for gemm in f.gemms}


def _plan(readers: Plan, chosen: set[tuple[str, str]], finer: Mapping[str, str | None]) -> Plan:
    """A plan of all GEMMs that read a faulty tensor, cut down to those chosen."""
    entries = []
    for entry in readers.entries:
        recipe = finer.get(entry.layer)
        why = f"{entry.reason} Under {recipe}, which was recorded beside, it keeps its values."
        gemms = tuple(g for g in GEMMS if (entry.layer, g) in chosen)
        held = tuple(g for g in gemms if recipe and g in FINER_FOR)
        rest = tuple(g for g in gemms if g not in held)
        entries += [PlanEntry(entry.layer, held, recipe, why)] if held and recipe else []
        entries += [PlanEntry(entry.layer, rest, reason=entry.reason)] if rest else []
    return Plan(tuple(entries))


def _curve(faults: Sequence[Fault], chosen: set[tuple[str, str]], finer: Mapping[str, str | None]) -> list[Point]:
    total = sum(fault.harm for fault in faults)
    known = total > 0 and all(fault.measured for fault in faults)
    places = [(fault, g) for fault in faults for g in fault.gemms]
    places.sort(key=lambda place: (place[1].layer, place[1].gemm) not in chosen)
    points, flops, added = [], 0.0, set[tuple[str, str]]()
    for fault, gemm in places:
        key, recipe = (gemm.layer, gemm.gemm), (finer.get(gemm.layer) if gemm.gemm in FINER_FOR else None) or "bf16"
        added.add(key)
        flops += gemm.flops if recipe == "bf16" else 0.0
        removed = sum(_removed(f, added) for f in faults) / total if known else None
        points.append(Point(*key, key in chosen, recipe, gemm.harm, gemm.hidden, removed, flops, _reason(fault, gemm)))
    return points


def _removed(fault: Fault, added: set[tuple[str, str]]) -> float:
    """Harm of a fault that is gone: the forward part only once all GEMMs behind it are added."""
    forward = [g for g in fault.gemms if g.gemm == "fprop" and (g.harm or g.hidden)]
    whole = all((g.layer, g.gemm) in added for g in forward)
    backward = sum(g.harm or 0.0 for g in fault.gemms if g.gemm != "fprop" and (g.layer, g.gemm) in added)
    return backward + (max((g.harm or 0.0 for g in forward), default=0.0) if whole else 0.0)


def _reason(fault: Fault, gemm: GemmHarm) -> str:
    what = f"it reads the faulty {listed(list(gemm.operands))}"
    if gemm.harm is None:
        return f"{what}; its own harm was not measured"
    if gemm.hidden:
        return f"{what}; its harm is hidden by {fault.findings[0].layer}, and shows once that is repaired"
    if gemm.gemm == "fprop":
        return f"{what}: harm {gemm.harm:.2g}"
    lost = f"{what}: {percent(gemm.lost or 0.0)} of it is lost"
    return f"{lost}, harm {gemm.harm:.2g}" if gemm.harm else f"{lost}, at no cost beyond chance"


def _not_fixed(findings: Sequence[Finding], faults: Sequence[Fault], chosen: set[tuple[str, str]]) -> list[str]:
    rest = [(fault, g) for fault in faults for g in fault.gemms if (g.layer, g.gemm) not in chosen]
    said = [f"{g.layer} {g.gemm} stays in FP8 although {_reason(fault, g)}." for fault, g in rest]
    others = [f for f in findings if f.action != "bf16" and f.severity in ("act", "watch")]
    said += [f"{f.title} ({f.where}): BF16 does not repair it." for f in others]
    watched = [f for f in findings if f.action == "bf16" and f.severity == "watch"]
    return said + [f"{f.title} ({f.where}) is only watched: {f.summary}" for f in watched]


def _notes(evidence: Evidence, faults: Sequence[Fault], after: Sequence[Finding], unseen: Sequence[str]) -> list[str]:
    notes = [
        f"{f.title} ({f.where}) may follow from the faults above: look again with the plan applied." for f in after
    ]
    if unmeasured := [f.findings[0].layer or "" for f in faults if not f.measured]:
        notes.append(
            f"The harm of {listed(unmeasured)} cannot be told GEMM by GEMM, so every GEMM that reads the faulty tensor "
            "is in the plan; attach with rows=16 or more, while the loss falls, to choose among them."
        )
    if unseen:
        notes.append(
            f"Nothing but zeros reaches {listed(list(unseen))}: what else is wrong there cannot be seen yet. Record "
            "again with the plan applied; what comes to light is then added to it."
        )
    if faults and not any(row["loss"] is not None for row in evidence.ask("losses")):
        notes.append("No loss was recorded: what dgrad and wgrad cost is not known. Call run.log(loss=...).")
    if missing := unseen_layers(evidence):
        notes.append(f"Nothing is known of {listed(missing)}: no figures were recorded.")
    return notes


def _emptied(evidence: Evidence) -> tuple[str, ...]:
    """Layers whose input has become zero in every element, in the order of execution."""
    inputs = [row for row in evidence.operands if row["tensor"] == "input" and row["usual_zero_ratio"] is not None]
    emptied = {row["layer"] for row in inputs if row["usual_zero_ratio"] < 1.0 <= row["worst_zero_ratio"]}
    return tuple(layer for layer in evidence.layer_order if layer in emptied)
