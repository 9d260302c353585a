"""A scale that no longer follows amax.

Sign: the scale stays the same while scale x amax goes beyond the format's maximum step after step (a scale that is
updated would have followed on the next one); or it is exactly 1, the value before any update, on later steps than the
first; and values are lost by it. Or it is 0, infinite or NaN.
Cause: the state is never updated (a module outside the host's autocast, an update that is skipped); an infinite amax in
the history, which freezes the scale until it has left; scale and history lost on resume.
Remedy: repair the state: find the update that does not happen, save and load the host's extra state, clear the Inf.
False alarm when: the recipe has static scales, or a scale of 1 happens to fit: nothing is lost then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from fp8dbg.analysis.evidence import Evidence, Row
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.scales import full_use, is_delayed
from fp8dbg.analysis.verdicts.shared import FLUSHED, error_matters, severity, stale_copies, under
from fp8dbg.analysis.wording import percent, period, times

CODE = "frozen_scale"
TITLE = "Frozen scale"
EXPLAINS = frozenset({"underflow", "saturation", "stale_scale", "outlier", "wrong_format", "gain_error"})

REMEDY = "Repair the scale state: make the update happen, load it on resume, clear the Inf; BF16 is not needed."

OUTGROWN_STEPS = 2
"""On how many steps amax must have outgrown one and the same scale."""

OUTGROWN = 0.5
"""log2 by which amax must have outgrown the scale: below it only the largest few values clip."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    """Findings for scales that stay while amax moves, and for scales that are 1 when they should not be."""
    rows = {(r["layer"], r["tensor"]): r for r in evidence.operands if is_delayed(r) and r["granularity"] == "tensor"}
    stuck = _outgrown(evidence, rows)
    other = {s.key for s in stuck} | {(layer, "weight") for layer in stale_copies(evidence)}
    at_one = _at_one(evidence, {key: row for key, row in rows.items() if key not in other})
    for sign in (*stuck, *at_one):
        yield _finding(evidence, rows[sign.key], sign)
    for row in evidence.operands:
        if row["steps_unusable"]:
            yield _unusable(evidence, row)


@dataclass(frozen=True)
class _Sign:
    """How a tensor's scale is known to be stuck: since when, until when, why, and log2 of how wrong it is."""

    key: tuple[str, str]
    since: int
    until: int
    why: str
    wrong: float
    row: Row


def _outgrown(evidence: Evidence, rows: dict[tuple[str, str], Row]) -> list[_Sign]:
    """Scales that amax outgrew on step after step; of one tensor the one that did so most often."""
    asked = [{"layer": layer, "tensor": tensor, "full": full_use(row)} for (layer, tensor), row in rows.items()]
    found = evidence.ask("outgrown_scales", tensors=json.dumps(asked), at_least=OUTGROWN_STEPS) if asked else []
    signs: dict[tuple[str, str], _Sign] = {}
    for hold in found:
        key, since, infinite = (hold["layer"], hold["tensor"]), hold["first_outgrown"], hold["first_infinite"]
        why = f"amax outgrew it on {hold['outgrown_steps']} steps and it stayed"
        if infinite is not None and infinite <= since:
            why, since = f"an infinite amax on step {infinite} froze it, and {why}", infinite
        if hold["outgrown_reach"] > OUTGROWN:
            signs.setdefault(key, _Sign(key, since, hold["last_step"], why, hold["outgrown_reach"], hold))
    return list(signs.values())


def _at_one(evidence: Evidence, rows: dict[tuple[str, str], Row]) -> Iterator[_Sign]:
    """Scales of 1 after the first step that do not fit: never updated, or lost with the state."""
    for amax in evidence.amax:
        key = (amax["layer"], amax["tensor"])
        if key not in rows or not amax["rows_at_one"] or amax["last_at_one"] == amax["first_step"]:
            continue
        wrong = math.log2(amax["amax_at_one"] / full_use(rows[key])) if amax["amax_at_one"] else 0.0
        since, until = amax["first_step"], amax["last_at_one"]
        if amax["first_not_at_one"] is None:
            if _loses(rows[key]):
                yield _Sign(key, since, until, "it is 1, as before any update", wrong, amax)
        elif abs(wrong) > 1 and until > amax["first_not_at_one"]:
            yield _Sign(key, amax["back_at_one"], until, "it is 1 again, as if the state had been lost", wrong, amax)


def _loses(row: Row) -> bool:
    """Whether the tensor loses values: a scale of 1 that fits is no fault."""
    error = max(row["initial_rel_l2"] or 0.0, row["worst_rel_l2"] or 0.0)
    return _flushed(row) > FLUSHED.floor or error_matters(row, error)


def _flushed(row: Row) -> float:
    return max(row["initial_underflow_ratio"] or 0.0, row["worst_underflow_ratio"] or 0.0)


def _finding(evidence: Evidence, row: Row, sign: _Sign) -> Finding:
    flushed = _flushed(row) if sign.wrong < 0 else 0.0
    clipped = min(1.0, 2.0**sign.wrong - 1.0) if sign.wrong > 0 else 0.0
    lost = f", and {percent(flushed)} of the values are flushed to zero" if flushed > FLUSHED.floor else ""
    lasts = period(sign.since, sign.until, evidence.run["last_step"])
    return Finding(
        code=CODE,
        title=TITLE,
        severity=severity(evidence, row, "act"),
        layer=row["layer"],
        tensor=row["tensor"],
        gemm=None,
        first_step=sign.since,
        last_step=sign.until,
        summary=f"The scale of {row['tensor']} {'would not follow' if row['what_if'] else 'does not follow'} amax"
        f"{under(row)} {lasts}: {sign.why}; it is {times(sign.wrong)} too "
        f"{'large' if sign.wrong > 0 else 'small'}{lost}.",
        basis="under delayed scaling the step after an amax that outgrew the scale has a smaller scale, and only the "
        "first step has a scale of 1",
        remedy=REMEDY,
        action="scale",
        harm=max(flushed, clipped) + 0.5,
        what_if=row["what_if"],
        evidence=[sign.row],
    )


def _unusable(evidence: Evidence, row: Row) -> Finding:
    lasts = period(row["first_unusable"], row["last_unusable"], evidence.end)
    return Finding(
        code=CODE,
        title="Scale is no number",
        severity=severity(evidence, row, "act"),
        layer=row["layer"],
        tensor=row["tensor"],
        gemm=None,
        first_step=row["first_unusable"],
        last_step=row["last_unusable"],
        summary=f"The scale of {row['tensor']} {'would be' if row['what_if'] else 'is'} 0, infinite or NaN{under(row)} "
        f"{lasts}: no value survives the cast.",
        basis="a scale is a positive finite number",
        remedy=REMEDY,
        action="scale",
        harm=1.5,
        what_if=row["what_if"],
        evidence=[row],
    )
