"""FP8 was asked for, and no layer computes in it.

Sign: run.json says where FP8 was asked for (fp8_asked), and no tensor was recorded under a recipe in force.
Cause: layers that are not the host's FP8 ones (a local specification, plain nn.Linear inside Transformer Engine's
autocast), a filter or a fallback plan that leaves none, a conversion that was skipped; nothing fails and nothing warns.
Remedy: build the model from the host's FP8 layers, or convert them, and look at what the filter leaves.
False alarm when: the FP8 layers are of a type that fp8dbg does not record, or of a part of the model that is not
attached to.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence
from fp8dbg.analysis.finding import Finding

CODE = "fp8_ignored"
EXPLAINS: frozenset[str] = frozenset()


def judge(evidence: Evidence) -> Iterator[Finding]:
    """At most one finding, for a run with figures."""
    asked = evidence.folder.meta.get("fp8_asked")
    if not asked or not evidence.operands or evidence.in_force:
        return
    layers = len({row["layer"] for row in evidence.operands})
    yield Finding(
        code=CODE,
        title="FP8 is not in use",
        severity="act",
        layer=None,
        tensor=None,
        gemm=None,
        first_step=evidence.run["first_step"],
        last_step=evidence.run["last_step"],
        summary=f"FP8 was asked for ({asked!s:.200}), and none of {layers} recorded layers computes in it.",
        basis="every figure of the run is of a recipe that is not in force",
        remedy="Build the model from the host's FP8 layers, or convert them; look at what a filter or plan leaves.",
        action="software",
        harm=2.0,
    )
