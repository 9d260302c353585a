"""The tables of a synthetic run: closed forms for Gaussian data, and the plants written into them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pyarrow as pa

from fp8dbg.runs.schema import GEMMS, OPERANDS, TABLES, arrow_schema

Plant = Mapping[str, Any]
Columns = dict[str, np.ndarray[Any, Any]]
Array = np.ndarray[Any, Any]

LINEARS = {"attn.qkv": (256, 768), "attn.proj": (256, 256), "gate": (256, 688), "up": (256, 688), "down": (688, 256)}
"""Linear layers of one decoder block: features in, features out."""
TOKENS = 512
MAXIMUM = {"e4m3": 448.0, "e5m2": 57344.0}
SMALLEST = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}
NORMAL = {"e4m3": 2.0**-6, "e5m2": 2.0**-14}
FLOOR = {"e4m3": 0.0265, "e5m2": 0.0526}
GRANULARITY = {"block": "1x128", "mxfp8": "1x32", "rowwise": "row", "rowwise_with_gw_hp": "row"}
PEAK = 4.6  # amax over the standard deviation of a Gaussian tensor of about 150,000 elements
SPREAD = {"input": 1.0, "weight": 0.02, "grad_output": 1e-4, "output": 1.0, "grad_input": 1e-4, "grad_weight": 1e-3}
_SELECTORS = ("step", "rank", "layer", "tensor", "gemm")
_RATIOS = {"underflow_ratio": "underflow", "saturated_ratio": "saturated", "at_max_ratio": "at_max"}
_SHARES = {"nan_ratio": "nan", "inf_ratio": "inf", "zeros_ratio": "zeros"}


@dataclass(frozen=True)
class Model:
    """What to write: a decoder of ``blocks`` blocks trained for ``steps`` steps, sampled every ``every``.

    Args:
        recipe: a recipe name; "delayed" replays its amax history of ``history`` steps, the finer ones have no
            per-tensor scale.
        what_if: the layers are BF16 and the recipe is only compared with.
        kept: globs of layers that a fallback plan keeps in BF16 while the others are in FP8.
        histograms: whether each row gets one.
        gradients: format of grad_output.
        asked: where FP8 was asked for, as run.json says it.
        plant: see ``write_run``.
    """

    blocks: int = 4
    steps: int = 200
    every: int = 10
    ranks: int = 1
    recipe: str = "delayed"
    history: int = 16
    gradients: str = "e5m2"
    what_if: bool = False
    kept: tuple[str, ...] = ()
    histograms: bool = False
    seed: int = 0
    asked: str | None = None
    plant: tuple[Plant, ...] = ()
    layers: list[str] = field(init=False)

    def __post_init__(self) -> None:
        names = [f"layers.{b}.{name}" for b in range(self.blocks) for name in LINEARS]
        object.__setattr__(self, "layers", names)

    @property
    def sampled(self) -> Array:
        """Steps on which everything is recorded."""
        return np.arange(0, self.steps, self.every)

    def in_bf16(self, layer: str) -> bool:
        """Whether the recipe is only compared with in this layer."""
        return self.what_if or any(fnmatchcase(layer, glob) for glob in self.kept)

    def format(self, tensor: str) -> str:
        """Number format of an operand."""
        return self.gradients if tensor == "grad_output" else "e4m3"


def make_tables(model: Model) -> dict[str, pa.Table]:
    """Every table of the run, in the schema of the run folder."""
    every_step = _amax(model)
    tensors = _tensors(model, every_step)
    columns = {
        "steps": _steps(model),
        "amax": {k: every_step[k] for k in TABLES["amax"].names},
        "tensors": tensors,
        "gemms": _gemms(model, tensors),
        "events": _events(model),
    }
    return {name: _table(name, data) for name, data in columns.items()}


def _table(name: str, columns: Columns) -> pa.Table:
    schema = arrow_schema(name)
    arrays = []
    size = len(next(iter(columns.values())))
    keep = ~columns.get("drop", np.zeros(size, bool))
    for column in schema:
        if column.name not in columns:
            arrays.append(pa.nulls(int(keep.sum()), column.type))
            continue
        values = columns[column.name][keep]
        if values.dtype.kind == "f" and pa.types.is_integer(column.type):
            values = np.round(values)
        arrays.append(pa.array(values, from_pandas=True).cast(column.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _grid(*axes: Sequence[Any] | Array) -> list[Array]:
    return [a.ravel() for a in np.meshgrid(*[np.asarray(a) for a in axes], indexing="ij")]


def _amax(model: Model) -> Columns:
    """The ``amax`` table, plus the columns that the other tables are made from."""
    shape = (model.steps, model.ranks, len(model.layers), len(OPERANDS))
    step, rank, layer, tensor = _grid(range(model.steps), range(model.ranks), range(len(model.layers)), OPERANDS)
    random = np.random.default_rng(model.seed)
    own = np.exp(random.normal(0, 0.4, shape[2:]))
    noise = np.exp(random.normal(0, 0.03, shape))
    amax = (PEAK * np.array([SPREAD[t] for t in OPERANDS]) * own * noise).ravel()
    rows: Columns = {"step": step, "rank": rank, "tensor": tensor, "layer": np.array(model.layers, object)[layer]}
    rows |= {"microbatch": np.zeros_like(step), "amax": amax, "nan": 0 * amax, "inf": 0 * amax}
    numel = np.array([_numel(name, t) for name in model.layers for t in OPERANDS], float)
    rows["numel"] = np.tile(numel, model.steps * model.ranks)
    _plant(model, rows, ("amax_times", "amax", "nan_ratio", "inf_ratio", "drop", "zeros_ratio"))
    maximum = np.array([MAXIMUM[model.format(t)] for t in OPERANDS])
    rows["scale"] = _scales(model, rows["amax"].reshape(shape), rows["inf"].reshape(shape) > 0, maximum).ravel()
    _plant(model, rows, ("scale",))
    rows["initial"] = (step == 0) & (model.recipe == "delayed")
    return rows


def _scales(model: Model, amax: Array, inf: Array, maximum: Array) -> Array:
    """Scale in force at each step; NaN (written as NULL) where the recipe has none per tensor."""
    if model.recipe in GRANULARITY:
        return np.full_like(amax, np.nan)
    if model.recipe != "delayed":
        return maximum / amax
    scale = np.ones_like(amax)
    seen = np.where(inf, np.inf, amax).max(axis=1, keepdims=True)  # as the library does, reduced over the ranks
    for step in range(1, len(amax)):
        window = seen[max(0, step - model.history) : step].max(axis=0)
        with np.errstate(all="ignore"):
            scale[step] = np.where(np.isfinite(window) & (window > 0), maximum / window, scale[step - 1])
    return np.asarray(scale)


def _numel(layer: str, tensor: str) -> int:
    rows, columns = LINEARS[layer.split(".", 2)[2]]
    sizes = {"weight": rows * columns, "grad_weight": rows * columns}
    return sizes.get(tensor, TOKENS * (rows if tensor in ("input", "grad_input") else columns))


def _tensors(model: Model, every_step: Columns) -> Columns:
    """The ``tensors`` table: operands from the amax rows of the sampled steps, results beside them."""
    at = np.flatnonzero(every_step["step"] % model.every == 0)
    operands = {k: v[at] for k, v in every_step.items()}
    size = len(at)
    results = {k: v.copy() for k, v in operands.items()}
    other = dict(zip(OPERANDS, ("output", "grad_weight", "grad_input"), strict=True))
    results["tensor"] = np.array([other[t] for t in operands["tensor"]], object)
    results["numel"] = np.array([_numel(n, t) for n, t in zip(results["layer"], results["tensor"], strict=True)], float)
    results["amax"] = np.array([PEAK * SPREAD[t] for t in results["tensor"]])
    for name in ("nan", "inf"):
        results[name] = np.zeros(size)
    rows = {k: np.concatenate([v, results[k]]) for k, v in operands.items()}
    rows["scale"][size:] = np.nan
    is_operand = np.arange(2 * size) < size
    rows |= _figures(model, rows, is_operand)
    figures = {n for n in TABLES["tensors"].names if n not in (*_SELECTORS, "scale", "nan", "inf")}
    _plant(model, rows, (*figures, *_RATIOS, *_SHARES, "drop"))
    _empty_where_dead(rows)
    if model.histograms:
        rows["histogram"] = _histograms(rows)
    return rows


def _histograms(rows: Columns) -> Array:
    """Counts per binade of a Gaussian bulk that fits the median, and the amax element."""
    out = np.full(len(rows["step"]), None, object)
    bulk = rows["amax"] / rows["peak_to_median"] / 0.6745
    for i in np.flatnonzero(rows["amax"] > 0):
        top = math.floor(math.log2(rows["amax"][i]))
        first = min(math.floor(math.log2(bulk[i])) - 20, top)
        inside = _erf(2.0 ** np.arange(first, top + 2) / bulk[i]) * (rows["numel"][i] - 1)
        counts = np.round(np.diff(inside, prepend=0)[1:]).astype(int)
        counts[-1] += 1
        out[i] = {"exponent": first, "counts": counts.tolist()}
    return out


def _figures(model: Model, rows: Columns, is_operand: Array) -> Columns:
    """Figures of Gaussian data of this amax under this scale."""
    size, numel = len(is_operand), rows["numel"]
    fmt = np.array([model.format(t) for t in rows["tensor"]], object)
    fine = model.recipe in GRANULARITY
    delta, under, clipped, error = _gaussian(rows, fmt, is_operand & (not fine))
    random = np.random.default_rng(model.seed + 1)
    error = error * np.exp(random.normal(0, 0.01, size))
    rms = rows["amax"] / PEAK
    null = np.full(size, np.nan)
    nothing = np.full(size, None, object)

    def operand(values: Array | float) -> Array:
        return np.where(is_operand, values, null)

    def text(value: str | Array) -> Array:
        return np.where(is_operand, value, nothing)

    with np.errstate(divide="ignore"):
        wanted = np.array([MAXIMUM[f] for f in fmt]) / rows["amax"]
    in_bf16 = np.array([model.in_bf16(name) for name in rows["layer"]], bool)
    source = np.where(rows["initial"], "initial", np.where(in_bf16, "emulated", "live")).astype(object)
    return {
        "call": np.zeros(size),
        "host": np.full(size, "pytorch" if model.what_if else "simulated", object),
        "recipe": text(model.recipe),
        "what_if": np.where(is_operand & in_bf16, model.recipe, nothing),
        "format": text(fmt),
        "granularity": text(GRANULARITY.get(model.recipe, "tensor")),
        "dtype": np.full(size, "bfloat16", object),
        "shape": np.full(size, "512x256", object),
        "zeros": np.zeros(size),
        "underflow": operand(under * numel),
        "saturated": operand(clipped * numel),
        "at_max": operand(np.maximum(clipped * numel, 1)),
        "subnormal": operand(0.001 * numel),
        "amin": rms * 1e-6,
        "mean": rms * random.normal(0, 0.002, size),
        "rms": rms,
        "kurtosis": 3.0 + random.normal(0, 0.05, size),
        "peak_to_median": PEAK / 0.6745 * np.exp(random.normal(0, 0.02, size)),
        "scale_current": null if fine else operand(wanted),
        "scale_delta": operand(delta),
        "scale_min": operand(wanted) if fine else null,
        "scale_max": operand(wanted * 8) if fine else null,
        "scale_source": nothing if fine else text(source),
        "mse": operand((error * rms) ** 2),
        "rel_l2": operand(error),
        "sqnr_db": operand(-20 * np.log10(error)),
        "cosine": operand(1 - np.minimum(error, 1) ** 2 / 2),
        "norm_ratio": operand(np.sqrt(np.maximum(1 - clipped, 0.01))),
        "bias": operand(random.normal(0, 1e-5, size)),
    }


def _gaussian(rows: Columns, fmt: Array, scaled: Array) -> tuple[Array, Array, Array, Array]:
    """scale_delta, underflow ratio, saturated ratio and rel_l2 of Gaussian data under the scale in force."""
    maximum, smallest, normal, floor = (
        np.array([table[f] for f in fmt]) for table in (MAXIMUM, SMALLEST, NORMAL, FLOOR)
    )
    amax = np.where(rows["amax"] > 0, rows["amax"], np.nan)
    scale = np.where(scaled & ~np.isnan(rows["scale"]), rows["scale"], maximum / amax)
    sigma = amax / PEAK * scale
    flushed = _erf(smallest / 2 / sigma)
    step_error = np.where(flushed > 0.9, 1.0, smallest**2 / 12 / sigma**2 * _erf(normal / sigma))
    limit = maximum / sigma
    clipped = np.where(limit < PEAK * 0.99, 1 - _erf(limit), 0.0)
    density = np.exp(-(limit**2) / 2) / math.sqrt(2 * math.pi)
    lost = np.maximum((1 + limit**2) * clipped - 2 * limit * density, 0.0)
    error = np.sqrt(np.minimum(floor**2 + lost + step_error, 1.0))
    return np.where(scaled, np.log2(scale * amax / maximum), np.nan), flushed, clipped, error


_BOUNDS = np.linspace(0, 8, 20_001)
_ERF = np.array([math.erf(b / math.sqrt(2)) for b in _BOUNDS])


def _erf(bound: Array) -> Array:
    """Share of a standard Gaussian within plus or minus ``bound``."""
    return np.asarray(np.interp(bound, _BOUNDS, _ERF))


def _empty_where_dead(rows: Columns) -> None:
    """An all-zero or all-NaN tensor has no figures."""
    gone = rows["zeros"] + rows["nan"] >= rows["numel"]
    for name in ("amax", "amin", "rms", "kurtosis", "peak_to_median", "scale_current", "scale_delta", "mse"):
        rows[name] = np.where(gone, np.nan, rows[name])
    for name in ("rel_l2", "sqnr_db", "cosine", "norm_ratio", "bias"):
        rows[name] = np.where(gone, np.nan, rows[name])
    for name in ("underflow", "saturated", "at_max", "subnormal"):
        rows[name] = np.where(gone & ~np.isnan(rows[name]), 0.0, rows[name])


def _gemms(model: Model, tensors: Columns) -> Columns:
    """The ``gemms`` table: errors that follow from the operands' errors."""
    shape = (len(model.sampled), model.ranks, len(model.layers), 3)
    error = tensors["rel_l2"][: math.prod(shape)].reshape(shape)
    step, rank, layer, gemm = _grid(model.sampled, range(model.ranks), range(len(model.layers)), list(GEMMS))
    first, second = (
        np.stack([error[..., OPERANDS.index(pair[i])] for pair in GEMMS.values()], axis=-1).ravel() for i in (0, 1)
    )
    both = np.sqrt(first**2 + second**2)
    random = np.random.default_rng(model.seed + 2)
    names = np.array(model.layers, object)[layer]
    widths = np.array([LINEARS[name.split(".", 2)[2]] for name in names], float).reshape(-1, 2)
    fprop = gemm == "fprop"
    size = len(step)
    rows: Columns = {
        "step": step,
        "rank": rank,
        "microbatch": np.zeros(size),
        "call": np.zeros(size),
        "layer": names,
        "gemm": gemm.astype(object),
        "host": np.full(size, "pytorch" if model.what_if else "simulated", object),
        "recipe": np.full(size, model.recipe, object),
        "m": np.full(size, float(TOKENS)),
        "n": widths[:, 1],
        "k": widths[:, 0],
        "rows_measured": np.full(size, 64.0),
        "mse": both**2,
        "rel_l2": both,
        "sqnr_db": -20 * np.log10(both),
        "cosine": 1 - np.minimum(both, 1) ** 2 / 2,
        "norm_ratio": 1 + random.normal(0, 0.0005, size),
        "error_from_a": first,
        "error_from_b": second,
        "error_unexplained": 0.0024 * np.exp(random.normal(0, 0.05, size)),
        "impact": np.where(fprop, random.normal(0, 1e-4, size), np.nan),
        "sensitivity": np.where(fprop, 2e-7 * np.exp(random.normal(0, 0.5, size)), np.nan),
        "grad_alignment": np.where(fprop, np.nan, 1 + random.normal(0, 0.002, size)),
    }
    _plant(model, rows, (*(n for n in TABLES["gemms"].names if n not in _SELECTORS), "drop"))
    return rows


