"""Activation checkpointing that computes something else the second time.

Sign: events of kind recompute: the input that a layer reads as its forward is run again in the backward differs, by
more than 1 % of amax, from every input that it read in the first pass of that step.
Cause: random numbers that are not restored (dropout with preserve_rng_state=False), a buffer or scale that the first
pass moved on, a mode or an autocast that the second pass does not have, data that was written into in between.
Remedy: make the forward repeatable: restore the random state, move updates out of the checkpointed part, enter the same
contexts; until then do not checkpoint this part. BF16 hides nothing of it.
False alarm when: something upstream draws random numbers on purpose that no restored state can repeat; the gradient is
then one of another forward, which is rarely meant.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Row
from fp8dbg.analysis.finding import Finding

CODE = "recompute_mismatch"
EXPLAINS: frozenset[str] = frozenset()


def judge(evidence: Evidence) -> Iterator[Finding]:
    """Findings for layers whose recompute read another input; layers alike are gathered into the first."""
    events: dict[str, list[Row]] = {}
    for event in evidence.ask("events", kind="recompute"):
        if event["layer"] is not None and event["step"] is not None:
            events.setdefault(event["layer"], []).append(event)
    for layer, found in events.items():
        yield _finding(evidence, layer, found)


def _finding(evidence: Evidence, layer: str, events: list[Row]) -> Finding:
    steps = sorted({int(event["step"]) for event in events})
    again = f" and {len(steps) - 1} later ones" if len(steps) > 1 else ""
    return Finding(
        code=CODE,
        title="Recompute differs",
        severity="act" if len(steps) > 1 or steps[-1] == evidence.end else "watch",
        layer=layer,
        tensor="input",
        gemm=None,
        first_step=steps[0],
        last_step=steps[-1],
        summary=f"On step {steps[0]}{again}: {str(events[0]['detail']).rstrip('.')}.",
        basis="a repeated forward reads the same values; kernels that add up in another order differ by less than 1 %",
        remedy="Restore the random state and every buffer before the recompute, or do not checkpoint this part.",
        action="software",
        harm=0.8,
        evidence=events[:20],
    )
