"""A loss spike that FP8 has no part in.

Sign: the loss spiked, no figure of the casts (underflow, saturation, rel_l2, scale_delta) left its usual range in the
steps before it or on it, on figures that were recorded near enough to tell, and no scale was too large or stale then.
Cause: the data of that batch, the learning rate, the optimizer's state.
Remedy: look at the batch and at the gradient norm; keeping layers in BF16 will not help.
False alarm when: no step near the spike was sampled, so that only amax speaks for the casts.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Row
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.spikes import Spike, find_spikes
from fp8dbg.analysis.verdicts import saturation, stale_scale
from fp8dbg.analysis.wording import factor

CODE = "not_fp8"
EXPLAINS: frozenset[str] = frozenset()

CAST_FIGURES = ("underflow_ratio", "saturated_ratio", "rel_l2", "scale_delta")
"""Figures that say what the cast does, rather than what the tensor is."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    """A finding for each finite spike that no cast moved before."""
    if not evidence.operands:
        return
    for spike in find_spikes(evidence):
        moved = any(_may_have_caused(mover) for mover in spike.first_movers)
        if spike.loss is not None and not moved and not _scale_failed(evidence, spike):
            yield _finding(spike)


def _may_have_caused(mover: Row) -> bool:
    """Whether a cast moved in time: a gradient's on the spike's own step is computed after the loss."""
    after = mover["tensor"] == "grad_output" and mover["steps_before"] == 0
    return mover["figure"] in CAST_FIGURES and not after


def _scale_failed(evidence: Evidence, spike: Spike) -> bool:
    """Whether a scale did not fit in the sampling interval before the spike or on it: a cast may have caused it."""
    since = spike.step - evidence.interval
    found = (finding for verdict in (saturation, stale_scale) for finding in verdict.judge(evidence))
    return any((f.first_step or 0) <= spike.last_step and (f.last_step or since) >= since for f in found)


def _finding(spike: Spike) -> Finding:
    moved = [f"{m['layer']} {m['tensor']} {m['figure']}" for m in spike.first_movers[:1]]
    return Finding(
        code=CODE,
        title="Spike without FP8",
        severity="info",
        layer=None,
        tensor=None,
        gemm=None,
        first_step=spike.step,
        last_step=spike.last_step,
        summary=f"The loss spiked on step {spike.step} to {spike.loss:.3g} and no cast had moved before it"
        f"{f' (first to move: {moved[0]})' if moved else ''}.",
        basis=f"the loss is {factor(spike.score or 0.0)} its usual step-to-step change away; no figure of the "
        "casts that was recorded left its usual range in the sampling interval before it",
        remedy="Look at the batch of that step and at the gradient norm; BF16 will not help.",
        action="none",
        harm=0.2,
        evidence=list(spike.first_movers),
    )
