"""Values lost to zero, with no single cause to name.

Sign: underflow_ratio above the format's reach and the tensor's own history, while the scale in force is about the one
that current scaling would choose and no outlier stands out.
Cause: the tensor's values spread over more binades than the format has.
Remedy: a finer scale (row-wise, block or MXFP8), or BF16 for the GEMMs that read the tensor.
False alarm when: the small values carry nothing, as behind a gate that is shut; then sensitivity stays at its usual
value. Zeros, as after ReLU, are not underflow and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Suspect
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.verdicts import outlier, wrong_format
from fp8dbg.analysis.verdicts.shared import (
    finding_about,
    flushed,
    harm_of,
    harms,
    readers,
    scale_too_small,
    severity,
    under,
    when,
)
from fp8dbg.analysis.wording import percent, times

CODE = "underflow"
EXPLAINS: frozenset[str] = frozenset()


def judge(evidence: Evidence) -> Iterator[Finding]:
    """Findings for tensors that lose values and that no more particular verdict takes."""
    for suspect in flushed(evidence):
        if not (outlier.has_outlier(suspect) or wrong_format.too_narrow(suspect)):
            yield _finding(evidence, suspect)


def _finding(evidence: Evidence, suspect: Suspect) -> Finding:
    row, stretch = suspect.facts, suspect.stretch
    ratio = stretch["worst"]
    verb = "would be" if row["what_if"] else "is"
    scale = stretch["usual_scale_delta"]
    blame = f"; the scale is {times(scale)} too small" if scale is not None and scale_too_small(suspect) else ""
    return finding_about(
        suspect,
        code=CODE,
        title="Values lost to zero",
        severity=severity(evidence, row, "act" if harms(suspect) else "watch"),
        summary=f"{percent(ratio)} of {row['tensor']} {verb} flushed to zero{under(row)} "
        f"{when(evidence, suspect)}{blame}.",
        remedy=_remedy(suspect),
        action="scale" if scale_too_small(suspect) else "bf16",
        gemms=() if scale_too_small(suspect) else readers(row["tensor"]),
        harm=harm_of(evidence, suspect, ratio),
    )


def _remedy(suspect: Suspect) -> str:
    if scale_too_small(suspect):
        return "Repair the scale before anything else: find what keeps it small."
    gemms = " and ".join(readers(suspect.facts["tensor"]))
    return f"Use a finer scale for this layer (block or MXFP8), or keep its {gemms} in BF16."
