"""Series of many tensors as one array per figure: what the page's heat maps and explorer read."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fp8dbg.numerics.formats import FORMATS
from fp8dbg.runs.schema import GEMMS

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Cube:
    """Figures of many tensors (or GEMMs) over the same buckets of sampled steps.

    Attributes:
        keys: facts of each tensor, one value per tensor: layer, tensor or gemm, format, ...
        columns: each figure as float32 [tensors, buckets]; NaN where there is none. A figure
            that no tensor has is absent.
    """

    keys: dict[str, list[Any]]
    columns: dict[str, Floats]

    def __len__(self) -> int:
        return len(self.keys["layer"])

    def row(self, **facts: Any) -> int | None:
        """Place of the first tensor with these facts; None if there is none."""
        wanted = range(len(self))
        return next((i for i in wanted if all(self.keys[k][i] == v for k, v in facts.items())), None)


def make_cube(table: pa.Table, buckets: int) -> Cube:
    """A cube from a page question's answer: a row per tensor, lists with a value per bucket named in its ``bucket``."""
    lists = [name for name in table.column_names if pa.types.is_list(table.schema.field(name).type)]
    where = table["bucket"].combine_chunks()
    row = np.repeat(np.arange(table.num_rows), np.diff(where.offsets.to_numpy()))
    column = where.flatten().to_numpy()
    columns: dict[str, Floats] = {}
    for name in lists:
        if name != "bucket":
            values = np.full((table.num_rows, buckets), np.nan, np.float32)
            values[row, column] = _float32(table[name].combine_chunks().flatten())
            if not np.isnan(values).all():
                columns[name] = values
    return Cube({n: table[n].to_pylist() for n in table.column_names if n not in lists}, columns)


def _float32(values: pa.Array) -> Floats:
    """Within float32's range: an amax of 1e39 is drawn at 3e38, a scale of 1e-46 at 1e-37."""
    wide = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    near = np.where(wide == 0, 0.0, np.sign(wide) * np.clip(np.abs(wide), 1e-37, 3e38))
    return near.astype(np.float32)


def with_floors(tensors: Cube, gemms: Cube) -> None:
    """Add what figures are judged by: ``excess_db`` to both, each key's own ``floor_db`` or ``floor``.

    Healthy Gaussian data in the same formats have an excess of 0 dB. A GEMM's floor takes its operands' formats from
    the tensors of the same layer.
    """
    floors = [_noise(name) for name in tensors.keys["format"]]
    tensors.keys["floor_db"] = [None if f is None else round(-20 * float(np.log10(f)), 2) for f in floors]
    if "rel_l2" in tensors.columns:
        tensors.columns["excess_db"] = _excess(tensors.columns["rel_l2"], floors)
    formats = dict(zip(zip(tensors.keys["layer"], tensors.keys["tensor"], strict=True), floors, strict=True))
    pairs = zip(gemms.keys["layer"], gemms.keys["gemm"], strict=True)
    both = [_together([formats.get((layer, role)) for role in GEMMS.get(gemm, ())]) for layer, gemm in pairs]
    gemms.keys["floor"] = [None if f is None else round(f, 5) for f in both]
    if "rel_l2" in gemms.columns:
        gemms.columns["excess_db"] = _excess(gemms.columns["rel_l2"], both)


def _noise(name: str | None) -> float | None:
    noise = FORMATS[name].noise if name in FORMATS else None
    return noise.rel_l2 if noise else None


def _together(floors: list[float | None]) -> float | None:
    """Errors of two operands add as squares."""
    known = [f for f in floors if f is not None]
    return float(np.sqrt(sum(f * f for f in known))) if known else None


def _excess(rel_l2: Floats, floors: Sequence[float | None]) -> Floats:
    limit = np.array([np.nan if f is None else f for f in floors], np.float32)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = 20 * np.log10(rel_l2 / limit)
    return np.where(np.isneginf(excess), np.nan, excess).astype(np.float32)


def packed(values: Floats) -> str:
    """Values as text that the page unpacks: the upper three bytes of each float32, rounded (5 digits), in base64."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).ravel()
    rounded = np.where(np.isnan(values).ravel(), np.uint32(0x7FC00000), bits + np.uint32(0x80))
    octets = rounded.astype("<u4").view(np.uint8).reshape(-1, 4)[:, 1:]
    return base64.b64encode(octets.tobytes()).decode("ascii")


def plain(cube: Cube, layer_numbers: dict[str, int]) -> dict[str, Any]:
    """The cube as JSON: layers by number, a column as packed text, or as one number where all its values are equal."""
    keys = {name: values for name, values in cube.keys.items() if name != "layer"}
    columns: dict[str, Any] = {}
    for name, values in cube.columns.items():
        same = values.size and (values == values.flat[0]).all()
        columns[name] = float(values.flat[0]) if same else packed(values)
    return {"layer": [layer_numbers[layer] for layer in cube.keys["layer"]], "keys": keys, "columns": columns}
