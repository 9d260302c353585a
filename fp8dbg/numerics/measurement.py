"""One tensor under one recipe: the figures of a row of the ``tensors`` table."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from fp8dbg.errors import UsageError
from fp8dbg.numerics.blocks import block_figures
from fp8dbg.numerics.census import Census, passing_census
from fp8dbg.numerics.figures import CastSums, QuantFigures
from fp8dbg.numerics.formats import Format, format_named
from fp8dbg.numerics.recipes import Recipe, recipe_named

_CENSUS_COLUMNS = ("numel", "zeros", "nan", "inf", "amax", "amin", "mean", "rms", "kurtosis", "peak_to_median")
_CAST_COLUMNS = tuple(f.name for f in fields(QuantFigures))


@dataclass(frozen=True, slots=True)
class Measurement:
    """Figures of one tensor, named as the columns of ``tensors``; None where a figure does not exist.

    Never NaN or Inf: the counts say why a figure is missing. ``scale_source`` is "live" where the scale was given,
    "emulated" where the recipe chose it. ``histogram`` has the fields exponent and counts.
    """

    recipe: str | None = None
    format: str | None = None
    granularity: str | None = None
    dtype: str | None = None
    shape: str | None = None
    numel: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    underflow: int | None = None
    saturated: int | None = None
    at_max: int | None = None
    subnormal: int | None = None
    amax: float | None = None
    amin: float | None = None
    mean: float | None = None
    rms: float | None = None
    kurtosis: float | None = None
    peak_to_median: float | None = None
    scale: float | None = None
    scale_current: float | None = None
    scale_delta: float | None = None
    scale_min: float | None = None
    scale_max: float | None = None
    scale_source: str | None = None
    mse: float | None = None
    rel_l2: float | None = None
    sqnr_db: float | None = None
    cosine: float | None = None
    norm_ratio: float | None = None
    bias: float | None = None
    histogram: dict[str, Any] | None = None

    def row(self) -> dict[str, Any]:
        """The columns and their values, for ``RunWriter.append("tensors", ...)``; the caller adds step and layer."""
        return {name: getattr(self, name) for name in _COLUMNS}  # asdict would copy the histogram, deeply


_COLUMNS = tuple(f.name for f in fields(Measurement))


def measure(
    tensor: torch.Tensor,
    format: str | None = None,
    recipe: str | Recipe = "current",
    scale: float | None = None,
    role: str | None = None,
    axis: int = -1,
) -> Measurement:
    """Measure one tensor as a cast under a recipe would treat it.

    Args:
        tensor: floating point, any shape, strides and device. bfloat16 and float16 are exact and cheapest.
        format: name of the format; None: the recipe's own for the role (E4M3 for most).
        recipe: a Recipe or its label ("current", "delayed:margin=1", "mxfp8", ...); gives scale and granularity.
        scale: the scale in force, instead of the recipe's; for recipes with one scale per tensor, and NVFP4's over its
            blocks' scales.
        role: input, weight or grad_output, where the recipe treats them apart; None is input, or weight and
            grad_output alike where they do not differ.
        axis: the contraction, along which rows and blocks lie.

    Raises:
        UsageError: a tensor that is not floating point, an unknown name, a scale where there is one per block, or a
            format other than the recipe's own where scales are finer than a tensor.
    """
    if type(axis) is not int or axis not in (0, -1):
        raise UsageError(f"axis={axis!r:.100} does not fit.", "Give -1, along rows, or 0, down columns.")
    return measure_recipes(tensor, [(recipe, format, _number(scale))], role, axis)[0]


def _number(scale: object) -> float | None:
    """A scale as a number; any number is one, 0 and NaN too: what a broken scale does can be measured."""
    try:
        return None if scale is None else float(scale)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UsageError(f"scale={scale!r:.100} is not one number.", "Give one scale for the whole tensor.") from None


def measure_recipes(
    tensor: torch.Tensor,
    casts: list[tuple[str | Recipe, str | None, float | None]],
    role: str | None = None,
    axis: int = -1,
) -> list[Measurement]:
    """``measure`` for several (recipe, format, scale): where scales are per tensor, for little more than one."""
    found = passing_census(tensor)
    common = _statistics(found, tensor.shape)
    return [_measured(tensor, found, common, recipe_named(r), f, s, role or "input", axis) for r, f, s in casts]


_ERRORS = ("mse", "rel_l2", "sqnr_db", "cosine", "norm_ratio", "bias")
_CHUNK = 1 << 20


def read_back(made: Measurement, x: torch.Tensor, y: torch.Tensor) -> Measurement:
    """A measurement with the errors of values that were really read, in place of those of an emulated cast.

    Counts and scales stay: they say what casting x would do.

    Args:
        made: the measurement of x.
        x: the tensor in high precision.
        y: what was read instead, of the same shape. Non-finite pairs are left out.
    """
    sums = torch.zeros(6, dtype=torch.float64, device=x.device)
    for a, b in zip(*(torch.split(t.detach().reshape(-1), _CHUNK) for t in (x, y)), strict=True):
        a, b = a.double(), b.to(a.device).double()
        usable = a.isfinite() & b.isfinite()
        a, b = a[usable], b[usable]
        d = b - a
        sums += torch.stack([d @ d, d.sum(), b @ b, a @ b, a @ a, usable.sum().double()])
    *errors, x2, finite = sums.tolist()
    figures = QuantFigures.from_sums(CastSums(0, 0, 0, 0, *errors), x2, int(finite))
    return replace(made, **{name: getattr(figures, name) for name in _ERRORS})


def measure_results(tensor: torch.Tensor) -> Measurement:
    """Statistics of a tensor that no recipe quantises (output, grad_input, grad_weight): no format, scale or error."""
    return Measurement(**_statistics(passing_census(tensor), tensor.shape))


def _statistics(found: Census, shape: torch.Size) -> dict[str, Any]:
    """Columns that no recipe has a part in."""
    exponent, counts = found.histogram()
    return {
        "dtype": found.dtype,
        "shape": "x".join(map(str, shape)) or "scalar",
        "histogram": {"exponent": exponent, "counts": counts, "codes": None} if counts else None,
        **{name: getattr(found, name) for name in _CENSUS_COLUMNS},
    }


def _measured(
    tensor: torch.Tensor,
    found: Census,
    common: dict[str, Any],
    recipe: Recipe,
    format: str | None,
    scale: float | None,
    role: str,
    axis: int,
) -> Measurement:
    fmt = format_named(format) if format else recipe.format(role)
    granularity = recipe.granularity(role)
    names: dict[str, Any] = {"recipe": recipe.label, "format": fmt.name, "granularity": granularity}
    if granularity == "tensor":
        return Measurement(**common, **names, **_per_tensor(found, recipe, fmt, scale, role))
    if scale is not None and recipe.name != "nvfp4":
        raise UsageError(f"Recipe {recipe} has one scale per {granularity}, not one in all.", "Leave scale out.")
    if fmt != recipe.format(role):
        own = recipe.format(role).name
        raise UsageError(f"Recipe {recipe} casts {role} to {own}, not {fmt.name}.", "Leave format out.")
    return Measurement(**common, **names, **_per_block(tensor, recipe, scale, role, axis))


def _per_tensor(found: Census, recipe: Recipe, fmt: Format, scale: float | None, role: str) -> dict[str, Any]:
    """Columns of a cast under one scale: the one given, else the one the recipe chooses."""
    seen = recipe.amax_seen(found.amax, found.nan, found.inf)
    used = recipe.current_scale(seen, role, fmt) if scale is None else scale
    if fmt.name == "bf16":  # which no recipe scales
        return _columns(found.quantised(fmt, used))
    chooser = recipe_named("current") if recipe.name == "unscaled" else recipe
    current = chooser.current_scale(seen, role, fmt)
    return {
        "scale": _known(used),
        "scale_current": _known(current),
        "scale_delta": _delta(used, current) if found.amax is not None else None,
        "scale_source": "emulated" if scale is None else "live",
        **_columns(found.quantised(fmt, used)),
    }


def _per_block(tensor: torch.Tensor, recipe: Recipe, scale: float | None, role: str, axis: int) -> dict[str, Any]:
    """Columns of a cast with scales finer than a tensor."""
    found = block_figures(tensor, recipe, role, axis, scale)
    return {
        "scale_min": found.scale_min,
        "scale_max": found.scale_max,
        "scale_source": "emulated" if scale is None else "live",
        **_columns(found.figures),
    }


def _columns(figures: QuantFigures) -> dict[str, Any]:
    return {name: getattr(figures, name) for name in _CAST_COLUMNS}


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _delta(scale: float, current: float) -> float | None:
    """log2(scale / current): above 0 the scale clips, below it small values are lost; None where either is no scale."""
    if not all(math.isfinite(s) and s > 0 for s in (scale, current)):
        return None
    return math.log2(scale) - math.log2(current)
