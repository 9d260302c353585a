"""Runs for the tests of what people look at: hostile names, histograms, an empty run."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from fp8dbg.runs.folder import RunWriter
from tests.synthetic import fingerprint, loss_spike, swiglu_outlier
from tests.synthetic_tables import Model, make_tables

HOSTILE = (
    "</script><script>window.pwned=1</script>",
    '<img src=x onerror="window.pwned=2">',
    "a\"b'c`${window.pwned=3}",
    "a\nb\x1b[31mred\u202ee",
    "emoji \U0001f916 layer",
    '<a href="javascript:window.pwned=4">x</a>',
    "x'; DROP TABLE tensors; --",
    "%{x}<b>bold</b>&lt;i&gt;",
    "[bold red]markup[/]",
    "long." + "y" * 200_000,
)
"""Layer names that act where they are not escaped."""


def faulted(path: Path) -> Path:
    """The demo's fault, a loss spike, and a histogram for every tensor."""
    plant = (*swiglu_outlier(), *loss_spike(), {"event": "gap", "from_step": 60, "detail": "The disk was full."})
    return _write(path, Model(plant=tuple(plant)), {})


def hostile(path: Path) -> Path:
    """A run whose layers have the hostile names; each loses 90 % of its input from step 20 on."""
    model = Model(blocks=2, steps=40, every=4)
    plant = {"tensor": "input", "layer": "*", "from_step": 20, "underflow_ratio": 0.9, "rel_l2": 0.5}
    names = dict(zip(model.layers, HOSTILE, strict=True))
    event = {"event": "gap", "from_step": 8, "layer": HOSTILE[1], "detail": HOSTILE[1]}
    return _write(path, Model(blocks=2, steps=40, every=4, plant=(plant, event)), names)


def empty(path: Path) -> Path:
    """A run that never saw a step."""
    RunWriter(path, rank=0, fingerprint={"layers": []}).close()
    return path


def _write(path: Path, model: Model, names: dict[str, str]) -> Path:
    layers = [{"layer": names.get(entry["layer"], entry["layer"])} for entry in fingerprint(model)["layers"]]
    writer = RunWriter(path, rank=0, fingerprint=fingerprint(model) | {"layers": layers})
    for name, table in make_tables(model).items():
        for row in table.to_pylist():
            if "layer" in row:
                row["layer"] = names.get(row["layer"], row["layer"])
            if name == "events":
                writer.event(row["step"], row["kind"], row["layer"], row["detail"])
            else:
                writer.append(name, [row | _histogram(row)])
    writer.flush()
    writer.close()
    return path


def _histogram(row: dict[str, Any]) -> dict[str, Any]:
    """Counts per binade of Gaussian values of the row's rms, up to its amax."""
    if not row.get("rms") or "numel" not in row:
        return {}
    first, last = math.floor(math.log2(row["rms"])) - 20, math.floor(math.log2(row["amax"]))
    below = [math.erf(2.0**e / row["rms"] / math.sqrt(2)) for e in range(first, last + 2)]
    counts = [round(row["numel"] * (b - a)) for a, b in itertools.pairwise(below)]
    return {"histogram": {"exponent": first, "counts": counts, "codes": None}}
