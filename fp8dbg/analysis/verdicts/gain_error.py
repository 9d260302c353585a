"""Values that come back from FP8 too large or too small, or from another tensor than the one recorded.

Sign: norm_ratio away from 1 while cosine stays near 1 and neither saturation nor underflow explains it; or a weight
whose FP8 copy is further away from it than a cast of it could be; or fprop and dgrad of a layer, which both read its
weight, with error that the current weight does not explain while wgrad has none.
Cause: a scale and its inverse that disagree (one of them from another step), a cached FP8 copy of a weight that was not
refreshed after the update, a scale applied twice.
Remedy: refresh or turn off the weight cache, and look at how the inverse scale travels; BF16 hides it.
False alarm when: the tensor clips or is flushed; those verdicts then stand in its place.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Suspect
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.verdicts.shared import (
    FLUSHED,
    GAIN,
    finding_about,
    lasting,
    misread_weights,
    severity,
    stale_copies,
    unexplained,
    when,
)
from fp8dbg.analysis.wording import factor, percent

CODE = "gain_error"
EXPLAINS: frozenset[str] = frozenset()
TITLE = "Gain error"
NOT_CURRENT = "Weight is not the current one"
REFRESH = "Refresh the cached FP8 weight after every update, or turn the cache off; BF16 is not needed."


def judge(evidence: Evidence) -> Iterator[Finding]:
    """Findings for operands whose norm FP8 changes, and for weights that the GEMMs read otherwise than they are."""
    tensors = [(r, GAIN.limit(r)) for r in evidence.operands if (r["worst_gain"] or 0) > GAIN.floor]
    copies, gains = stale_copies(evidence), evidence.suspects("gain", tensors)
    for suspect in gains:
        if not _explained(suspect) and not (suspect.facts["tensor"] == "weight" and suspect.facts["layer"] in copies):
            yield _finding(evidence, suspect)
    for suspect in copies.values():
        yield _stale(evidence, suspect)
    for layer, suspect in misread_weights(unexplained(evidence)).items():
        if layer not in copies:
            yield _misread(evidence, suspect)


def _explained(suspect: Suspect) -> bool:
    """Whether clipped or flushed values account for the change of norm: a few large values can hold most of a norm."""
    stretch = suspect.stretch
    clips = (stretch["worst_saturated_ratio"] or 0) > 0 and (stretch["worst_norm_ratio"] or 0) < 1
    return clips or (stretch["worst_underflow_ratio"] or 0) > FLUSHED.floor


def _finding(evidence: Evidence, suspect: Suspect) -> Finding:
    ratio, row = 2.0 ** suspect.stretch["worst"], suspect.facts
    return finding_about(
        suspect,
        code=CODE,
        title=TITLE,
        severity=severity(evidence, row, "act" if lasting(suspect) else "watch"),
        summary=f"The norm of {row['tensor']} {'would be' if row['what_if'] else 'is'} off by {factor(ratio)} as FP8 "
        f"sees it, {when(evidence, suspect)}, with nothing clipped or flushed.",
        remedy="Compare scale and inverse scale, and refresh the cached FP8 weight after every update.",
        action="software",
        harm=min(1.0, ratio - 1.0) + 0.25,
    )


def _stale(evidence: Evidence, suspect: Suspect) -> Finding:
    worst = suspect.stretch["worst"]
    return finding_about(
        suspect,
        code=CODE,
        title=NOT_CURRENT,
        severity="act" if lasting(suspect) else "watch",
        summary=f"The GEMMs read another weight than the layer's {when(evidence, suspect)}: its FP8 copy is "
        f"{percent(worst)} away from it, more than a cast of it would be.",
        remedy=REFRESH,
        action="software",
        harm=min(1.0, worst) + 0.25,
    )


def _misread(evidence: Evidence, suspect: Suspect) -> Finding:
    worst = suspect.stretch["worst"]
    return finding_about(
        suspect,
        tensor="weight",
        gemm=None,
        code=CODE,
        title=NOT_CURRENT,
        severity="act" if lasting(suspect) else "watch",
        summary=f"fprop and dgrad read another weight than the layer's {when(evidence, suspect)}: {percent(worst)} of "
        "their output is error that the weight does not explain, while wgrad, which does not read it, has none.",
        remedy=REFRESH,
        action="software",
        harm=min(1.0, worst) + 0.25,
    )
