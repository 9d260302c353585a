"""A format that does not suit its tensor: E4M3 where a gradient needs E5M2's reach, or E5M2 where E4M3 would hold.

Sign: grad_output in E4M3 with a large underflow_ratio under a fitting scale, all of it within the reach of E5M2; or
input or weight in E5M2, at twice the error that E4M3 would have.
Cause: gradients spread over more binades than E4M3's 18 (E5M2 has 32); activations and weights do not and would rather
have the extra mantissa bit.
Remedy: E5M2 for gradients and E4M3 for the rest (HYBRID), or finer scales.
False alarm when: the flushed gradients belong to tokens that hardly count, as at the output of a trained softmax;
grad_alignment of dgrad and wgrad then stays at 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Suspect
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.verdicts.shared import (
    NARROW,
    finding_about,
    flushed,
    harm_of,
    lasting,
    scale_too_small,
    severity,
    under,
    when,
)
from fp8dbg.analysis.wording import percent

CODE = "wrong_format"
EXPLAINS = frozenset({"underflow", "outlier"})


HALF = 0.5
"""Share of a gradient whose loss harms; healthy ones lose up to a third in E4M3 while they settle."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    """Findings for gradients in a format with too few binades."""
    for suspect in flushed(evidence):
        if too_narrow(suspect):
            yield _finding(evidence, suspect)


def too_narrow(suspect: Suspect) -> bool:
    """Whether this is a gradient whose format, not its scale, lacks the reach."""
    row = suspect.facts
    return row["tensor"] == "grad_output" and row["format"] in NARROW and not scale_too_small(suspect)


def _finding(evidence: Evidence, suspect: Suspect) -> Finding:
    row, ratio = suspect.facts, suspect.stretch["worst"]
    verb = "would be" if row["what_if"] else "is"
    return finding_about(
        suspect,
        code=CODE,
        title="Format too narrow for gradients",
        severity=severity(evidence, row, "act" if ratio >= HALF and lasting(suspect) else "watch"),
        summary=f"{percent(ratio)} of {row['tensor']} {verb} flushed to zero in {row['format'].upper()}{under(row)} "
        f"{when(evidence, suspect)}; its values spread further than the format reaches.",
        remedy="Use E5M2 for gradients (HYBRID), or scale them by block.",
        action="recipe",
        harm=harm_of(evidence, suspect, ratio),
    )
