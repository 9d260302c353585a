"""The slow, obvious version of casts whose scales are finer than a tensor: one block at a time, by other libraries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from fp8dbg.numerics.formats import FORMATS
from fp8dbg.numerics.recipes import Recipe
from tests import slow

SIZES = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32), "1x16": (1, 16)}
LOUD = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def blocks(shape: tuple[int, int], granularity: str, axis: int) -> list[tuple[slice, slice]]:
    """The blocks of a matrix, as slices of rows and columns."""
    rows, columns = shape
    whole = {"tensor": (rows, columns), "row": (1, columns) if axis else (rows, 1)}
    height, width = whole.get(granularity) or SIZES[granularity]
    if not axis and granularity not in whole:
        height, width = width, height
    return [
        (slice(i, i + height), slice(j, j + width)) for i in range(0, rows, height) for j in range(0, columns, width)
    ]


def amax(values: Any, loud: bool = False) -> np.float32:
    """Largest absolute value; NaN counts only where the library is loud."""
    magnitudes = np.abs(values).reshape(-1)
    if loud and np.isnan(magnitudes).any():
        return np.float32(np.nan)
    return np.float32(np.fmax.reduce(magnitudes, initial=np.float32(0)))


def factors(recipe: Recipe, role: str, block: Any, whole: np.float32) -> tuple[np.float32, np.float32]:
    """What a block is multiplied by before its rounding, and after it."""
    with np.errstate(all="ignore"):
        if recipe.name != "nvfp4":
            scale = np.float32(recipe.scales(amax(block, recipe.name in LOUD), role))
            return scale, np.float32(np.float32(1) / scale)
        tensor = np.float32(recipe.scales(whole, role))
        decode = np.float32(slow.rounded(amax(block) * np.float32(tensor * np.float32(1 / 6)), "e4m3"))
        inverse = np.float32(1) / np.float32(decode * (np.float32(1) / tensor))
        encode = np.float32(min(inverse, np.finfo(np.float32).max)) if decode else np.float32(0)
        return encode, decode * np.float32(1.0 / float(tensor))


def cast(x: torch.Tensor, recipe: Recipe, role: str, granularity: str, axis: int) -> dict[str, Any]:
    """Values seen (float32, in x's shape), and every figure of the cast; x has at least one element."""
    matrix = x.detach().float().reshape(-1, x.shape[-1] if x.dim() else 1).numpy()
    fmt = recipe.format(role).name
    product, q, y = (np.zeros_like(matrix) for _ in range(3))
    scales, whole = [], amax(matrix)
    with np.errstate(all="ignore"):
        for at in blocks(matrix.shape, granularity, axis):
            scale, inverse = factors(recipe, role, matrix[at], whole)
            product[at] = matrix[at] * scale
            q[at] = slow.rounded(product[at], fmt)
            y[at] = q[at] * inverse
            if amax(matrix[at], recipe.name in LOUD) > 0 and np.isfinite(scale):
                scales.append(float(scale))
    y[np.isnan(matrix)] = np.nan  # E2M1 and INT8 have no code for it, and what libraries make of it differs
    return {
        "seen": y.reshape(tuple(x.shape)),
        "scale_min": min(scales, default=None) if granularity != "tensor" else None,
        "scale_max": max(scales, default=None) if granularity != "tensor" else None,
        **figures(matrix, product, q, y, fmt),
    }


def figures(x: Any, product: Any, q: Any, y: Any, fmt: str) -> dict[str, Any]:
    """Counts and errors over the finite elements."""
    finite = np.isfinite(x)
    x, product, q, y = x[finite].astype(np.float64), product[finite], q[finite], y[finite].astype(np.float64)
    found: dict[str, Any] = {
        "underflow": int(((x != 0) & (q == 0)).sum()),
        "saturated": int(slow.saturates(product, fmt).sum()),
        "at_max": int((np.abs(q) == slow.largest(fmt)).sum()),
        "subnormal": int(((q != 0) & (np.abs(q) < FORMATS[fmt].smallest_normal)).sum()),
    }
    names = ("mse", "rel_l2", "sqnr_db", "cosine", "norm_ratio", "bias")
    if not x.size or not np.isfinite(y).all():
        return {**found, **dict.fromkeys(names)}
    x2, y2, d2 = math.fsum(x**2), math.fsum(y**2), math.fsum((y - x) ** 2)
    rel = math.sqrt(d2 / x2) if x2 else None
    return {
        **found,
        "mse": d2 / x.size,
        "rel_l2": rel,
        "sqnr_db": -20 * math.log10(rel) if rel else None,
        "cosine": math.fsum(x * y) / math.sqrt(x2) / math.sqrt(y2) if x2 and y2 else None,
        "norm_ratio": math.sqrt(y2 / x2) if x2 else None,
        "bias": math.fsum(y - x) / x.size / math.sqrt(x2 / x.size) if x2 else None,
    }
