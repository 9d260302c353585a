"""A format that does not suit its tensor: E4M3 where a gradient needs E5M2's reach, or E5M2 where E4M3 would hold.

Sign: grad_output in E4M3 with a large underflow_ratio under a fitting scale, all of it within the reach of E5M2; or
input or weight in E5M2, at twice the error that E4M3 would have.
Cause: gradients spread over more binades than E4M3's 18 (E5M2 has 32); activations and weights do not and would rather
have the extra mantissa bit.
Remedy: E5M2 for gradients and E4M3 for the rest (HYBRID), or finer scales.
False alarm when: the flushed gradients belong to tokens that hardly count, as at the output of a trained softmax.
grad_alignment does not tell: large values decide it, and it is 0.996 where 61 % of a log-normal gradient is lost.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Row, Suspect
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.scales import reach
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
from fp8dbg.numerics.formats import FORMATS

CODE = "wrong_format"
EXPLAINS = frozenset({"underflow", "outlier"})


HALF = 0.5
"""Share of a gradient whose loss harms; healthy ones lose up to a third in E4M3 while they settle."""


WIDE = {"e5m2": "e4m3", "e5m2fnuz": "e4m3fnuz"}
"""Formats of many binades and few digits, and their counterparts."""

ROOM = 64.0
"""How far the median must lie above the largest value that E4M3 would flush: then next to nothing is."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    """Findings for gradients in a format with too few binades, and for the rest in one with too few digits."""
    for suspect in flushed(evidence):
        if too_narrow(suspect):
            yield _finding(evidence, suspect)
    for row in evidence.operands:
        if row["format"] in WIDE and row["tensor"] in ("input", "weight") and _would_hold(row):
            yield _too_coarse(evidence, row)


def _would_hold(row: Row) -> bool:
    """Whether E4M3 has room for the tensor: its median stays ``ROOM`` above what would be flushed beside its amax."""
    spread = row["worst_peak_to_median"]
    return spread is not None and spread * ROOM < reach(row | {"format": WIDE[row["format"]]})


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


def _too_coarse(evidence: Evidence, row: Row) -> Finding:
    wide, narrow = (FORMATS[name].noise.rel_l2 for name in (row["format"], WIDE[row["format"]]))  # type: ignore[union-attr]  # both have one
    return Finding(
        code=CODE,
        title="Format too coarse",
        severity=severity(evidence, row, "watch"),
        layer=row["layer"],
        tensor=row["tensor"],
        gemm=None,
        first_step=row["first_step"],
        last_step=row["last_step"],
        summary=f"{row['tensor']} {'would be' if row['what_if'] else 'is'} in {row['format'].upper()}{under(row)}, "
        f"whose error is {percent(wide)} of healthy data, while its values spread so little that E4M3, at "
        f"{percent(narrow)}, would hold them.",
        basis=f"amax is {row['worst_peak_to_median']:,.0f} times the median at most; E4M3 reaches 458,752 times down",
        remedy="Use E4M3 for input and weight, and E5M2 for gradients alone (HYBRID).",
        action="recipe",
        harm=0.1,
        what_if=row["what_if"],
        evidence=[row],
    )
