"""From an amax to a scale, bit for bit as the libraries do it. Arrays in, arrays out: one scale per element.

Every function takes float32 amax values (any shape; NaN and Inf allowed) and returns the float32 scales that multiply
before the cast.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8dbg.numerics.formats import Format

Float32Array = npt.NDArray[np.float32]

FLT_MAX = np.finfo(np.float32).max
BF16_MAX = np.float32(float.fromhex("0x1.fep127"))
ROUNDINGS = ("up", "floor", "ceil", "even")


def te_current_scale(
    amax: npt.ArrayLike,
    largest: float,
    power_of_2: bool = False,
    epsilon: float = 0.0,
    value_for_inf: np.float32 = FLT_MAX,
) -> Float32Array:
    """Current scaling of Transformer Engine: largest / amax in float32; 1.0 where amax is 0, Inf or NaN.

    ``epsilon`` is a floor for amax; a quotient of Inf becomes ``value_for_inf`` (FLT_MAX per tensor, the input dtype's
    maximum for blocks); ``power_of_2`` then drops the mantissa. Source: TE 2.20 common/recipe/recipe_common.cuh.
    """
    amax = np.asarray(amax, dtype=np.float32)
    with np.errstate(all="ignore"):
        amax = np.where(amax < np.float32(epsilon), np.float32(epsilon), amax)
        scale = np.asarray(np.float32(largest) / amax, dtype=np.float32)
    scale = np.where(np.isinf(scale), value_for_inf, scale)
    if power_of_2:
        scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    usable = np.isfinite(amax) & (amax != 0)
    return np.where(usable, scale, np.float32(1.0))


def torchao_scale(amax: npt.ArrayLike, largest: float, power_of_2: bool = False) -> Float32Array:
    """Dynamic scaling of torchao: largest / max(amax, 1e-12) in float64, then float32.

    Nothing is hidden: an amax of 0 gives 448e12, Inf gives 0, NaN gives NaN. ``power_of_2`` is
    exp2(floor(log2(scale))) in float32, through torch's own log2, which rounds values just below a power of two up
    to it. Source: torchao 0.18 float8/float8_utils.py.
    """
    import torch

    amax64 = np.asarray(amax, dtype=np.float64)
    with np.errstate(all="ignore"):
        scale = np.asarray(largest / np.maximum(amax64, 1e-12), dtype=np.float64).astype(np.float32)
    if power_of_2:
        scale = torch.exp2(torch.floor(torch.log2(torch.from_numpy(np.atleast_1d(scale))))).numpy().reshape(scale.shape)
    return np.asarray(scale, dtype=np.float32)


def e8m0_exponent(amax: npt.ArrayLike, fmt: Format, rounding: str = "up") -> npt.NDArray[np.uint8]:
    """Biased exponent (E8M0 byte) of an MX block's scale: the power of two that the block's values are *divided* by.

    ``rounding``: "up" takes amax * float32(1 / max) and rounds up, so that no value saturates (TE, torchao's RCEIL);
    "floor" (OCP MX v1.0), "ceil" and "even" take the exponent of amax, rounded that way, less the exponent of the
    format's maximum, and can clip. Under "up" an Inf amax gives 0xFE, as TE's software path does; elsewhere
    non-finite gives 0xFF. Sources: TE 2.20 util/ptx_arch_spec.cuh; torchao 0.18 prototype/mx_formats/mx_tensor.py.
    """
    amax = np.asarray(amax, dtype=np.float32)
    if rounding == "up":
        return _round_up_e8m0(np.asarray(amax * np.float32(1.0 / fmt.max), dtype=np.float32))
    bits = amax.view(np.int32)
    if rounding == "even":
        bits = bits + np.int32(1 << (22 - fmt.mantissa_bits))
    exponent = (bits >> 23) & 0xFF
    if rounding == "ceil":
        exponent = exponent + ((bits & 0x7FFFFF) > 0)
    target = int(np.floor(np.log2(fmt.max)))
    return np.where(np.isfinite(amax), np.clip(exponent - target, 0, 255), 255).astype(np.uint8)


def _round_up_e8m0(value: Float32Array) -> npt.NDArray[np.uint8]:
    """float32 to E8M0, towards plus infinity; 0 to 0, Inf to 254, NaN to 255."""
    bits = value.view(np.uint32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    finite = np.where(np.isinf(value), 254, exponent + up)
    return np.where(np.isnan(value), 255, finite).astype(np.uint8)


def e8m0_reciprocal(exponent: npt.NDArray[np.uint8]) -> Float32Array:
    """The multiplying scale 2^(127 - e) of a biased exponent: 255 gives NaN, 254 the float32 subnormal 2^-127."""
    bits = np.where(exponent == 254, 0x00400000, (254 - exponent.astype(np.int64)) << 23)
    return np.where(exponent == 255, np.float32(np.nan), bits.astype(np.uint32).view(np.float32))


def nvfp4_tensor_scale(amax: npt.ArrayLike) -> Float32Array:
    """NVFP4's per-tensor encode scale, 448 * 6 / amax in float32; 1.0 where amax is 0 or Inf, at most FLT_MAX.

    Source: TE 2.20 common/cast/nvfp4/core_nvfp4.cuh (fminf makes a NaN amax FLT_MAX too).
    """
    amax = np.asarray(amax, dtype=np.float32)
    with np.errstate(all="ignore"):
        scale = np.fmin(np.float32(448.0 * 6.0) / amax, FLT_MAX)
    return np.where((amax == 0) | (scale == 0), np.float32(1.0), scale).astype(np.float32)
