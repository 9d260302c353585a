"""Number formats as values: what each can hold, how it rounds, and how noisy a healthy cast to it is.

No torch at import, so that reading a run folder needs none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fp8dbg.errors import UnknownNameError

if TYPE_CHECKING:
    import torch

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NoiseFloor:
    """Error of a healthy cast or GEMM on Gaussian data under current scaling: what "as good as the format" means."""

    rel_l2: float

    @property
    def sqnr_db(self) -> float:
        """Signal to quantisation noise ratio, in dB."""
        return -20.0 * math.log10(self.rel_l2)

    @property
    def cosine(self) -> float:
        """Cosine similarity of the exact and the rounded values, whose error is all but orthogonal to the result."""
        return math.sqrt(1.0 - self.rel_l2**2)


@dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
        name: as in tables and options, e.g. "e4m3".
        exponent_bits, mantissa_bits, bias: the layout; 0 exponent bits for an integer format.
        max: largest finite value.
        smallest_normal, smallest_subnormal: smallest positive values of each kind; the latter is also the finest step.
        boundary: the absolute value half a step beyond ``max``: anything larger saturates.
        boundary_saturates: whether the tie at ``boundary`` itself rounds away from ``max`` (E5M2's 61440 does,
            E4M3's 464 does not).
        signed: False for E8M0, which holds neither zero nor negative values: it is for scales, not for tensors.
        noise: healthy error, or None where there is no such thing (E8M0). INT8's is for a million values.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    boundary: float
    boundary_saturates: bool
    signed: bool = True
    noise: NoiseFloor | None = None

    def round(self, x: npt.ArrayLike) -> FloatArray:
        """Round to the format: nearest, ties to even, saturating.

        Any shape; float64 in and out, exact. NaN stays NaN, plus and minus Inf become plus and minus ``max``.
        E8M0 turns zero and negative values into NaN, having no code for them.
        """
        with np.errstate(all="ignore"):  # a signalling NaN warns as it is widened
            x = np.asarray(x, dtype=np.float64)
            _, exponent = np.frexp(x)
            step = np.maximum(np.ldexp(1.0, exponent - 1 - self.mantissa_bits), self.smallest_subnormal)
            y = np.clip(np.rint(x / step) * step, -self.max, self.max)
            if not self.signed:
                y = np.where(x > 0, np.maximum(y, self.smallest_subnormal), np.nan)
        return np.asarray(y, dtype=np.float64)

    def saturates(self, x: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether each value lies beyond the largest one that still rounds to ``max``; True for Inf, False for NaN."""
        with np.errstate(invalid="ignore"):
            magnitude = np.abs(np.asarray(x, dtype=np.float64))
        beyond = magnitude >= self.boundary if self.boundary_saturates else magnitude > self.boundary
        return np.asarray(beyond, dtype=np.bool_)

    def codes(self) -> FloatArray:
        """Every finite value the format can hold, ascending, zero once."""
        first = round(math.log2(self.smallest_subnormal))
        last = round(math.log2(self.max)) + 1
        significands = np.arange(2 ** (self.mantissa_bits + 1), dtype=np.float64)
        exponents = np.arange(first, max(last - self.mantissa_bits, first) + 1)
        magnitudes = np.unique(np.ldexp(significands[:, None], exponents[None, :]))
        magnitudes = magnitudes[magnitudes <= self.max]
        if not self.signed:
            return magnitudes[magnitudes > 0]
        return np.concatenate([-magnitudes[:0:-1], magnitudes])

    @cached_property
    def kernel_parameters(self) -> tuple[int, float, float, float, float, bool]:
        """What the compiled kernels need: mantissa bits, finest step, smallest normal, max, boundary and its tie."""
        return (
            self.mantissa_bits,
            self.smallest_subnormal,
            self.smallest_normal,
            self.max,
            self.boundary,
            self.boundary_saturates,
        )


def _float_format(
    name: str, exponent_bits: int, mantissa_bits: int, bias: int, largest: float, rel_l2: float, top_is_even: bool
) -> Format:
    """A floating-point format whose step just below ``max`` is also the notional step above it."""
    smallest_normal = 2.0 ** (1 - bias)
    top_step = 2.0 ** (math.floor(math.log2(largest)) - mantissa_bits)
    return Format(
        name,
        exponent_bits,
        mantissa_bits,
        bias,
        largest,
        smallest_normal,
        smallest_normal * 2.0**-mantissa_bits,
        largest + top_step / 2,
        not top_is_even,
        noise=NoiseFloor(rel_l2),
    )


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _float_format("e4m3", 4, 3, 7, 448.0, 0.0265, True),
        _float_format("e5m2", 5, 2, 15, 57344.0, 0.0526, False),
        _float_format("e4m3fnuz", 4, 3, 8, 240.0, 0.0265, False),
        _float_format("e5m2fnuz", 5, 2, 16, 57344.0, 0.0526, False),
        _float_format("e2m1", 2, 1, 1, 6.0, 0.095, False),
        _float_format("fp16", 5, 10, 15, 65504.0, 0.000207, False),
        _float_format("bf16", 8, 7, 127, float.fromhex("0x1.fep127"), 0.00166, False),
        Format("e8m0", 8, 0, 127, 2.0**127, 2.0**-127, 2.0**-127, 1.5 * 2.0**127, True, signed=False),
        Format("int8", 0, 7, 0, 127.0, 1.0, 1.0, 127.5, True, noise=NoiseFloor(0.0108)),
    )
}
"""All formats by name. FNUZ twins are AMD's; E2M1 and E8M0 are OCP MX v1.0's; INT8 is symmetric, -127 to 127."""


def format_named(name: str) -> Format:
    """The format of that name; UnknownNameError, listing the valid names, if there is none."""
    if name not in FORMATS:
        raise UnknownNameError("format", name, list(FORMATS))
    return FORMATS[name]


def gemm_noise(a: Format, b: Format) -> NoiseFloor | None:
    """Healthy error of a GEMM whose operands are cast to ``a`` and ``b``: independent errors add in quadrature."""
    if a.noise is None or b.noise is None:
        return None
    return NoiseFloor(math.hypot(a.noise.rel_l2, b.noise.rel_l2))


def round_torch(fmt: Format, x: torch.Tensor) -> torch.Tensor:
    """``Format.round`` for float32 tensors already scaled, on any device; new tensor, same shape, identical values.

    Clamped before the cast: whether torch's own casts saturate depends on its version, device and format.
    """
    import torch

    native = {
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "e4m3fnuz": torch.float8_e4m3fnuz,
        "e5m2fnuz": torch.float8_e5m2fnuz,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
    }
    if fmt.name in native:
        return x.clamp(-fmt.max, fmt.max).to(native[fmt.name]).to(torch.float32)
    if fmt.name == "int8":
        return x.clamp(-fmt.max, fmt.max).round()
    if not fmt.signed:
        y = _round_by_step(fmt, x.double()).clamp(min=fmt.smallest_subnormal)  # 2^-127 is a float32 subnormal
        return torch.where(x > 0, y, math.nan).float()
    return _round_by_step(fmt, x)


def _round_by_step(fmt: Format, x: torch.Tensor) -> torch.Tensor:
    """Rounding by arithmetic, for formats torch has no element-wise cast to."""
    import torch

    x = x.clamp(-fmt.max, fmt.max)
    _, exponent = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), exponent - 1 - fmt.mantissa_bits).clamp(min=fmt.smallest_subnormal)
    return (x / step).round() * step
