"""A GEMM whose error its quantised operands do not explain.

Sign: error_unexplained, the part of the real FP8 output that an emulation from the same operands and scales does not
give, above what rounding the output accounts for; fprop and wgrad differ from each other.
Cause: products accumulated in too few bits (a split accumulator that is off, Hopper's 14-bit partial sums over a long
contraction), or scales that the emulation cannot see.
Remedy: turn the split accumulator on for this GEMM; if that is the price of speed, keep it in BF16.
False alarm when: the output is small against the products that cancel in it: then any accumulation shows.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Suspect
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.verdicts.shared import (
    UNEXPLAINED,
    finding_about,
    lasting,
    misread_weights,
    stale_copies,
    unexplained,
    when,
)
from fp8dbg.analysis.wording import percent

CODE = "accumulation"
EXPLAINS: frozenset[str] = frozenset()

LARGE = 0.05
"""Unexplained error above that of the casts themselves (fprop 0.0375, dgrad and wgrad 0.059)."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    """Findings for GEMMs with unexplained error that no misread weight accounts for."""
    suspects = unexplained(evidence)
    misread = {**misread_weights(suspects), **stale_copies(evidence)}
    for suspect in suspects:
        if suspect.facts["layer"] not in misread:
            yield _finding(evidence, suspect)


def _finding(evidence: Evidence, suspect: Suspect) -> Finding:
    row, worst = suspect.facts, suspect.stretch["worst"]
    return finding_about(
        suspect,
        code=CODE,
        title="Error the operands do not explain",
        severity="act" if worst > LARGE and lasting(suspect) else "watch",
        summary=f"{percent(worst)} of the {row['gemm']} output is error that its operands do not explain "
        f"{when(evidence, suspect)}, over a contraction of {row['k']:,}.",
        remedy=f"Use the split accumulator for {row['gemm']}; look at scales that were not recorded.",
        action="software",
        harm=min(1.0, worst / UNEXPLAINED.floor / 10),
    )
