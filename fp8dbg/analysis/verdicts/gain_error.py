"""Values that come back from FP8 too large or too small.

Sign: norm_ratio away from 1 while cosine stays near 1 and neither saturation nor underflow explains it; or a GEMM whose
real output differs in norm from the one its operands give.
Cause: a scale and its inverse that disagree (one of them from another step), a cached FP8 copy of a weight that was not
refreshed after the update, a scale applied twice.
Remedy: refresh or turn off the weight cache, and look at how the inverse scale travels; BF16 hides it.
False alarm when: the tensor clips or is flushed; those verdicts then stand in its place.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Suspect
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.verdicts.shared import FLUSHED, GAIN, finding_about, lasting, severity, when
from fp8dbg.analysis.wording import factor

CODE = "gain_error"
EXPLAINS = frozenset({"accumulation"})


def judge(evidence: Evidence) -> Iterator[Finding]:
    """Findings for operands, then for GEMMs, whose norm FP8 changes."""
    tensors = [(r, GAIN.limit(r)) for r in evidence.operands if (r["worst_gain"] or 0) > GAIN.floor]
    for suspect in evidence.suspects("gain", tensors):
        if not _explained(suspect):
            yield _finding(evidence, suspect, suspect.facts["tensor"])
    gemms = [
        (r, GAIN.limit(r))
        for r in evidence.gemms
        if (r["worst_gain"] or 0) > GAIN.floor and (r["worst_error_unexplained"] or 0) > GAIN.floor / 2
    ]
    for suspect in evidence.gemm_suspects("gain", gemms):
        yield _finding(evidence, suspect, f"the {suspect.facts['gemm']} output")


def _explained(suspect: Suspect) -> bool:
    """Whether clipped or flushed values account for the change of norm: a few large values can hold most of a norm."""
    stretch = suspect.stretch
    clips = (stretch["worst_saturated_ratio"] or 0) > 0 and (stretch["worst_norm_ratio"] or 0) < 1
    return clips or (stretch["worst_underflow_ratio"] or 0) > FLUSHED.floor


def _finding(evidence: Evidence, suspect: Suspect, what: str) -> Finding:
    ratio = 2.0 ** suspect.stretch["worst"]
    row = {"what_if": None, **suspect.facts}
    return finding_about(
        suspect,
        code=CODE,
        title="Gain error",
        severity=severity(evidence, row, "act" if lasting(suspect) else "watch"),
        summary=f"The norm of {what} {'would be' if row['what_if'] else 'is'} off by {factor(ratio)} as FP8 sees it, "
        f"{when(evidence, suspect)}, with nothing clipped or flushed.",
        remedy="Compare scale and inverse scale, and refresh the cached FP8 weight after every update.",
        action="software",
        harm=min(1.0, ratio - 1.0) + 0.25,
    )
