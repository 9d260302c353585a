"""Parts of the run that no figure speaks of.

Sign: layers in run.json without any row; events of kind gap or error.
Cause: layers compiled before attaching, replayed from a CUDA graph or of a type that no adapter claims; a hook switched
off after an error of ours.
Remedy: look at the events; attach before torch.compile; name further layer types to attach to.
False alarm when: the layers that are missing belong to another rank's pipeline stage whose folder was not opened.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Row
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.wording import listed

CODE = "coverage"
EXPLAINS: frozenset[str] = frozenset()


def judge(evidence: Evidence) -> Iterator[Finding]:
    """At most one finding, for what is missing from a run that has figures."""
    if not evidence.tensors:
        return
    missing = unseen_layers(evidence)
    events = [e for e in evidence.ask("events") if e["kind"] in ("gap", "error")]
    if missing or events:
        yield _finding(missing, events)


def unseen_layers(evidence: Evidence) -> list[str]:
    """Layers that run.json lists and no row of tensors mentions."""
    seen = {row["layer"] for row in evidence.tensors}
    return [name for name in evidence.layer_order if name not in seen]


def _finding(missing: list[str], events: list[Row]) -> Finding:
    parts = [f"no figures of {listed(missing)}"] if missing else []
    if events:
        parts.append(f"{len(events)} events tell of gaps, the first: {str(events[0]['detail']).rstrip('.')}")
    return Finding(
        code=CODE,
        title="Not everything was seen",
        severity="info",
        layer=missing[0] if len(missing) == 1 else None,
        tensor=None,
        gemm=None,
        first_step=None,
        last_step=None,
        summary=f"Not everything was seen: {'; '.join(parts)}.",
        basis="run.json lists the layers, events the gaps",
        remedy="Look at the events; attach before torch.compile; name further layer types to attach to.",
        action="record",
        harm=0.1,
        evidence=events[:20],
    )