def _steps(model: Model) -> Columns:
    """The ``steps`` table: a loss that falls, with noise."""
    step, rank = _grid(range(model.steps), range(model.ranks))
    noise = np.random.default_rng(model.seed + 3).normal(0, 0.02, len(step))
    rows: Columns = {
        "step": step,
        "rank": rank,
        "loss": 1.7 + 2.0 * np.exp(-step / 60) + noise,
        "grad_norm": 0.5 + np.abs(noise),
        "learning_rate": np.full(len(step), 1e-3),
        "seconds": np.full(len(step), 0.1),
        "overhead_seconds": np.full(len(step), 0.001),
        "sampled": step % model.every == 0,
    }
    rows["reason"] = np.where(rows["sampled"], np.array("every", object), np.array(None, object))
    _plant(model, rows, ("loss", "loss_times", "grad_norm", "learning_rate", "drop"))
    return rows


def _events(model: Model) -> Columns:
    planted = [p for p in model.plant if "event" in p]
    return {
        "step": np.array([p.get("from_step", 0) for p in planted], float),
        "rank": np.array([p.get("rank", 0) for p in planted], float),
        "kind": np.array([p["event"] for p in planted], object),
        "layer": np.array([p.get("layer") for p in planted], object),
        "detail": np.array([p.get("detail", "") for p in planted], object),
    }


