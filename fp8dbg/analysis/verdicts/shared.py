"""What several verdicts need: which tensors lose values, whether the scale is to blame, and how a finding is made."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fp8dbg.analysis.evidence import Evidence, Row, Suspect
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.limits import Rule, noise_floor
from fp8dbg.analysis.scales import reach
from fp8dbg.analysis.wording import period
from fp8dbg.runs.schema import GEMMS

FLUSHED = Rule(
    "underflow_ratio", 0.02, 0.2, "E4M3 spans 18 binades and flushes about 1e-5 of Gaussian data, 5e-3 of trained ones"
)
FLUSHED_WIDE = Rule("underflow_ratio", 0.05, 0.2, "E5M2 spans 32 binades and flushes at most 2 % of healthy gradients")
FLUSHED_NARROW = Rule(
    "underflow_ratio", 0.4, 0.4, "healthy gradients spread so far that a format of few binades flushes up to a third"
)
FLUSHED_COARSE = Rule(
    "underflow_ratio", 0.8, 0.9, "a format of 4 bits, or with even steps, flushes up to half of healthy activations"
)
CLIPPED = Rule("saturated_ratio", 1e-3, 1e-2, "a scale that fits clips nothing, a delayed one now and then an element")
GAIN = Rule("gain", 0.2, 0.5, "rounding moves a norm by 12 % at most, and only where a single value makes it up")
UNEXPLAINED = Rule(
    "error_unexplained", 0.01, 0.05, "rounding the output to BF16 leaves 0.0017 to 0.003 of it unexplained"
)

MISREAD = Rule("rel_l2", 2.0, 4.0, "a cast that clips nothing is as far away as the format's noise and what it flushes")

BULK = 0.25
"""Share of a tensor's non-zero values whose loss is the loss of its bulk, not of a tail."""

SHORTFALL = 3.0
"""log2 by which a scale must be too small before it, not the tensor, is to blame for underflow: 8 times costs next to
nothing (metrics.md: 64 times too small leaves rel_l2 at 0.026)."""

EXCESS = 0.5
"""log2 by which a scale must be too large before it is to blame for clipping: below it only amax's neighbours clip."""

ERROR_FACTOR, ERROR_FACTOR_FINE = 2.0, 4.0
"""An error matters above this multiple of the format's floor. Scales finer than a tensor may be rounded so that each
block's largest value clips a little (OCP MX's floor): twice the floor is their normal."""

CLIPPED_GRADIENT, CLIPPED_NORM = 0.05, 0.5
"""Share of a gradient's values, and rel_l2 of an activation or weight, beyond which clipping once is too much."""

COARSE = 2.0**12
"""Reach (amax over the largest value flushed) below which a format is coarse: E2M1 has 24, INT8 254, E4M3 458,752."""

NARROW = ("e4m3", "e4m3fnuz", "e2m1", "int8")
"""Formats with fewer binades than gradients need."""

GROWTH = 10.0
"""How many times amax must grow from one step to the next to date an outlier."""

DATED = 20
"""Tensors whose onset is looked up in the amax table: each takes a query."""


def flushed(evidence: Evidence) -> list[Suspect]:
    """Operands that lose more values to zero than their format and their own history account for.

    A gradient must do so for a while: its values' spread changes from batch to batch.
    """
    limits = [(row, _flushed_rule(row).limit(row)) for row in evidence.operands]
    found = evidence.suspects(
        "underflow_ratio", [(r, limit) for r, limit in limits if (r["worst_underflow_ratio"] or 0) > limit.value]
    )
    return [s for s in found if s.facts["tensor"] != "grad_output" or persistent(s)]


def _flushed_rule(row: Row) -> Rule:
    if reach(row) < COARSE:
        return FLUSHED_COARSE
    if row["tensor"] != "grad_output":
        return FLUSHED
    return FLUSHED_NARROW if row["format"] in NARROW else FLUSHED_WIDE


