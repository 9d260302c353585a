"""A scale that a past spike keeps too small.

Sign: scale_delta far below 0 while underflow_ratio is above its usual value and nothing saturates; an earlier amax in
the history matches the scale in force.
Cause: delayed scaling takes the largest amax of its whole history: one spike holds the scale down until it has left.
Remedy: the most recent amax, or a shorter history (16 rather than 1024: each spike then costs 16 steps); in the running
job, reset the amax history.
False alarm when: the scale is too small by less than some 64 times: that costs next to nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Suspect
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.scales import full_use
from fp8dbg.analysis.verdicts.shared import (
    finding_about,
    flushed,
    harm_of,
    harms,
    scale_too_small,
    severity,
    under,
    when,
)
from fp8dbg.analysis.wording import percent, times

CODE = "stale_scale"
EXPLAINS = frozenset({"underflow", "outlier"})


def judge(evidence: Evidence) -> Iterator[Finding]:
    """Findings for tensors flushed by a scale that an earlier amax explains."""
    suspects = [s for s in flushed(evidence) if scale_too_small(s) and s.facts["granularity"] == "tensor"]
    for suspect in suspects:
        spike = _spike(evidence, suspect)
        if spike is not None:
            yield _finding(evidence, suspect, spike)


def _spike(evidence: Evidence, suspect: Suspect) -> int | None:
    """The step whose amax the scale in force at the worst step still serves; None if no recorded step has it."""
    row = suspect.facts
    wanted = {"layer": row["layer"], "tensor": row["tensor"], "step": suspect.stretch["worst_step"]}
    found = evidence.ask("scale_origin", tensors=json.dumps([wanted | {"full": full_use(row)}]))
    step = found[0]["justified_by"] if found else None
    return step if step is not None and step < suspect.first_step else None


def _finding(evidence: Evidence, suspect: Suspect, spike: int) -> Finding:
    row, stretch = suspect.facts, suspect.stretch
    ratio = stretch["worst"]
    return finding_about(
        suspect,
        code=CODE,
        title="Stale scale after a spike",
        severity=severity(evidence, row, "act" if harms(suspect) else "watch"),
        summary=f"The scale of {row['tensor']} {'would be' if row['what_if'] else 'is'} "
        f"{times(stretch['usual_scale_delta'])} too small{under(row)} {when(evidence, suspect)}: it still serves the "
        f"spike of step {spike}, and {percent(ratio)} of the values are flushed to zero.",
        remedy="Shorten the amax history (to the most recent amax, or 16) or reset it; BF16 is not needed.",
        action="scale",
        harm=harm_of(evidence, suspect, ratio),
    )
