"""Scales and saturating casts as Transformer Engine's CUDA kernels compute them, in torch on a CPU.

Independent of fp8dbg.numerics on purpose: the tests compare the two.
Formulas: common/recipe/recipe_common.cuh, common/utils.cuh, common/util/ptx_arch_spec.cuh of Transformer Engine 2.20.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

FLOAT32_MAX = torch.finfo(torch.float32).max
MX_BLOCK = 32
E8M0_ONE = 127


def cast_to_bytes(scaled: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 values, already multiplied by their scale -> bytes of ``dtype``; +-Inf saturates, NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return scaled.clamp(-largest, largest).to(dtype).view(torch.uint8)


def values_of_bytes(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes of ``dtype`` -> the float32 values they stand for, the scale not yet divided out."""
    return data.contiguous().view(dtype).float()


def amax_ignoring_nan(x: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """max(abs(x)) in float32 as fmaxf takes it: NaN never gets in, Inf does, an empty tensor has 0."""
    magnitudes = x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf)
    if x.numel() == 0:
        return magnitudes.new_zeros(())
    return magnitudes.amax() if dim is None else magnitudes.amax(dim)


@dataclass(frozen=True)
class ScaleRule:
    """The knobs of ``compute_scale_from_amax``: floor of the amax, cut to a power of two, what an Inf scale becomes."""

    epsilon: float = 0.0
    power_of_2: bool = False
    value_for_inf: float = FLOAT32_MAX

    def scale(self, amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """float32 scale for a float32 amax of any shape; 1 where the amax is 0 or not finite."""
        amax = amax.clamp(min=self.epsilon)
        scale = torch.full_like(amax, torch.finfo(dtype).max) / amax
        scale = torch.where(torch.isinf(scale), torch.full_like(scale, self.value_for_inf), scale)
        scale = torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(scale))
        return power_of_2_floor(scale) if self.power_of_2 else scale


def power_of_2_floor(scale: torch.Tensor) -> torch.Tensor:
    """Drop the mantissa bits, as the kernel does: exp2(floor(log2)) would round up just below a power of two."""
    return (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)


def e8m0_of_amax(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Biased exponent byte of the smallest power of two not below amax / max: ``float_to_e8m0``, rounding up."""
    bits = (amax * torch.tensor(1.0 / torch.finfo(dtype).max, dtype=torch.float32)).view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    tiny = (exponent == 0) & (mantissa <= 0x400000)
    rounded = exponent + ((mantissa > 0) & (exponent != 0xFE) & ~tiny).int()
    return torch.where(torch.isinf(amax), torch.full_like(rounded, 0xFE), rounded).to(torch.uint8)


def reciprocal_of_e8m0(code: torch.Tensor) -> torch.Tensor:
    """2^(127 - code) as float32: ``exp2f_rcp``; 255 gives NaN."""
    power = torch.exp2(127.0 - code.float())
    return torch.where(code == 255, torch.full_like(power, torch.nan), power)


def mx_blocks(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, C] float32 -> bytes [R, C] and scale bytes [R, C / 32], blocks of 32 along a row."""
    blocks = x.reshape(x.shape[0], -1, MX_BLOCK)
    code = e8m0_of_amax(amax_ignoring_nan(blocks, -1), dtype)
    return cast_to_bytes((blocks * reciprocal_of_e8m0(code)[..., None]).reshape(x.shape), dtype), code


def tiles(
    x: torch.Tensor, rows: int, columns: int, dtype: torch.dtype, rule: ScaleRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, C] float32 -> bytes [R, C] and scale_inv [ceil(R / rows), ceil(C / columns)], one scale per tile."""
    height, width = x.shape
    padded = F.pad(x, (0, -width % columns, 0, -height % rows))
    tiled = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scale = rule.scale(amax_ignoring_nan(tiled, (1, 3)), dtype)
    scaled = (tiled * scale[:, None, :, None]).reshape(padded.shape)[:height, :width]
    return cast_to_bytes(scaled.contiguous(), dtype), 1.0 / scale


def updated_history(history: torch.Tensor, last: torch.Tensor, take_max: bool) -> torch.Tensor:
    """Roll ``last`` [n] into ``history`` [L, n] in place and return the amax [n] that sets the next scale.

    A column whose last amax is 0 does not roll and answers 0, which leaves its scale alone
    (common/recipe/delayed_scaling.cu, kernel_bulk).
    """
    rolled = torch.roll(history, -1, 0)
    rolled[-1] = last
    moved = last != 0
    amax = amax_ignoring_nan(rolled, 0) if take_max else last  # the entry about to leave row 0 still counts
    history.copy_(torch.where(moved, rolled, history))
    history[0] = 0.0
    return torch.where(moved, amax, torch.zeros_like(amax))


def delayed_scale(amax: torch.Tensor, old: torch.Tensor, dtype: torch.dtype, margin: float) -> torch.Tensor:
    """The next float32 scale for an amax out of the history; the old one where the amax is 0 or not finite."""
    target = torch.tensor(torch.finfo(dtype).max * 2.0**-margin, dtype=torch.float32)
    scale = torch.where((amax > 0) & torch.isfinite(amax), target / amax, old)
    return torch.where(torch.isinf(scale), torch.full_like(scale, FLOAT32_MAX), scale)
