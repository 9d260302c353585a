"""A scale in force that is too large for its tensor, so that the largest values are clipped.

Sign: saturated_ratio above its usual value with scale_delta above 0, and rel_l2 beyond the format's noise; between
sampled steps, scale x amax far beyond the format's maximum in the amax table.
Cause: delayed scaling follows amax a step late: a batch whose values jump, or fast growth, meets yesterday's scale.
Remedy: look at the batch of that step; for jumps that recur, current scaling for the layer, or a margin of up to 3
where that covers them (each is a factor of 2, and as much less for small values); not BF16, which only hides the jump.
False alarm when: it is the first steps of a run, while the history fills, or a lone element clips.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Row, Suspect
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.headroom import margin_for, margin_of, room_for
from fp8dbg.analysis.verdicts.shared import (
    EXCESS,
    clipped,
    finding_about,
    harm_of,
    severity,
    under,
    when,
)
from fp8dbg.analysis.wording import percent, times
from fp8dbg.numerics.formats import FORMATS

CODE = "saturation"
EXPLAINS: frozenset[str] = frozenset({"gain_error"})
TITLE = "Scale too large: values clip"
REMEDY_FINE = "Round block scales up, so that no block's largest value clips, and look at how they are computed."

JUMP = 2.5
"""log2 of scale x amax over the format's maximum that counts as a jump where only amax was recorded: 5.7 times, where a
Gaussian tensor that grew as a whole has two fifths of its values clipped."""

UNUSUAL = 1.5
"""log2 by which it must exceed what 98 % of the steps stay below."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    """Findings for clipping on sampled steps, then for jumps between them."""
    clips = [s for s in clipped(evidence) if _too_large(s)]
    for suspect in clips:
        together = [_margin(s) for s in clips if s.first_step == suspect.first_step]
        yield _finding(evidence, suspect, max((m for m in together if m is not None), default=None))
    yield from _jumps(evidence, [(s.facts["layer"], s.facts["tensor"]) for s in clips])


def _too_large(suspect: Suspect) -> bool:
    delta = suspect.stretch["worst_scale_delta"]
    return delta is None or delta > EXCESS


def _margin(suspect: Suspect) -> int | None:
    """The margin that would have held it; scale_delta compares with a scale that has the margin in force."""
    delta = suspect.stretch["worst_scale_delta"]
    return margin_for(suspect.facts, None if delta is None else delta - margin_of(suspect.facts))


def _finding(evidence: Evidence, suspect: Suspect, margin: int | None) -> Finding:
    row, stretch = suspect.facts, suspect.stretch
    delta = stretch["worst_scale_delta"]
    scale = f"the scale in force {'would be' if row['what_if'] else 'is'} {times(delta)} too large" if delta else ""
    lost = max(stretch["worst"], min(1.0, stretch["worst_rel_l2"] or 0.0))
    return finding_about(
        suspect,
        code=CODE,
        title=TITLE,
        severity=severity(evidence, row, "act"),
        summary=f"{percent(stretch['worst'])} of {row['tensor']} {'would be' if row['what_if'] else 'is'} clipped"
        f"{under(row)} {when(evidence, suspect)}{': ' + scale if scale else ''}.",
        remedy=_remedy(suspect, margin) if row["granularity"] == "tensor" else REMEDY_FINE,
        action="scale" if row["granularity"] == "tensor" else "recipe",
        harm=harm_of(evidence, suspect, lost),
        evidence=[stretch | {"margin_needed": margin}],
    )


def _remedy(suspect: Suspect, margin: int | None) -> str:
    return room_for(suspect.facts, suspect.first_step, margin, once=suspect.steps == 1)


def _jumps(evidence: Evidence, seen: list[tuple[str, str]]) -> Iterator[Finding]:
    """Steps without figures on which amax shows that the bulk of an activation or weight was clipped.

    Gradients are left out: a single large gradient is no news, and only figures could tell it from a jump.
    """
    formats = {(r["layer"], r["tensor"]): r for r in evidence.operands if r["granularity"] == "tensor"}
    jumps: dict[int, list[tuple[float, Row, Row]]] = {}
    for amax in evidence.amax:
        row = formats.get((amax["layer"], amax["tensor"]))
        if row is None or row["tensor"] == "grad_output" or (row["layer"], row["tensor"]) in seen:
            continue
        over = _overshoot(amax, FORMATS[row["format"]].max)
        if over > JUMP:
            jumps.setdefault(amax["highest_at"], []).append((over, row, amax))
    for step, group in jumps.items():
        margins = [margin_for(row, over) for over, row, _ in group]
        margin = max((m for m in margins if m is not None), default=None)
        for over, row, amax in group:
            wanted = "act" if len(group) > 1 else "watch"
            yield _jump(evidence, step, over, row, amax | {"margin_needed": margin}, wanted)


def _overshoot(amax: Row, largest: float) -> float:
    """log2 of how far the largest value went beyond the maximum; 0 if the tensor goes as far every now and then."""
    reach, high = amax["highest_reach"], amax["high_reach"]
    if reach is None or high is None or amax["highest_at"] == amax["first_step"] or reach - high < UNUSUAL:
        return 0.0
    return float(reach - math.log2(largest))


def _jump(evidence: Evidence, step: int, over: float, row: Row, amax: Row, wanted: str) -> Finding:
    return Finding(
        code=CODE,
        title=TITLE,
        severity=severity(evidence, row, wanted),
        layer=row["layer"],
        tensor=row["tensor"],
        gemm=None,
        first_step=step,
        last_step=step,
        summary=f"The amax of {row['tensor']} {'would have gone' if row['what_if'] else 'went'} {times(over)} beyond "
        f"what its scale had room for{under(row)} on step {step}, between sampled steps.",
        basis=f"its scale x amax on every other step; {times(JUMP)} beyond the format's maximum clips two fifths of a "
        "tensor that grew as a whole",
        remedy=room_for(row, step, amax["margin_needed"], once=True),
        action="scale",
        harm=0.25 * min(1.0, over / 5),
        what_if=row["what_if"],
        evidence=[amax],
    )