def _plant(model: Model, rows: Columns, figures: Iterable[str]) -> None:
    """Write each plant's figures into the rows it selects."""
    for plant in model.plant:
        wanted = [f for f in figures if f in plant]
        if not wanted or not _same_table(plant, rows) or "event" in plant:
            continue
        chosen = _selected(plant, rows)
        for figure in wanted:
            _set(rows, figure, chosen, plant[figure])


def _same_table(plant: Plant, rows: Columns) -> bool:
    kind = "gemm" if "gemm" in rows else "tensor" if "tensor" in rows else "steps"
    return kind == next((k for k in ("gemm", "tensor") if k in plant), "steps")


def _selected(plant: Plant, rows: Columns) -> Array:
    chosen = (rows["step"] >= plant.get("from_step", 0)) & (rows["step"] <= plant.get("to_step", math.inf))
    if "rank" in plant:
        chosen &= rows["rank"] == plant["rank"]
    for name in ("layer", "tensor", "gemm"):
        if name in plant:
            values = {v: fnmatchcase(v, plant[name]) for v in set(rows[name])}
            chosen &= np.array([values[v] for v in rows[name]], bool)
    return np.asarray(chosen)


def _set(rows: Columns, figure: str, chosen: Array, value: Any) -> None:
    value = np.nan if value is None and figure not in ("host", "recipe", "what_if", "format") else value
    if figure.endswith("_times"):
        rows[figure.removesuffix("_times")][chosen] *= value
    elif figure in _RATIOS:
        rows[_RATIOS[figure]][chosen] = value * (rows["numel"] - rows["zeros"])[chosen]
    elif figure in _SHARES:
        rows.setdefault(_SHARES[figure], np.zeros(len(chosen)))[chosen] = value * rows["numel"][chosen]
    else:
        blank = np.zeros(len(chosen), bool) if figure == "drop" else np.full(len(chosen), np.nan)
        rows.setdefault(figure, blank)[chosen] = value