def clipped(evidence: Evidence) -> list[Suspect]:
    """Operands that clip so much that their error leaves the format's noise.

    The bulk of the tensor, or most of its norm, or again and again: a few values that clip once are delayed scaling at
    work. A gradient's norm may be a few values', so it takes its bulk.
    """
    limits = [(row, CLIPPED.limit(row)) for row in evidence.operands if error_matters(row, row["worst_rel_l2"])]
    found = evidence.suspects(
        "saturated_ratio", [(r, limit) for r, limit in limits if (r["worst_saturated_ratio"] or 0) > limit.value]
    )
    return [s for s in found if error_matters(s.facts, s.stretch["worst_rel_l2"]) and (_much(s) or persistent(s))]


def _much(suspect: Suspect) -> bool:
    ratio, error = suspect.stretch["worst"], suspect.stretch["worst_rel_l2"]
    if suspect.facts["tensor"] == "grad_output":
        return bool(ratio > CLIPPED_GRADIENT)
    return bool(ratio > CLIPPED.cap or error > CLIPPED_NORM)


def error_matters(row: Row, rel_l2: float | None) -> bool:
    """Whether an error is beyond the noise of the row's format."""
    floor = noise_floor(row)
    factor = ERROR_FACTOR if row["granularity"] == "tensor" else ERROR_FACTOR_FINE
    return rel_l2 is not None and floor is not None and rel_l2 > factor * floor


def unexplained(evidence: Evidence) -> list[Suspect]:
    """GEMMs whose real output differs from what their operands give."""
    limits = [(row, UNEXPLAINED.limit(row)) for row in evidence.gemms]
    return evidence.gemm_suspects(
        "error_unexplained", [(r, limit) for r, limit in limits if (r["worst_error_unexplained"] or 0) > limit.value]
    )


def stale_copies(evidence: Evidence) -> dict[str, Suspect]:
    """Layers whose weight, as the GEMMs read it, is further away than a cast of it under that scale could bring it."""
    limits = [(r, MISREAD.limit(r, noise_floor(r) or 1.0)) for r in evidence.operands if _misread(r)]
    found = evidence.suspects("rel_l2", limits)
    return {s.facts["layer"]: s for s in found if not _cast_explains(s)}


def _misread(row: Row) -> bool:
    wanted = row["tensor"] == "weight" and not row["what_if"]
    return wanted and error_matters(row, row["worst_rel_l2"])


def _cast_explains(suspect: Suspect) -> bool:
    """What is flushed are the smallest values: their share of the energy is at most their share in number."""
    clips = (suspect.stretch["worst_saturated_ratio"] or 0) > CLIPPED.floor
    flushed_at_most = math.sqrt(suspect.stretch["worst_underflow_ratio"] or 0)
    return bool(clips or suspect.stretch["worst"] <= flushed_at_most + suspect.limit.value)


def misread_weights(suspects: list[Suspect]) -> dict[str, Suspect]:
    """Layers whose fprop and dgrad, the readers of the weight, are unexplained while wgrad is not; their fprop."""
    by_layer: dict[str, dict[str, Suspect]] = {}
    for suspect in suspects:
        by_layer.setdefault(suspect.facts["layer"], {})[suspect.facts["gemm"]] = suspect
    return {layer: gemms["fprop"] for layer, gemms in by_layer.items() if set(gemms) == {"fprop", "dgrad"}}


def scale_too_small(suspect: Suspect) -> bool:
    """Whether the scale in force, not the tensor, flushes the values."""
    delta = suspect.stretch["usual_scale_delta"]
    return delta is not None and delta < -SHORTFALL


def readers(tensor: str) -> tuple[str, ...]:
    """The GEMMs that read an operand."""
    return tuple(gemm for gemm, operands in GEMMS.items() if tensor in operands)


