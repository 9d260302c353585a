"""A run opened for judgement: the tables of its folder, its findings and its fallback plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from fp8dbg.analysis.evidence import Evidence
from fp8dbg.analysis.finding import Finding, fold, worst_first
from fp8dbg.analysis.plan import Plan, as_shown
from fp8dbg.analysis.recommend import Recommendation, recommend, require_enough
from fp8dbg.analysis.verdicts import EXPLAINS, VERDICTS
from fp8dbg.analysis.wording import listed
from fp8dbg.runs.folder import Folder, contents_of

SAME_HARM = 0.5
"""Among findings of one kind and one onset, the first layer in execution order with this share of the worst leads."""

FLUSHING = ("outlier", "underflow", "stale_scale", "frozen_scale", "wrong_format")
"""Codes of findings that a tensor is flushed to zero."""


class Run(Folder):
    """A run folder with everything that ``Folder`` offers, and the verdicts on it."""

    @cached_property
    def evidence(self) -> Evidence:
        """The facts that the verdicts judge."""
        return Evidence(self)

    def findings(self) -> list[Finding]:
        """What is wrong with this run, worst first; empty for a healthy one."""
        return list(self._findings)

    def plan(self) -> Plan:
        """The GEMMs to keep in BF16; empty where none needs it or something else is the right action."""
        return self._recommendation.plan

    def recommendation(self) -> Recommendation:
        """The plan with what it buys and costs, and what to do where BF16 is not the answer.

        Raises:
            NothingRecordedError: too little was recorded to say.
        """
        require_enough(self.evidence, self._findings)
        return self._recommendation

    @cached_property
    def _recommendation(self) -> Recommendation:
        return replace(self._advice, plan=as_shown(self._advice.plan, self._findings))

    @cached_property
    def _advice(self) -> Recommendation:
        """The recommendation before findings have their order, which the harm of its curve decides."""
        return recommend(self.evidence, self._judged, self._kept_in_bf16)

    def _repr_html_(self) -> str:
        """The run in a notebook: headline, facts, findings."""
        from fp8dbg.analysis.notebook import html_of
        from fp8dbg.analysis.summary import summarise  # which itself needs this class

        return html_of(summarise(self))

    @cached_property
    def _findings(self) -> list[Finding]:
        found = worst_first(eased(f, self._kept_in_bf16) for f in self._judged)
        order = self.evidence.layer_order
        if not any(_calls_for_bf16(f) for f in found):
            return origins_first(found, order)
        advice = self._advice
        harms = {(point.layer, point.gemm): point.harm for point in advice.curve}
        weighed = [replace(f, gemm_harm=_gemm_harm(f, harms)) if _calls_for_bf16(f) else f for f in found]
        return [as_planned(f, advice.plan, set(harms)) for f in origins_first(weighed, order)]

    @cached_property
    def _judged(self) -> list[Finding]:
        judged = [finding for verdict in VERDICTS for finding in verdict.judge(self.evidence)]
        judged = _without_echoes(_before_the_end(judged), self.evidence.interval)
        return worst_first(gather(fold(judged, EXPLAINS), self.evidence.layer_order))

    @property
    def _kept_in_bf16(self) -> dict[str, list[str]]:
        layers = [entry for entry in self.meta.get("layers") or [] if isinstance(entry, Mapping)]
        return {str(entry.get("layer")): list(entry.get("bf16_gemms") or []) for entry in layers}


def open_run(path: str | Path | Iterable[str | Path]) -> Run:
    """Open a run folder, or the folders of several ranks of one run.

    Raises:
        RunFolderError: a folder is missing, empty, of something else, or of a newer schema.
    """
    return Run(contents_of(path))


def eased(finding: Finding, kept: Mapping[str, Iterable[str]]) -> Finding:
    """A finding whose forward GEMM is in BF16 already is one to watch: what is left of it hardly shows in the loss."""
    in_bf16 = set(kept.get(finding.layer or "", ())) & set(finding.gemms)
    if finding.action != "bf16" or finding.severity != "act" or finding.what_if or "fprop" not in in_bf16:
        return finding
    rest = " and ".join(gemm for gemm in finding.gemms if gemm not in in_bf16)
    remedy = f"Its fprop is in BF16 already; {rest} can follow at a price." if rest else "It is in BF16 already."
    return replace(finding, severity="watch", remedy=remedy)


def origins_first(findings: list[Finding], order: Mapping[str, int]) -> list[Finding]:
    """Findings of one kind with the origin before its symptoms, in the places that the kind takes up.

    What a tensor loses does not tell how far the loss feels it, and a broken layer breaks the gradients of those after
    it: so among findings that call for BF16, of whatever code, GEMM harm goes before the share lost, where it is known
    of all of them. Those with ``SAME_HARM`` of the worst are as bad as each other: the earlier onset is first, then
    the first in execution order.
    """
    kinds: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(_kind(finding), []).append(finding)
    ranked = {kind: iter(_ranked(found, order)) for kind, found in kinds.items()}
    return [next(ranked[_kind(finding)]) for finding in findings]


def _kind(finding: Finding) -> tuple[str, str]:
    return finding.severity, "bf16" if _calls_for_bf16(finding) else finding.code


def _ranked(findings: list[Finding], order: Mapping[str, int]) -> list[Finding]:
    known = all(f.gemm_harm is not None for f in findings)
    harms = [(f.gemm_harm or 0.0) if known else f.harm for f in findings]
    ranked: list[Finding] = []
    left = sorted(zip(harms, findings, strict=True), key=lambda pair: -pair[0])
    while left:
        same = [f for harm, f in left if harm >= SAME_HARM * left[0][0]]
        ranked += sorted(same, key=lambda f: (f.first_step or 0, _execution(f, order)))
        left = left[len(same) :]
    return ranked


def _calls_for_bf16(finding: Finding) -> bool:
    return finding.severity == "act" and finding.action == "bf16"


def _gemm_harm(finding: Finding, harms: Mapping[tuple[str, str], float | None]) -> float | None:
    """None where it is not known of all its GEMMs, or where a forward error does not show: figures contradict then."""
    own = [harms.get((finding.layer or "", gemm)) for gemm in finding.gemms]
    known = [harm for harm in own if harm is not None]
    forward = harms.get((finding.layer or "", "fprop")) if "fprop" in finding.gemms else max(known, default=0.0)
    return max(known) if known and len(known) == len(own) and forward else None


def as_planned(finding: Finding, plan: Plan, weighed: set[tuple[str, str]]) -> Finding:
    """A finding whose remedy says too which of its GEMMs the plan leaves in FP8, if any.

    Args:
        finding: any.
        plan: of the run.
        weighed: layers and GEMMs among which the plan chose; what it did not weigh it says nothing about.
    """
    places = {(finding.layer or "", gemm) for gemm in finding.gemms}
    if not plan or not _calls_for_bf16(finding) or not weighed.issuperset(places):
        return finding
    taken = {(entry.layer, gemm) for entry in plan.entries for gemm in entry.gemms}
    chosen, spared = ([g for g in finding.gemms if ((finding.layer, g) in taken) is wanted] for wanted in (True, False))
    rest = " and ".join(spared)
    if not chosen:
        left = f"Apply the plan: it leaves {rest} of this layer in FP8, as the loss hardly feels them."
        return replace(finding, remedy=left)
    said = f" The plan takes its {' and '.join(chosen)} alone: the loss hardly feels {rest}." if rest else ""
    return replace(finding, remedy=finding.remedy + said)


def _before_the_end(findings: list[Finding]) -> list[Finding]:
    """Without what began when numbers had stopped being finite: that follows from it.

    A scale that an Inf froze does, too, but stays so until it is repaired.
    """
    ends = [
        f.first_step for f in findings if f.code == "non_finite" and f.severity == "act" and f.first_step is not None
    ]
    if not ends:
        return findings
    kept = ("non_finite", "frozen_scale", "coverage")
    return [f for f in findings if f.code in kept or (f.first_step or 0) < min(ends)]


def _without_echoes(findings: list[Finding], interval: int) -> list[Finding]:
    """Without what another finding accounts for although it is about another tensor.

    What a flushed tensor feeds is zero; a loss spike while a finding to act on is in force, or beside it, may be that
    finding's.
    """
    acute = [f for f in findings if f.severity == "act"]
    onsets = [f.first_step or 0 for f in acute if f.code in FLUSHING]
    return [f for f in findings if not (_is_echo(f, onsets, interval) or _is_accounted_for(f, acute, interval))]


def _is_echo(finding: Finding, onsets: list[int], interval: int) -> bool:
    if finding.code != "dead_tensor" or finding.tensor == "weight":  # no cast empties a weight
        return False
    return any(0 <= (finding.first_step or 0) - onset <= interval for onset in onsets)


def _is_accounted_for(finding: Finding, acute: list[Finding], interval: int) -> bool:
    if finding.code != "not_fp8" or finding.first_step is None:
        return False
    before, after = finding.first_step - 2 * interval, finding.first_step + 2 * interval
    spans = [(f.first_step or 0, f.last_step or f.first_step or 0) for f in acute if f.what_if is None]
    return any(first <= after and last >= before for first, last in spans)


def gather(findings: list[Finding], order: Mapping[str, int]) -> list[Finding]:
    """One finding for those that share code, onset and action, where the action is not per layer.

    A batch that clips twenty layers is one thing to look at. Those that call for BF16 stay apart: the plan needs each.
    """
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for index, finding in enumerate(findings):
        alone = finding.action == "bf16" or finding.layer is None
        key = (finding.code, finding.severity, finding.first_step, finding.what_if, index if alone else None)
        groups.setdefault(key, []).append(finding)
    return [_gathered(group, order) for group in groups.values()]


def _execution(finding: Finding, order: Mapping[str, int]) -> tuple[int, int]:
    """Forward before backward, and backward from the last layer to the first."""
    place = order.get(finding.layer or "", 0)
    return (1, -place) if finding.tensor == "grad_output" else (0, place)


def _gathered(group: list[Finding], order: Mapping[str, int]) -> Finding:
    worst = max(f.harm for f in group)
    heavy = [f for f in group if f.harm >= SAME_HARM * worst]
    lead = min(heavy, key=lambda f: (_execution(f, order), -f.harm))
    rest = sorted((f for f in group if f is not lead), key=lambda f: -f.harm)
    if not rest:
        return lead
    names = [f"{f.layer} {f.tensor}" for f in rest]
    return replace(
        lead,
        summary=f"{lead.summary.rstrip('.')}; so it is with {listed(names)}.",
        harm=worst,
        last_step=max((f.last_step for f in group if f.last_step is not None), default=None),
        evidence=[row for f in (lead, *rest[:19]) for row in f.evidence],
    )
