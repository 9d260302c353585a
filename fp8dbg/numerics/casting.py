"""Casting an operand as a recipe would for one GEMM: the scales it gets, and the values that the GEMM then sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8dbg.errors import UnknownNameError
from fp8dbg.numerics import tiles
from fp8dbg.numerics.census import amax_of
from fp8dbg.numerics.formats import format_named, round_torch
from fp8dbg.numerics.recipes import Recipe
from fp8dbg.numerics.scales import FLT_MAX

OPERANDS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
"""Each GEMM's first and second operand."""

_ALONG_LAST = {("input", "fprop"), ("weight", "fprop"), ("grad_output", "dgrad")}
_FLAT, _STRIP = 1024, 1 << 16


class Quantised(NamedTuple):
    """What a GEMM sees of an operand: ``values`` times ``factor``.

    ``values`` has the operand's shape: bfloat16 where that holds them exactly (codes under one scale; blocks under
    powers of two, and NVFP4, down to 9e-41), else float32. ``factor`` is one number, or a 0-d tensor if the scale given
    was one on a device.
    """

    values: Tensor
    factor: float | Tensor

    def dequantised(self) -> Tensor:
        """The product, float32."""
        return self.values.float() * self.factor


class Prepared(NamedTuple):
    """A matrix and how it is cast: what a GEMM sees is the cast's result times ``factor``.

    ``amax`` per tile, where scales are finer than the tensor.
    """

    matrix: Tensor
    cast: tiles.Cast
    factor: float | Tensor
    amax: Tensor | None = None

    @property
    def whole(self) -> tiles.Cast:
        """The cast with the factor in it."""
        return self.cast._replace(inverses=self.cast.inverses * self.factor)


def contraction_axis(role: str, gemm: str) -> int:
    """The axis that this GEMM sums over: -1 the last; 0 the leading ones taken together (tokens, rows of a weight).

    A role that is no operand of the GEMM is an UnknownNameError.
    """
    if gemm not in OPERANDS:
        raise UnknownNameError("GEMM", gemm, list(OPERANDS))
    if role not in OPERANDS[gemm]:
        raise UnknownNameError(f"operand of {gemm}", role, list(OPERANDS[gemm]))
    return -1 if (role, gemm) in _ALONG_LAST else 0


def tensor_scale(tensor: Tensor, recipe: Recipe, role: str) -> float:
    """The scale the recipe would choose for the whole tensor: what delayed scaling chases; NVFP4's tensor scale."""
    found = amax_of(tensor)
    return recipe.current_scale(recipe.amax_seen(found.amax, found.nan, found.inf), role)


