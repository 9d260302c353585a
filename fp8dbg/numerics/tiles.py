"""Matrices cut into tiles that share a scale: amax per tile, cast per tile, and the sums behind the figures.

On a CPU the loops are compiled (``tile_kernels``); elsewhere torch operations give the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8dbg.errors import UsageError
from fp8dbg.numerics import tile_kernels as kernels
from fp8dbg.numerics.compiled import share_out
from fp8dbg.numerics.figures import CastSums
from fp8dbg.numerics.formats import Format, round_torch
from fp8dbg.numerics.memory import array_of

Tile = tuple[int, int]
"""Rows and columns that share a scale."""

_BLOCKS = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32), "1x16": (1, 16)}
_PER_THREAD = 1 << 18
_STRIP = 1 << 16


class Cast(NamedTuple):
    """How a matrix is cast: format, tile, and per tile the scale before the rounding and the factor after it.

    ``scales`` and ``inverses``: float32 [tile rows, tile columns], on the matrix's device.
    """

    fmt: Format
    tile: Tile
    scales: Tensor
    inverses: Tensor


def on_host(tensor: Tensor) -> bool:
    """Whether the compiled loops can read the tensor; everywhere else torch operations take their place."""
    return tensor.device.type == "cpu"


def as_matrix(tensor: Tensor) -> Tensor:
    """The tensor as contiguous [rows, columns], bfloat16 or float32: leading axes flattened, other dtypes widened.

    A scalar is [1, 1]. Integer, complex and meta tensors are a UsageError.
    """
    if not tensor.is_floating_point() or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.dtype).removeprefix("torch.")
        raise UsageError(f"A {kind} tensor cannot be cast.", "Give a floating-point tensor with data.")
    tensor = tensor.detach()
    matrix = tensor if tensor.dtype in (torch.bfloat16, torch.float32) else tensor.float()
    columns = matrix.shape[-1] if matrix.dim() else 1
    return matrix.reshape(matrix.numel() // max(columns, 1), columns).contiguous()


def tile_of(granularity: str, shape: torch.Size, axis: int) -> Tile:
    """The tile of a granularity in a matrix of that shape; blocks and rows run along the last axis (-1) or down (0)."""
    if granularity == "tensor":
        return max(shape[0], 1), max(shape[1], 1)
    height, width = (1, max(shape[1 if axis else 0], 1)) if granularity == "row" else _BLOCKS[granularity]
    return (height, width) if axis else (width, height)


def grid_of(shape: torch.Size, tile: Tile) -> Tile:
    """How many tiles there are, down and across."""
    return -(-shape[0] // tile[0]), -(-shape[1] // tile[1])


def amax_per_tile(matrix: Tensor, tile: Tile, let_nan_in: bool = False) -> Tensor:
    """Largest absolute value of every tile, float32 [tile rows, tile columns]; Inf counts, 0 where all are zero.

    NaN is left out, as in an fmax reduction, or makes its tile's amax NaN.
    """
    if not on_host(matrix):
        return _amax_by_torch(matrix, tile, let_nan_in)
    amax = np.zeros(grid_of(matrix.shape, tile), dtype=np.float32)
    x, ceiling = array_of(matrix), np.uint32(0x7FFFFFFF if let_nan_in else 0x7F800000)
    _over_rows(lambda *span: kernels.amax_tiles(x, tile, span, ceiling, amax), matrix, tile)
    return torch.from_numpy(amax)


def apply(
    cast: Cast, matrix: Tensor, dtype: torch.dtype, error: bool = False, empty: Callable[..., Tensor] = torch.empty
) -> Tensor:
    """round(x * scale) * inverse for every element, or with ``error`` that minus x; bfloat16 or float32.

    ``empty(shape, dtype=...)`` gives the memory on a CPU.
    """
    if not on_host(matrix):
        seen = _cast_by_torch(cast, matrix)
        return (seen - matrix.float() if error else seen).to(dtype)
    out = empty(matrix.shape, dtype=dtype)
    x, y, constants = array_of(matrix), array_of(out), rounding_constants(cast.fmt)
    factors = cast.scales.numpy(), cast.inverses.numpy()
    _over_rows(lambda *span: kernels.cast_tiles(x, *factors, cast.tile, span, constants, error, y), matrix, cast.tile)
    return out


def sums(cast: Cast, matrix: Tensor) -> tuple[CastSums, float, int]:
    """What the figures of a cast are made of: its counts and sums, the sum of x^2 and the number of finite elements.

    float64 sums in an order that the shape alone decides, whatever the threads.
    """
    if not on_host(matrix):
        return _sums_by_torch(cast, matrix)
    tall = max(1, _STRIP // max(cast.tile[0] * matrix.shape[1], 1))
    strips = -(-cast.scales.shape[0] // tall)
    counted, summed = np.zeros((strips, 5), dtype=np.int64), np.zeros((strips, 5))
    x, constants = array_of(matrix), rounding_constants(cast.fmt)
    factors, limits = (cast.scales.numpy(), cast.inverses.numpy()), _limits(cast.fmt)

    def work(start: int, stop: int) -> None:
        for s in range(start, stop):
            span = s * tall, min(s * tall + tall, cast.scales.shape[0])
            kernels.sum_tiles(x, *factors, cast.tile, span, constants, limits, counted[s], summed[s])

    share_out(work, strips, 4)
    underflow, saturated, at_max, subnormal, finite = (int(c) for c in counted.sum(axis=0))
    x2, y2, d2, d, xy = (math.fsum(column) for column in summed.T)
    return CastSums(underflow, saturated, at_max, subnormal, d2, d, y2, xy), x2, finite


def rounding_constants(fmt: Format) -> tuple[np.uint32, np.uint32, np.float32]:
    """What the kernels need to round: exponent shift and least anchor as float32 bits, and the maximum.

    An anchor of 2^23 steps leaves no room for anything finer than a step.
    """
    anchor = np.float32(fmt.smallest_subnormal * 2.0**23)
    return np.uint32((23 - fmt.mantissa_bits) << 23), anchor.view(np.uint32), np.float32(fmt.max)


def _limits(fmt: Format) -> tuple[np.float32, np.float32]:
    """The smallest normal value, and the largest product that does not saturate."""
    highest = np.float32(fmt.boundary)
    if fmt.boundary_saturates:
        highest = np.nextafter(highest, np.float32(0))
    return np.float32(fmt.smallest_normal), highest


def _over_rows(work: Callable[[int, int], None], matrix: Tensor, tile: Tile) -> None:
    """``work`` over the tile rows, shared out over threads where there is enough to do."""
    share_out(work, grid_of(matrix.shape, tile)[0], max(1, _PER_THREAD // max(tile[0] * matrix.shape[1], 1)))


def _tiled(matrix: Tensor, tile: Tile) -> Tensor:
    """[tile rows, height, tile columns, width], padded with zeros."""
    down, across = grid_of(matrix.shape, tile)
    missing = down * tile[0] - matrix.shape[0], across * tile[1] - matrix.shape[1]
    return torch.nn.functional.pad(matrix, (0, missing[1], 0, missing[0])).view(down, tile[0], across, tile[1])


def _amax_by_torch(matrix: Tensor, tile: Tile, let_nan_in: bool) -> Tensor:
    magnitudes = _tiled(matrix, tile).float().abs()
    return (magnitudes if let_nan_in else magnitudes.nan_to_num(nan=0.0, posinf=math.inf)).amax(dim=(1, 3))


def _by_torch(cast: Cast, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The products before the rounding, the codes after it, and the values they stand for; float32, tiled."""
    products = _tiled(matrix, cast.tile).float() * cast.scales[:, None, :, None]
    codes = round_torch(cast.fmt, products)
    return products, codes, codes * cast.inverses[:, None, :, None]


