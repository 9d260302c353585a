"""NVFP4 as Transformer Engine's kernels make it: E2M1 in blocks of 16 with E4M3 scales, under one float32 scale.

Rounding to nearest only. What a recipe adds to that (random Hadamard transforms, stochastic rounding, a scale per row,
the choice between 4 and 6) is refused, so that nothing passes for it. Weights in blocks of 16 x 16 are made.
Formulas: common/cast/nvfp4/core_nvfp4.cuh of Transformer Engine 2.20.2, and its Python in reference_nvfp4.py.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.hosts.te_cpu import casts

BLOCK = 16
LARGEST = 6.0
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""What the codes 0 to 7 stand for; 8 to 15 are the same, negative."""

_EXTRAS = ("with_rht", "stochastic_rounding", "row_scaled_nvfp4", "nvfp4_use_4over6")


def refuse_extras(quantizer: Any) -> None:
    """Raise where a quantizer asks for more than rounding to nearest."""
    asked = [name for name in _EXTRAS if getattr(quantizer, name, False)]
    if asked:
        raise RuntimeError(f"The CPU stand-in for Transformer Engine has NVFP4 without {', '.join(asked)}.")


def tensor_scale(amax: torch.Tensor) -> torch.Tensor:
    """The scale of the whole tensor: 448 * 6 / amax; 1 where the amax is 0 or Inf."""
    scale = (torch.full_like(amax, 448.0 * LARGEST) / amax).clamp(max=casts.FLOAT32_MAX)
    return torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def codes_of(scaled: torch.Tensor) -> torch.Tensor:
    """float32 values -> E2M1 codes, one a byte: to nearest, ties to the even code, +-Inf saturates, NaN gives 6."""
    magnitude = scaled.abs().nan_to_num(nan=LARGEST)
    between = (VALUES[1:] + VALUES[:-1]) / 2
    code = torch.bucketize(magnitude, between)  # a tie goes down ...
    tie = (magnitude[..., None] == between).any(-1)
    code = code + (tie & (code % 2 == 1))  # ... unless the code above is the even one
    return (code + 8 * torch.signbit(scaled)).to(torch.uint8)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., C] -> bytes [..., C / 2], the first of two in the low half."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpacked(data: torch.Tensor) -> torch.Tensor:
    """The inverse of ``packed``."""
    return torch.stack((data & 0xF, data >> 4), -1).reshape(*data.shape[:-1], 2 * data.shape[-1])


def values_of(codes: torch.Tensor) -> torch.Tensor:
    """Codes -> float32 values, no scale applied."""
    return VALUES[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)


def blocks(x: torch.Tensor, whole: torch.Tensor, square: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, C] float32 and the tensor's scale -> codes [R, C] and scale bytes (E4M3) [R, C / 16]."""
    tiled = x.reshape(x.shape[0], -1, BLOCK)
    amax = casts.amax_ignoring_nan(tiled, -1)
    if square:
        of_tile = amax.reshape(-1, BLOCK, amax.shape[1]).amax(1)
        amax = of_tile.repeat_interleave(BLOCK, 0)
    sixth = whole * torch.tensor(1.0 / LARGEST, dtype=torch.float32)
    decode = casts.cast_to_bytes((amax * sixth).clamp(max=casts.FLOAT32_MAX), torch.float8_e4m3fn)
    scale = casts.values_of_bytes(decode, torch.float8_e4m3fn) * (1.0 / whole)
    encode = torch.reciprocal(scale).clamp(max=casts.FLOAT32_MAX)
    return codes_of((tiled * encode[..., None]).reshape(x.shape)), decode


def dense(data: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Bytes [R, C / 2], scale bytes (padded) and the tensor's amax -> float32 values [R, C]."""
    values = values_of(unpacked(data))
    rows, columns = values.shape
    scale = casts.values_of_bytes(scales, torch.float8_e4m3fn)[:rows, : columns // BLOCK]
    return values * scale.repeat_interleave(BLOCK, 1) * (amax / (448.0 * LARGEST))
