"""Everything a report says about a run, as one tree of plain data: the terminal, the page and --json all read this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fp8dbg.analysis.evidence import Evidence, Row
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.limits import noise_floor
from fp8dbg.analysis.plan import Plan, in_words
from fp8dbg.analysis.recommend import FEWEST
from fp8dbg.analysis.run import Run
from fp8dbg.analysis.spikes import Spike, find_spikes, worst_of
from fp8dbg.analysis.verdicts.coverage import unseen_layers
from fp8dbg.analysis.verdicts.shared import sensitivity_ratio
from fp8dbg.analysis.wording import listed
from fp8dbg.numerics.formats import FORMATS

WORST = 50
"""Rows of ``Summary.worst``."""


@dataclass(frozen=True)
class RunFacts:
    """What was run: where it is, how far it got, on how many ranks, which layers and recipes, and its fingerprint."""

    path: str
    state: str
    first_step: int | None
    last_step: int | None
    steps: int
    sampled_steps: int
    ranks: list[int]
    layers: int
    hosts: list[str]
    recipes: list[str]
    what_if: list[str]
    formats: list[str]
    first_loss: float | None
    last_loss: float | None
    overhead_share: float | None
    fingerprint: dict[str, Any]


@dataclass(frozen=True)
class Coverage:
    """What was not seen: layers without figures, problems of the folder, gap and error events, and notes."""

    unseen_layers: list[str]
    problems: list[str]
    events: list[Row]
    notes: list[str]


@dataclass(frozen=True)
class Summary:
    """A report as data.

    Attributes:
        run: what was run.
        coverage: what was not seen.
        findings: worst first.
        spikes: loss spikes, in order of step.
        worst: one row per tensor, worst first, with the error above its format's floor (``excess``).
        plan: the fallback plan.
        healthy: no finding asks to act or to watch, the loss did not spike, and enough was recorded to say so.
        headline: the whole report in one sentence.
    """

    run: RunFacts
    coverage: Coverage
    findings: list[Finding]
    spikes: list[Spike]
    worst: list[Row]
    plan: Plan
    healthy: bool
    headline: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the stable form of ``fp8dbg report --json``."""
        return {
            "run": asdict(self.run),
            "coverage": asdict(self.coverage),
            "headline": self.headline,
            "healthy": self.healthy,
            "findings": [f.to_dict() for f in self.findings],
            "spikes": [s.to_dict() for s in self.spikes],
            "worst": self.worst,
            "plan": self.plan.to_dict(),
        }


def summarise(run: Run) -> Summary:
    """The summary of an opened run."""
    findings, plan = run.findings(), run.plan()
    facts = _run_facts(run)
    pressing = any(f.severity in ("act", "watch") for f in findings)
    spikes = find_spikes(run.evidence)
    return Summary(
        run=facts,
        coverage=_coverage(run, facts),
        findings=findings,
        spikes=spikes,
        worst=_worst(run.evidence),
        plan=plan,
        healthy=facts.sampled_steps >= FEWEST and not pressing and not spikes,
        headline=headline(findings, plan, facts, spikes),
    )


def headline(findings: list[Finding], plan: Plan, facts: RunFacts, spikes: list[Spike]) -> str:
    """What to know if one reads a single sentence: the worst finding and what to do first, or why there is none."""
    pressing = [f for f in findings if f.severity in ("act", "watch")]
    if not pressing:
        return _nothing_found(plan, facts, spikes)
    worst = pressing[0]
    where = f"{worst.layer}: " if worst.layer else ""
    what = f"{where}{worst.summary.rstrip('.')}"
    if plan and worst.action == "bf16":
        return f"{what}; keep {in_words(plan)}."
    return f"{what}. {worst.remedy}"


def _nothing_found(plan: Plan, facts: RunFacts, spikes: list[Spike]) -> str:
    """What no finding to act on or to watch means: healthy only where enough was seen and the loss did not spike."""
    if not facts.sampled_steps:
        return "Nothing was recorded."
    if spikes:
        worst = worst_of(spikes)
        more = f" and on {len(spikes) - 1} more" if len(spikes) > 1 else ""
        return f"Nothing to act on, but the loss spiked on step {worst.step}{more}: {worst.first_move()}."
    if facts.sampled_steps < FEWEST:
        return (
            f"Too little to judge: {facts.sampled_steps} sampled of {facts.steps} steps. At least {FEWEST} are needed: "
            "train on, attach with a smaller every=, or call step() after each step where there is no torch optimizer."
        )
    kept = f" with {in_words(plan)}, where the run's recipe would hurt" if plan else ""
    return f"Healthy{kept}: nothing found in {facts.layers} layers over {facts.sampled_steps} sampled steps."


