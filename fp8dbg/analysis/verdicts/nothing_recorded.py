"""A run folder without a single figure.

Sign: the table tensors is empty.
Cause: the model has no layer that an adapter claims; the session was closed before the first sampled step ended; the
model was compiled before attaching; every=0 asked for no sampled step.
Remedy: attach before training and before torch.compile, with an every= above 0, and let at least one sampled step
finish.
False alarm when: the run has only just begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
        remedy=remedy(evidence),
        action="record",
        harm=10.0,
    )


def remedy(evidence: Evidence) -> str:
    """What to change so that there are figures next time; by the options that the run was recorded with."""
    options = evidence.folder.meta.get("options")
    if isinstance(options, Mapping) and options.get("every") == 0:
        return (
            "It was recorded with every=0, which keeps each step's amax and measures nothing in full: record with "
            "every=100, or fewer for a short run; fp8dbg control RUN --every 100 changes it in a live one."
        )
    return "Call fp8dbg.attach(model, ...) before training and let at least one sampled step finish."
