"""Series of many tensors as one array per figure: what the page's heat maps and explorer read."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

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
    row = np.repeat(np.arange(table.num_rows), np.diff(_array(where.offsets)))
    column = _array(where.flatten())
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
    wide = np.full(len(values), np.nan)
    wide[_array(pc.is_valid(values).cast(pa.uint8())) == 1] = _array(pc.drop_null(values).cast(pa.float64()))
    near = np.where(wide == 0, 0.0, np.sign(wide) * np.clip(np.abs(wide), 1e-37, 3e38))
    return near.astype(np.float32)


def _array(values: pa.Array) -> npt.NDArray[Any]:
    """The same numbers, none missing. Not ``to_numpy``, which imports pandas: a quarter of a second."""
    return np.from_dlpack(values)


def add_floors(tensors: Cube) -> None:
    """Add ``floor`` to the keys of tensors: rel_l2 of healthy Gaussian data in the tensor's format."""
    tensors.keys["floor"] = [_noise(name) for name in tensors.keys["format"]]


def add_gemm_floors(gemms: Cube, tensors: Cube) -> None:
    """Add ``floor`` to the keys of GEMMs: rel_l2 of healthy operands in the formats that the tensors' cube says."""
    roles = zip(tensors.keys["layer"], tensors.keys["tensor"], strict=True)
    floors = dict(zip(roles, tensors.keys["floor"], strict=True))
    pairs = zip(gemms.keys["layer"], gemms.keys["gemm"], strict=True)
    gemms.keys["floor"] = [_together([floors.get((layer, r)) for r in GEMMS.get(gemm, ())]) for layer, gemm in pairs]


def _noise(name: str | None) -> float | None:
    noise = FORMATS[name].noise if name in FORMATS else None
    return noise.rel_l2 if noise else None


def _together(floors: list[float | None]) -> float | None:
    """Errors of two operands add as squares."""
    known = [f for f in floors if f is not None]
    return round(float(np.sqrt(sum(f * f for f in known))), 6) if known else None


def packed(values: Floats) -> str:
    """Values as text that the page unpacks: the upper three bytes of each float32, rounded (5 digits), in base64."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).ravel()
    rounded = np.where(np.isnan(values).ravel(), np.uint32(0x7FC00000), bits + np.uint32(0x80))
    octets = rounded.astype("<u4").view(np.uint8).reshape(-1, 4)[:, 1:]
    return base64.b64encode(octets.tobytes()).decode("ascii")


def plain(cube: Cube, layer_numbers: dict[str, int]) -> dict[str, Any]:
    """The cube as JSON: layers by number, each column as ``_plain_column`` has it."""
    keys = {name: values for name, values in cube.keys.items() if name != "layer"}
    columns = {name: _plain_column(values) for name, values in cube.columns.items()}
    return {"layer": [layer_numbers[layer] for layer in cube.keys["layer"]], "keys": keys, "columns": columns}


def _plain_column(values: Floats) -> dict[str, Any]:
    """Packed values of the rows that have any; ``rows`` says which, where it is not all of them.

    Where all these values are equal, ``same`` holds that one instead.
    """
    some = np.flatnonzero(~np.isnan(values).all(axis=1))
    rows = None if len(some) == len(values) else some.tolist()
    kept = values[some]
    if (kept == kept.flat[0]).all():
        return {"rows": rows, "same": float(kept.flat[0])}
    return {"rows": rows, "packed": packed(kept)}
