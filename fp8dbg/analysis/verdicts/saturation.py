"""A scale in force that is too large for its tensor, so that the largest values are clipped.

Sign: saturated_ratio above its usual value with scale_delta above 0, and rel_l2 beyond the format's noise; between
sampled steps, scale x amax far beyond the format's maximum in the amax table.
Cause: delayed scaling follows amax a step late: a batch whose values jump, or fast growth, meets yesterday's scale.
Remedy: look at the batch of that step; for jumps that recur, current scaling for the layer, or a margin of up to 3
where that covers them (each is a factor of 2, and as much less for small values); not BF16, which only hides the jump.
False alarm when: it is the first steps of a run, while the history fills, or a lone element clips.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fp8dbg.analysis.evidence import Evidence, Row, Suspect
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.headroom import margin_for, room_for
from fp8dbg.analysis.scales import full_use, is_delayed
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
    clips = _with_reach(evidence, [s for s in clipped(evidence) if _too_large(s)])
    for suspect in clips:
        together = [_margin(s) for s in clips if s.first_step == suspect.first_step]
        yield _finding(evidence, suspect, max((m for m in together if m is not None), default=None))
    yield from _jumps(evidence, [(s.facts["layer"], s.facts["tensor"]) for s in clips])


def _with_reach(evidence: Evidence, suspects: Sequence[Suspect]) -> list[Suspect]:
    """The suspects with how far they went in all their steps: a later stretch may need more room than the first."""
    wanted = [
        {k: s.facts[k] for k in ("layer", "tensor", "what_if")} | {"first_step": s.first_step, "last_step": s.last_step}
        for s in suspects
    ]
    rows = evidence.ask("highest_reach", tensors=json.dumps(wanted)) if wanted else []
    found = {(row["layer"], row["tensor"]): row for row in rows}
    nothing = {"highest_reach": None, "highest_scale_delta": None}
    return [replace(s, stretch=s.stretch | found.get((s.facts["layer"], s.facts["tensor"]), nothing)) for s in suspects]


def _too_large(suspect: Suspect) -> bool:
    delta = suspect.stretch["worst_scale_delta"]
    return delta is None or delta > EXCESS


def _margin(suspect: Suspect) -> int | None:
    """The margin that would have held it on all its steps."""
    return margin_for(suspect.facts, suspect.stretch["highest_reach"])


def _excess(suspect: Suspect) -> float:
    """log2 of how much too large the scale was at worst, on sampled steps and between them; 0 where unknown."""
    reach, delta = suspect.stretch["highest_reach"], suspect.stretch["highest_scale_delta"]
    beyond = 0.0 if reach is None else reach - math.log2(full_use(suspect.facts))
    return max(beyond, delta or 0.0)


def _finding(evidence: Evidence, suspect: Suspect, margin: int | None) -> Finding:
    row, stretch = suspect.facts, suspect.stretch
    be = "would be" if row["what_if"] else "is"
    up_to = "up to " if suspect.steps > 1 else ""
    excess = _excess(suspect)
    scale = f": the scale in force {be} {up_to}{times(excess)} too large" if excess > 0 else ""
    lost = max(stretch["worst"], min(1.0, stretch["worst_rel_l2"] or 0.0))
    return finding_about(
        suspect,
        code=CODE,
        title=TITLE,
        severity=severity(evidence, row, "act"),
        summary=f"{up_to.capitalize()}{percent(row['worst_saturated_ratio'])} of {row['tensor']} {be} clipped"
        f"{under(row)} {when(evidence, suspect)}{scale}.",
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
    rows = {
        (r["layer"], r["tensor"]): r
        for r in evidence.operands
        if r["granularity"] == "tensor" and r["tensor"] != "grad_output" and (r["layer"], r["tensor"]) not in seen
    }
    jumps: dict[int, list[tuple[float, Row, Row]]] = {}
    for row, amax in _unsampled(evidence, rows):
        over = _overshoot(row, amax)
        if over > JUMP:
            jumps.setdefault(amax["highest_at"], []).append((over, row, amax))
    for step, group in jumps.items():
        margins = [margin_for(row, amax["highest_reach"]) for _, row, amax in group]
        margin = max((m for m in margins if m is not None), default=None)
        for over, row, amax in group:
            wanted = "act" if len(group) > 1 else "watch"
            yield _jump(evidence, step, over, row, amax | {"margin_needed": margin}, wanted)


def _unsampled(evidence: Evidence, rows: dict[tuple[str, str], Row]) -> list[tuple[Row, Row]]:
    """Rows of tensor_facts and of amax_facts that may hold a jump: their reach is that of steps without figures."""
    jumped = {
        key: amax
        for amax in evidence.amax
        if (key := (amax["layer"], amax["tensor"])) in rows and _overshoot(rows[key], amax) > JUMP
    }
    wanted = [
        {k: amax[k] for k in ("layer", "tensor", "first_step")} | {"unset": 1.0 if is_delayed(rows[key]) else None}
        for key, amax in jumped.items()
    ]
    reaches = evidence.ask("unsampled_reach", tensors=json.dumps(wanted)) if wanted else []
    found = {(reach["layer"], reach["tensor"]): reach for reach in reaches}
    return [(rows[key], jumped[key] | reach) for key, reach in found.items()]


def _overshoot(row: Row, amax: Row) -> float:
    """log2 of how far the largest value went beyond the maximum; 0 if the tensor goes as far every now and then."""
    reach, high = amax["highest_reach"], amax["high_reach"]
    if reach is None or high is None or reach - high < UNUSUAL:
        return 0.0
    return float(reach - math.log2(FORMATS[row["format"]].max))


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
