"""Parts of the run that no figure speaks of.

Sign: layers in run.json without any row; layers without a row on the last three sampled steps or more, after rows on
five at least and on nearly every one in between; events of kind gap or error.
Cause: layers compiled before attaching, replayed from a CUDA graph, replaced afterwards or of a type that no adapter
claims; a hook switched off after an error of ours.
Remedy: look at the events; attach before torch.compile and to the model as it is trained; name further layer types.
False alarm when: the layers that are missing belong to another rank's pipeline stage whose folder was not opened, or
the training program does without them from some step on. Layers that control.toml left out are not told.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from fp8dbg.analysis.evidence import Evidence, Row
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.wording import listed

CODE = "coverage"
EXPLAINS: frozenset[str] = frozenset()


def judge(evidence: Evidence) -> Iterator[Finding]:
    """At most one finding, for what is missing from a run that has figures."""
    if not evidence.tensors:
        return
    start = evidence.run["first_sampled"] or 0
    missing = [name for name in unseen_layers(evidence) if not _left_out(evidence, name, start)]
    ended = ended_layers(evidence)
    events = [e for e in evidence.ask("events") if e["kind"] in ("gap", "error")]
    if missing or ended or events:
        yield _finding(missing, ended, events)


def unseen_layers(evidence: Evidence) -> list[str]:
    """Layers that run.json lists and no row of tensors mentions."""
    seen = {row["layer"] for row in evidence.tensors}
    return [name for name in evidence.layer_order if name not in seen]


_STEPS, _FEWEST = 3, 5
"""Sampled steps without a row after which a layer's rows have ended, and with one before that. They are five sixths of
those from its first to its last at least: what a router calls now and then, as an expert, has not ended."""

_LAYERS = re.compile(r"\blayers = (\[.*?\]|'.*?'|\".*?\")(?=, \w+ = |\.$)")


def ended_layers(evidence: Evidence) -> dict[str, int]:
    """Layers whose rows end before the run does, and the step of the last; only those with some on nearly every step.

    Of the steps that the layer's own ranks sampled: a trigger has its rank alone measure. Not those that control.toml
    took out.
    """
    return {
        row["layer"]: row["last_step"]
        for row in evidence.ask("layer_steps")
        if row["steps_after"] >= _STEPS
        and row["steps"] >= _FEWEST
        and 6 * row["steps"] >= 5 * row["steps_between"]
        and not _left_out(evidence, row["layer"], row["next_step"])
    }


def _left_out(evidence: Evidence, layer: str, step: int) -> bool:
    """Whether, by the events, control.toml had the layer not measured on a step."""
    said = [
        str(event["detail"])
        for event in evidence.ask("events", kind="config")
        if str(event["detail"]).startswith("control.toml now says") and (event["step"] or 0) <= step
    ]
    found = _LAYERS.search(said[-1]) if said else None
    try:
        globs = ast.literal_eval(found[1]) if found else "*"
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    wanted = [globs] if isinstance(globs, str) else [str(glob) for glob in globs]
    return not any(layer == glob or fnmatchcase(layer, glob) for glob in wanted)


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
