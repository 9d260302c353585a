"""A scale that a past spike keeps too small.

Sign: scale_delta far below 0 while underflow_ratio is above its usual value and nothing saturates; an earlier amax in
the history matches the scale in force.
Cause: delayed scaling takes the largest amax of its whole history: one spike holds the scale down until it has left.
Remedy: the most recent amax, or a shorter history (16 rather than 1024: each spike then costs 16 steps), and a smaller
margin where it is large; in the running job, reset the amax history.
False alarm when: the scale is too small by less than some 64 times: that costs next to nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Row, Suspect
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.headroom import WORTH, margin_of
from fp8dbg.analysis.scales import full_use, recipe_of
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

SHORT = 16
"""An amax history that costs little: the spike has left it after as many steps."""


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
        remedy=_remedy(row, spike),
        action="scale",
        harm=harm_of(evidence, suspect, ratio),
    )


def _remedy(row: Row, spike: int) -> str:
    """What shortens the spike's stay, of what is not in force already."""
    recipe = recipe_of(row)
    parameters = recipe.parameters if recipe else {}
    if parameters.get("algorithm") == "most_recent" or parameters.get("history") == 1:
        first = f"Look at step {spike}: the scale follows the most recent amax already, and should have left it at once"
    elif float(parameters.get("history", math.inf)) > SHORT:
        first = f"Shorten the amax history (to the most recent amax, or {SHORT}) or reset it"
    else:
        first = (
            f"Use the most recent amax (the history of {parameters['history']} is short already) or reset the history"
        )
    margin = margin_of(row)
    extra = (
        f"; lower the margin of {margin}, which costs small values a factor of {2**margin}" if margin > WORTH else ""
    )
    return f"{first}{extra}; BF16 is not needed."
