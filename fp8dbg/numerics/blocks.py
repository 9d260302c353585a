"""The figures of a cast whose scales are finer than the tensor: per row, 1x128, 128x128, 1x32 (MXFP8), 1x16 (NVFP4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8dbg.numerics import tiles
from fp8dbg.numerics.casting import prepare
from fp8dbg.numerics.figures import QuantFigures
from fp8dbg.numerics.recipes import Recipe


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """The figures of a cast, and the range of its scales.

    Attributes:
        figures: counts and errors, as for a cast under one scale.
        scale_min, scale_max: smallest and largest finite scale among the blocks that hold anything but zeros and NaN;
            None where there is none, and where the granularity is a tensor. The scale of a block of zeros is a
            library's placeholder (1, 2^127, 4.48e14): it multiplies nothing.
    """

    figures: QuantFigures
    scale_min: float | None
    scale_max: float | None


def block_figures(
    tensor: Tensor, recipe: Recipe, role: str, axis: int = -1, scale: float | None = None, gemm: str = "fprop"
) -> BlockFigures:
    """What casting a tensor as the recipe would does to it.

    Args:
        tensor: bfloat16 or float32, others are widened to float32; any shape (0-d, empty), strides and device.
        recipe, role: give the format and the granularity; any recipe, those with one scale per tensor included.
        axis: along which blocks run: -1 the last, 0 the leading axes taken together. A row's last block may be short;
            no block reaches into the next row.
        scale: the scale kept for the whole tensor where there is one (NVFP4's tensor scale included); None takes what
            the recipe would choose.
        gemm: whose granularity, where that differs by GEMM.

    Counts are int64; sums are float64, in an order that depends on the shape alone. Non-finite elements are left out
    of the figures, and do what they do in the library to the scale of their block: NaN nothing (torchao: its block
    becomes NaN, and the error figures None), Inf a scale of 1 (TE), 2^-127 (MXFP8) or 0 (torchao).
    """
    p = prepare(tensor, recipe, role, recipe.granularity(role, gemm), axis, scale)
    figures = QuantFigures.from_sums(*tiles.sums(p.whole, p.matrix))
    if p.amax is None:
        return BlockFigures(figures, None, None)
    used = p.cast.scales[(p.amax > 0) & p.cast.scales.isfinite()]
    if not used.numel():
        return BlockFigures(figures, None, None)
    low, high = torch.stack(torch.aminmax(used)).tolist()
    return BlockFigures(figures, low, high)
