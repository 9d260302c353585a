"""Rows for run-folder tests: one step of a small model, with figures as incompressible as real ones; and all rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from fp8dbg.runs.folder import open_folder
from fp8dbg.runs.schema import ROLES, TABLES, arrow_schema

LAYERS = tuple(f"model.layers.{i}.mlp.up_proj" for i in range(4))


def step_row(step: int, rank: int = 0, **more: Any) -> dict[str, Any]:
    """A row of ``steps``."""
    return {"step": step, "rank": rank, "loss": 2.0 + step, "sampled": True, **more}


def tensor_rows(step: int, rank: int = 0, layers: tuple[str, ...] = LAYERS) -> Iterator[dict[str, Any]]:
    """Rows of ``tensors``: every layer, every role, every column set except the histogram."""
    draw = random.Random(f"{step} {rank}")
    for layer in layers:
        for role in ROLES:
            yield {
                field.name: _value(field, draw) for field in arrow_schema("tensors") if field.name != "histogram"
            } | {
                "step": step,
                "microbatch": 0,
                "call": 0,
                "rank": rank,
                "layer": layer,
                "tensor": role,
                "what_if": None,
            }


def _value(field: pa.Field, draw: random.Random) -> Any:
    if field.type == pa.float64():
        return draw.random()
    return field.name if field.type == pa.string() else draw.randrange(1 << 24)


def rows_of(step: int, rank: int = 0, layers: tuple[str, ...] = LAYERS) -> dict[str, list[dict[str, Any]]]:
    """All tables of one sampled step."""
    amax = [
        {"step": step, "microbatch": 0, "rank": rank, "layer": layer, "tensor": "input", "amax": 1.0 + step}
        for layer in layers
    ]
    return {"steps": [step_row(step, rank)], "amax": amax, "tensors": list(tensor_rows(step, rank, layers))}


def answers(path: Path) -> dict[str, Any]:
    """Every row of every table, in an order of its own, and the problems."""
    with open_folder(path) as run:
        tables = {name: sorted(map(repr, run.rows(f"SELECT * FROM {name}"))) for name in TABLES}
        return {**tables, "problems": run.problems}