def _run_facts(run: Run) -> RunFacts:
    row = run.evidence.run
    return RunFacts(
        path=str(run.path),
        state=run.state,
        first_step=row["first_step"],
        last_step=row["last_step"],
        steps=row["steps"],
        sampled_steps=row["sampled_steps"],
        ranks=list(row["ranks"] or []),
        layers=row["layers"],
        hosts=list(row["hosts"] or []),
        recipes=list(row["recipes"] or []),
        what_if=list(row["what_if"] or []),
        formats=list(row["formats"] or []),
        first_loss=row["first_loss"],
        last_loss=row["last_loss"],
        overhead_share=row["overhead_share"],
        fingerprint={k: v for k, v in run.meta.items() if k not in ("layers", "ranks")},
    )


def _coverage(run: Run, facts: RunFacts) -> Coverage:
    notes = []
    if facts.sampled_steps and not facts.recipes:
        notes.append("No layer computes in FP8: figures say what the recipe compared with would do.")
    if facts.steps and facts.first_loss is None:
        notes.append("No loss was recorded: spikes cannot be seen.")
    if facts.sampled_steps and not run.evidence.gemms:
        notes.append("No GEMM was measured: harm is judged from the tensors alone.")
    if strange := sorted(set(facts.formats) - set(FORMATS)):
        notes.append(f"Formats that fp8dbg does not know are not judged: {listed(strange)}.")
    told = run.evidence.ask("events")
    notes += _plan_notes(told, run.evidence.layer_order) + _route_notes(told)
    events = [e for e in told if e["kind"] in ("gap", "error")]
    return Coverage(unseen_layers(run.evidence), list(run.problems), events[:100], notes)


def _plan_notes(events: list[Row], layers: Mapping[str, int]) -> list[str]:
    """What was not done as a fallback plan says. A layer that one rank lacks may be another's: a pipeline's stage."""
    told = [e for e in events if e["kind"] == "plan"]
    missing = dict.fromkeys(e["layer"] for e in told if e["layer"] is not None and e["layer"] not in layers)
    said = [f"The fallback plan names layers that are not in the model: {listed(list(missing))}."] if missing else []
    return [*said, *dict.fromkeys(e["detail"] for e in told if e["layer"] is None)]


def _route_notes(events: list[Row]) -> list[str]:
    """By which route tensors were measured, where there is more than the default one."""
    routes = [e for e in events if e["kind"] == "route"]
    layers: dict[str, list[str]] = {}
    for event in routes:
        if event["layer"] is not None and event["layer"] not in layers.get(event["detail"], []):
            layers.setdefault(event["detail"], []).append(event["layer"])
    general = dict.fromkeys(e["detail"] for e in routes if e["layer"] is None)
    return [*general, *(f"{listed(names)}: {detail}" for detail, names in layers.items())]


def _worst(evidence: Evidence) -> list[Row]:
    """Tensors by what they lost: non-finite first, then lost values and error above the format's floor."""
    judged = {(row["layer"], row["tensor"], row["what_if"]) for row in evidence.operands}
    asked = [
        r for r in evidence.ask("overview") if (r["layer"], r["tensor"], r["what_if"]) in judged or not r["recipe"]
    ]
    rows = [_with_excess(row, evidence) for row in asked]
    return sorted(rows, key=lambda r: (not (r["nan"] or r["inf"]), -r["excess"], r["layer"], r["tensor"]))[:WORST]


def _with_excess(row: Row, evidence: Evidence) -> Row:
    floor = noise_floor(row) or 0.0
    error = max(0.0, (row["rel_l2"] or 0.0) - floor)
    lost = (row["underflow_ratio"] or 0.0) + (row["saturated_ratio"] or 0.0)
    return {**row, "excess": lost + error, "sensitivity_ratio": sensitivity_ratio(evidence, row["layer"])}
