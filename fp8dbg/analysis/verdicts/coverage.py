"""Parts of the run that no figure speaks of.

Sign: layers in run.json without any row; layers whose rows end three sampled steps or more before the run does, after
rows on every sampled step; events of kind gap or error.
Cause: layers compiled before attaching, replayed from a CUDA graph, replaced afterwards or of a type that no adapter
claims; a hook switched off after an error of ours.
Remedy: look at the events; attach before torch.compile and to the model as it is trained; name further layer types.
False alarm when: the layers that are missing belong to another rank's pipeline stage whose folder was not opened, or
the training program does without them from some step on.
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
    missing, ended = unseen_layers(evidence), ended_layers(evidence)
    events = [e for e in evidence.ask("events") if e["kind"] in ("gap", "error")]
    if missing or ended or events:
        yield _finding(missing, ended, events)


def unseen_layers(evidence: Evidence) -> list[str]:
    """Layers that run.json lists and no row of tensors mentions."""
    seen = {row["layer"] for row in evidence.tensors}
    return [name for name in evidence.layer_order if name not in seen]


_STEPS = 3
"""Sampled steps without a row after which a layer's rows have ended."""


def ended_layers(evidence: Evidence) -> dict[str, int]:
    """Layers whose rows end before the run does, and the step of the last; only those that had some on every step."""
    last: dict[str, int] = {}
    skipping = set()
    for row in evidence.tensors:
        last[row["layer"]] = max(row["last_step"], last.get(row["layer"], 0))
        if (row["last_step"] - row["first_step"]) / evidence.interval + 1 > 1.2 * row["steps"]:
            skipping.add(row["layer"])
    latest = (evidence.end or 0) - _STEPS * evidence.interval
    return {name: step for name, step in last.items() if step <= latest and name not in skipping}


def _finding(missing: list[str], ended: dict[str, int], events: list[Row]) -> Finding:
    parts = [f"no figures of {listed(missing)}"] if missing else []
    if ended:
        first = min(ended.values())
        here = [name for name, step in ended.items() if step == first]
        parts.append(f"no figures of {listed(here)} after step {first}")
    if events:
        parts.append(f"{len(events)} events tell of gaps, the first: {str(events[0]['detail']).rstrip('.')}")
    concerned = [*missing, *ended]
    return Finding(
        code=CODE,
        title="Not everything was seen",
        severity="info",
        layer=concerned[0] if len(concerned) == 1 else None,
        tensor=None,
        gemm=None,
        first_step=None,
        last_step=None,
        summary=f"Not everything was seen: {'; '.join(parts)}.",
        basis="run.json lists the layers, events the gaps",
        remedy="Look at the events; attach before torch.compile and to the model as it is trained; name further types.",
        action="record",
        harm=0.1,
        evidence=events[:20],
    )