def _cast_by_torch(cast: Cast, matrix: Tensor) -> Tensor:
    rows, columns = grid_of(matrix.shape, cast.tile)
    y = _by_torch(cast, matrix)[2].reshape(rows * cast.tile[0], columns * cast.tile[1])
    return y[: matrix.shape[0], : matrix.shape[1]]


def _sums_by_torch(cast: Cast, matrix: Tensor) -> tuple[CastSums, float, int]:
    finite = matrix.isfinite()
    x = torch.where(finite, matrix, 0.0)
    products, codes, y = _by_torch(cast, x)
    normal, boundary = (float(v) for v in _limits(cast.fmt))
    magnitudes, tiled = codes.abs(), _tiled(x, cast.tile).double()
    counts = [
        (tiled != 0) & (codes == 0),
        products.abs() > boundary,
        magnitudes == cast.fmt.max,
        (magnitudes > 0) & (magnitudes < normal),
        finite,
    ]
    wide = torch.where(_tiled(finite, cast.tile), y, 0.0).double()
    parts = [(wide - tiled) ** 2, wide - tiled, wide**2, tiled * wide, tiled**2]
    *counted, total = torch.stack([c.sum() for c in counts]).tolist()
    *summed, x2 = torch.stack([p.sum() for p in parts]).tolist()
    return CastSums(*counted, *summed), x2, total
