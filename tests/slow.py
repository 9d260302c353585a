"""The slow, obvious version of every per-tensor figure: float64, exact sums, ml_dtypes for the rounding."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import torch

from fp8dbg.numerics.formats import FORMATS

DTYPES: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "int8": np.int8,
}


def largest(fmt: str) -> float:
    """The format's maximum, as ml_dtypes has it."""
    if fmt == "int8":
        return 127.0
    info: Any = ml_dtypes.finfo
    return float(info(DTYPES[fmt]).max)


def rounded(x: Any, fmt: str) -> Any:
    """Float32 ``x`` in the format, by another library's cast after an explicit clip; float64."""
    clipped = np.clip(np.asarray(x, dtype=np.float32), -largest(fmt), largest(fmt))
    if fmt == "int8":
        return np.rint(clipped.astype(np.float64))
    return clipped.astype(DTYPES[fmt]).astype(np.float64)


def saturates(x: Any, fmt: str) -> Any:
    """Whether rounding with the top step, had the format no maximum, would end above it."""
    step = 1.0
    if fmt != "int8":
        top = np.array([largest(fmt)]).astype(DTYPES[fmt])
        bits = top.view(f"u{top.dtype.itemsize}")
        step = largest(fmt) - float((bits - 1).view(DTYPES[fmt])[0])
    magnitude = np.abs(np.asarray(x, dtype=np.float64))
    return np.rint(magnitude / step) * step > largest(fmt)


def statistics(x: torch.Tensor) -> dict[str, Any]:
    """Figures of the values."""
    with np.errstate(all="ignore"):
        v = x.detach().float().reshape(-1).double().numpy()
    f = v[np.isfinite(v)]
    nonzero = np.abs(f[f != 0])
    mean = math.fsum(f) / f.size if f.size else None
    d = f - mean if mean is not None else f
    different = f.size and f.min() != f.max()
    return {
        "numel": v.size,
        "zeros": int((v == 0).sum()),
        "nan": int(np.isnan(v).sum()),
        "inf": int(np.isinf(v).sum()),
        "amax": nonzero.max() if nonzero.size else None,
        "amin": nonzero.min() if nonzero.size else None,
        "mean": mean,
        "rms": math.sqrt(math.fsum(f**2) / f.size) if f.size else None,
        "kurtosis": math.fsum(d**4) * f.size / math.fsum(d**2) ** 2 if different else None,
        "peak_to_median": nonzero.max() / np.median(nonzero) if nonzero.size else None,
    }


def histogram(x: torch.Tensor) -> dict[int, int]:
    """Elements per binade of the finite non-zero values."""
    v = x.detach().float().reshape(-1).tolist()
    found: dict[int, int] = {}
    for value in v:
        if math.isfinite(value) and value:
            exponent = math.frexp(value)[1] - 1
            found[exponent] = found.get(exponent, 0) + 1
    return found


def cast(x: torch.Tensor, fmt: str, scale: float) -> dict[str, Any]:
    """Figures of a cast under one scale, the product in float32."""
    with np.errstate(all="ignore"):
        v = x.detach().float().reshape(-1).numpy()
        v = v[np.isfinite(v)]
        product = v * np.float32(scale)
        q = rounded(product, fmt)
        y, v64 = q / np.float64(np.float32(scale)), v.astype(np.float64)
    x2, y2, d2 = math.fsum(v64**2), math.fsum(y**2), math.fsum((y - v64) ** 2)
    normal = FORMATS[fmt].smallest_normal
    rel = math.sqrt(d2 / x2) if x2 else None
    return {
        "underflow": int(((v != 0) & (q == 0)).sum()),
        "saturated": int(saturates(product, fmt).sum()),
        "at_max": int((np.abs(q) == largest(fmt)).sum()),
        "subnormal": int(((q != 0) & (np.abs(q) < normal)).sum()),
        "mse": d2 / v.size if v.size else None,
        "rel_l2": rel,
        "sqnr_db": -20 * math.log10(rel) if rel else None,
        "cosine": math.fsum(v64 * y) / math.sqrt(x2) / math.sqrt(y2) if x2 and y2 else None,
        "norm_ratio": math.sqrt(y2 / x2) if x2 else None,
        "bias": math.fsum(y - v64) / v.size / math.sqrt(x2 / v.size) if x2 else None,
    }
