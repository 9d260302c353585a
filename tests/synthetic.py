"""Run folders made from a few words: healthy figures by default, faults planted where a test asks for them.

Every figure follows from closed forms for Gaussian data, so a planted scale or amax moves the figures it would
move in a real run: an amax jump under delayed scaling clips, a scale stuck at 1 flushes small gradients. A test
that needs a particular figure plants that figure itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from fp8dbg.runs.files import part_name
from fp8dbg.runs.folder import RunWriter
from fp8dbg.runs.journal import Stamp
from fp8dbg.runs.parts import write_part
from fp8dbg.runs.schema import GEMMS, ROLES
from tests.synthetic_tables import LINEARS, Model, Plant, make_tables


def write_run(path: Path, *, close: bool = True, plant: Iterable[Plant] = (), **options: Any) -> Path:
    """Write a run folder through ``RunWriter`` and return its path.

    Args:
        path: the folder to make.
        close: False leaves the run open, as a killed run does.
        plant: what is wrong. Each entry selects rows (``layer`` and ``tensor`` or ``gemm`` as globs, ``rank``,
            ``from_step``, ``to_step`` inclusive) and gives figures: any column; a count as a ratio
            (``underflow_ratio: 0.97``); ``amax_times``, which the scale then follows as its recipe would;
            ``scale``, which the figures follow; ``loss``, ``loss_times``, ``grad_norm`` for the steps (``layer``
            absent); ``drop: true`` to leave the rows out; ``event`` with ``detail`` for an event.
        options: the fields of ``Model``.
    """
    model = Model(plant=tuple(plant), **options)
    tables = make_tables(model)
    for rank in range(model.ranks):
        writer = RunWriter(path, rank=rank, fingerprint=fingerprint(model))
        for name, table in tables.items():
            writer.append(name, table.filter(pc.equal(table["rank"], rank)).to_pylist())
        writer.flush()
        if close:
            writer.close()
    return path


_AT_ONCE = 1000
"""Rows of a batch: a recorder flushes about as many."""


def write_big_run(path: Path, rows: int = 1_000_000, **options: Any) -> Path:
    """A finished run of about ``rows`` rows of ``tensors``, written as finished parts directly, for benchmarks."""
    blocks = options.setdefault("blocks", 24)
    every = options.setdefault("every", 10)
    steps = every * math.ceil(rows / (blocks * len(LINEARS) * len(ROLES)))
    model = Model(steps=steps, plant=tuple(options.pop("plant", ())), **options)
    RunWriter(path, rank=0, fingerprint=fingerprint(model)).close()
    for name, table in make_tables(model).items():
        folder = path / name / "rank=00000"
        folder.mkdir(parents=True, exist_ok=True)
        if table.num_rows:
            write_part(folder / part_name(1), Stamp(name, 0, 1), table.to_batches(max_chunksize=_AT_ONCE))
    return path


def fingerprint(model: Model) -> dict[str, Any]:
    """What attach would put in run.json for this model."""
    layers = [
        {"layer": name, "module": name, "bf16_gemms": list(GEMMS) if model.in_bf16(name) else []}
        for name in model.layers
    ]
    return {"recipe": model.recipe, "layers": layers, **({"fp8_asked": model.asked} if model.asked else {})}


# Faults that several tests and rooms need, as plants.


def outlier(layer: str = "layers.2.up", tensor: str = "weight", step: int = 100) -> list[Plant]:
    """One function-preserving outlier channel: nearly the whole tensor flushed, while every error figure looks well."""
    gemm = "fprop"
    return [
        {"layer": layer, "tensor": tensor, "from_step": step, "amax_times": 1e6, "rms": 3e4, "underflow_ratio": 0.97}
        | {"cosine": 1.0, "rel_l2": 0.012, "mse": (0.012 * 3e4) ** 2, "kurtosis": 650.0, "peak_to_median": 7e6},
        {"layer": layer, "gemm": gemm, "from_step": step, "impact": 0.08, "sensitivity": 1e-3, "rel_l2": 0.03},
    ]


def swiglu_outlier(block: int = 2, step: int = 100) -> list[Plant]:
    """The demo's fault: rows of ``up`` times 1e6, columns of ``down`` divided by 1e6."""
    return outlier(f"layers.{block}.up", "weight", step) + outlier(f"layers.{block}.down", "input", step)


def amax_jump(step: int = 150, times: float = 30.0, layer: str = "*", until: int | None = None) -> list[Plant]:
    """One batch whose activations are ``times`` larger: delayed scaling clips until its history has seen them."""
    return [{"layer": layer, "tensor": "input", "from_step": step, "to_step": until or step, "amax_times": times}]


def loss_spike(step: int = 150, times: float = 2.5) -> list[Plant]:
    """A loss spike of one step, with nothing else moved."""
    return [{"table": "steps", "from_step": step, "to_step": step, "loss_times": times}]


def non_finite(layer: str = "layers.1.gate", tensor: str = "grad_weight", step: int = 120) -> list[Plant]:
    """NaN in one tensor at ``step``; from the next step on in every operand and in the loss."""
    return [
        {"layer": layer, "tensor": tensor, "from_step": step, "to_step": step, "nan_ratio": 1.0},
        {"layer": "*", "tensor": "*", "from_step": step + 1, "nan_ratio": 1.0},
        {"table": "steps", "from_step": step + 1, "loss": None},
    ]


def dead_layer(layer: str = "layers.2.down", step: int = 100) -> list[Plant]:
    """A weight that became all zero: its output is zero and no gradient reaches what is upstream of it."""
    dead: Plant = {"from_step": step, "zeros_ratio": 1.0}
    block = layer.rsplit(".", 1)[0]
    above = [(f"{block}.{name}", role) for name in ("up", "gate") for role in ("grad_output", "grad_weight")]
    rows = [(layer, "weight"), (layer, "output"), (layer, "grad_input"), *above]
    return [{"layer": name, "tensor": role, **dead} for name, role in rows]