def sensitivity_ratio(evidence: Evidence, layer: str) -> float:
    """How much more the loss feels this layer's forward error than the run's median layer; 1 where unknown."""
    usual = sorted(g["usual_sensitivity"] for g in evidence.gemms if g["usual_sensitivity"])
    own = max((g["worst_sensitivity"] or 0 for g in evidence.gemms if g["layer"] == layer), default=0)
    return max(1.0, own / usual[len(usual) // 2]) if usual else 1.0


def harm_of(evidence: Evidence, suspect: Suspect, lost: float) -> float:
    """Rank of a loss: the share lost, halved if it passes at once, up to doubled where the loss function feels it."""
    lasting = 0.5 + 0.5 * suspect.share
    felt = 1.0 + min(1.0, math.log10(sensitivity_ratio(evidence, suspect.facts["layer"])) / 3)
    return lost * lasting * felt


def severity(evidence: Evidence, row: Row, wanted: str) -> str:
    """``wanted``; "info" for a recipe that is not in force in a run where another one is: nothing is being harmed."""
    return "info" if row["what_if"] and evidence.in_force else wanted


def persistent(suspect: Suspect) -> bool:
    """Whether it was so on most of at least three sampled steps since its onset."""
    return suspect.steps >= 3 and suspect.share >= 0.5


def harms(suspect: Suspect) -> bool:
    """Whether a flush is one to act on: it lasts, and the bulk is lost or the error has left the format's noise."""
    bulk = suspect.stretch["worst"] >= BULK
    return lasting(suspect) and (bulk or error_matters(suspect.facts, suspect.stretch["worst_rel_l2"]))


def lasting(suspect: Suspect) -> bool:
    """Whether it was so on at least two sampled steps, or is so at the end of the record."""
    return suspect.steps >= 2 or suspect.last_step >= suspect.facts["last_step"]


def when(evidence: Evidence, suspect: Suspect) -> str:
    """ "since step 120" and the like."""
    return period(suspect.first_step, suspect.last_step, evidence.end)


def under(row: Row) -> str:
    """ " under RECIPE" for a recipe that is not in force, else nothing."""
    return f" under {row['what_if']}" if row["what_if"] else ""


def dated(evidence: Evidence, suspects: Iterable[Suspect]) -> list[Suspect]:
    """The suspects with their onset as exact as the amax table has it, which is recorded on every step.

    Looked for in the two sampling intervals up to the first sampled step beyond the limit; a growth of less than
    ``GROWTH`` dates nothing. Only the ``DATED`` worst are looked up.
    """
    ranked = sorted(suspects, key=lambda s: -s.stretch["worst"])
    return [_dated(evidence, s) for s in ranked[:DATED]] + ranked[DATED:]


def _dated(evidence: Evidence, suspect: Suspect) -> Suspect:
    history = evidence.ask(
        "amax_history",
        layer=suspect.facts["layer"],
        tensor=suspect.facts["tensor"],
        from_step=max(0, suspect.first_step - 2 * evidence.interval),
        to_step=suspect.first_step,
    )
    sizes = [(row["step"], row["amax"]) for row in history if row["amax"]]
    growths = [(now / before, step) for (_, before), (step, now) in pairwise(sizes)]
    growth, step = max(growths, default=(0.0, 0))
    return replace(suspect, stretch=suspect.stretch | {"first_step": step}) if growth >= GROWTH else suspect


def finding_about(suspect: Suspect, **fields: Any) -> Finding:
    """A finding about a suspect's tensor; the fields not given follow from the suspect."""
    facts = suspect.facts
    given = {
        "layer": facts["layer"],
        "tensor": facts.get("tensor"),
        "gemm": facts.get("gemm"),
        "first_step": suspect.first_step,
        "last_step": suspect.last_step,
        "basis": suspect.limit.basis,
        "what_if": facts.get("what_if"),
        "evidence": [suspect.stretch],
    }
    return Finding(**(given | fields))