def cast(
    tensor: Tensor,
    recipe: Recipe,
    role: str,
    gemm: str,
    scale: float | Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Quantised:
    """The values that the recipe's GEMM sees of an operand.

    Args:
        tensor: bfloat16 or float32, others are widened to float32; any shape, strides and device. Leading axes are
            flattened. Blocks run along the contraction; a row's last block may be short, and none reaches into the
            next row.
        recipe, role, gemm: give the format, the granularity and the axis.
        scale: where one is kept for the whole tensor (NVFP4's tensor scale included), the one in force; None takes
            what the recipe would choose from this tensor. Finer scales always come from the tensor.
        dtype: of the values, if not the narrowest that holds them.

    NaN stays NaN (E2M1 and INT8, which have no code for it, included) and enters no amax but torchao's; Inf enters the
    amax and becomes the format's maximum. Zeros stay zeros. The product with the scale is taken in float32; nothing is
    random. Integer tensors are a UsageError.
    """
    granularity = recipe.granularity(role, gemm)
    p = prepare(tensor, recipe, role, granularity, contraction_axis(role, gemm), scale)
    exact = granularity == "tensor" or recipe.name in ("mxfp8", "nvfp4") or bool(recipe.parameters.get("power_of_2"))
    dtype = dtype or (torch.bfloat16 if exact else torch.float32)
    return Quantised(tiles.apply(p.cast, p.matrix, dtype).view(tensor.shape), p.factor)


def cast_error(
    tensor: Tensor,
    recipe: Recipe,
    role: str,
    gemm: str,
    scale: float | Tensor | None = None,
    empty: Callable[..., Tensor] = torch.empty,
) -> Tensor:
    """What the cast changes: the values seen less the values given; arguments as for ``cast`` and ``tiles.apply``.

    Shape of the tensor; bfloat16 for a bfloat16 tensor (so rounded to 2^-9 of itself), else float32. NaN where the
    tensor is not finite.
    """
    p = prepare(tensor, recipe, role, recipe.granularity(role, gemm), contraction_axis(role, gemm), scale)
    return tiles.apply(p.whole, p.matrix, p.matrix.dtype, error=True, empty=empty).view(tensor.shape)


def prepare(
    tensor: Tensor, recipe: Recipe, role: str, granularity: str, axis: int, scale: float | Tensor | None
) -> Prepared:
    """Choose the scales of an operand; ``axis`` as ``contraction_axis`` gives it."""
    matrix = tiles.as_matrix(tensor)
    if granularity == "tensor":
        return _under_one_scale(matrix, recipe, role, tensor_scale(matrix, recipe, role) if scale is None else scale)
    tile, fmt = tiles.tile_of(granularity, matrix.shape, axis), recipe.format(role)
    amax = tiles.amax_per_tile(matrix, tile, recipe.lets_nan_in)
    if recipe.name == "nvfp4":
        whole = tensor_scale(matrix, recipe, role) if scale is None else float(scale)
        scales, inverses = nvfp4_block_scales(amax, whole)
        return Prepared(matrix, tiles.Cast(fmt, tile, scales, inverses), _inverse(whole), amax)
    with np.errstate(all="ignore"):
        scales = torch.from_numpy(recipe.scales(amax.cpu().numpy(), role)).to(matrix.device)
    return Prepared(matrix, tiles.Cast(fmt, tile, scales, 1.0 / scales), 1.0, amax)


def nvfp4_block_scales(amax: Tensor, tensor_scale: float) -> tuple[Tensor, Tensor]:
    """Encode scales of NVFP4 blocks, and their decode scales: E4M3 of amax * (tensor_scale * float32(1/6)).

    float32, any shape. The encode scale is 1 / (decode * (1 / tensor_scale)), each step rounded, as the kernel has it:
    many a product with it is a tie of E2M1, so its last bit tells. A decode scale that rounds to zero gives an encode
    scale of 0: its block becomes zeros. Source: TE 2.20 common/cast/nvfp4/core_nvfp4.cuh and its reference_nvfp4.py.
    """
    decode = round_torch(format_named("e4m3"), amax * float(np.float32(tensor_scale) * np.float32(1.0 / 6.0)))
    encode = decode.mul(_inverse(tensor_scale)).reciprocal().clamp(max=float(FLT_MAX))
    return torch.where(decode == 0, torch.zeros_like(encode), encode), decode


def _under_one_scale(matrix: Tensor, recipe: Recipe, role: str, scale: float | Tensor) -> Prepared:
    """A whole tensor under one scale, cut into strips of rows for the threads; the scale's inverse is the factor."""
    width = _FLAT if matrix.numel() % _FLAT == 0 else max(matrix.numel(), 1)
    flat = matrix.view(-1, width) if matrix.numel() else matrix
    tile = max(1, _STRIP // width), width
    grid = tiles.grid_of(flat.shape, tile)
    ones = torch.ones(grid, device=matrix.device)
    if isinstance(scale, Tensor) and not tiles.on_host(scale):
        value: Tensor | float = scale.float()
        factor: Tensor | float = 1.0 / scale.float()
    else:
        value = float(scale)
        factor = _inverse(value)
    return Prepared(flat, tiles.Cast(recipe.format(role), tile, ones * value, ones), factor)


def _inverse(scale: float) -> float:
    """1 / scale as float32 has it: Inf for 0, 0 for Inf."""
    with np.errstate(all="ignore"):
        return float(np.float32(1.0) / np.float32(scale))
