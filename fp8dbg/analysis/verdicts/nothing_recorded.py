"""A run folder without a single figure.

Sign: the table tensors is empty.
Cause: the model has no layer that an adapter claims; the session was closed before the first sampled step ended; the
model was compiled before attaching.
Remedy: attach before training and before torch.compile, and let at least one sampled step finish.
False alarm when: the run has only just begun.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence
from fp8dbg.analysis.finding import Finding

CODE = "nothing_recorded"
EXPLAINS: frozenset[str] = frozenset()


def judge(evidence: Evidence) -> Iterator[Finding]:
    """At most one finding."""
    if evidence.tensors:
        return
    steps = evidence.run["steps"]
    yield Finding(
        code=CODE,
        title="Nothing recorded",
        severity="act",
        layer=None,
        tensor=None,
        gemm=None,
        first_step=evidence.run["first_step"],
        last_step=evidence.run["last_step"],
        summary=f"No figures were recorded: {f'of {steps} steps' if steps else 'no step was seen,'} none was sampled.",
        basis="the table tensors is empty",
        remedy="Call fp8dbg.attach(model, ...) before training and let at least one sampled step finish.",
        action="record",
        harm=10.0,
    )
