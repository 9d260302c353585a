"""Tensors of every kind for property tests, and how figures of them are compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from fp8dbg.numerics.census import Census
from tests import slow

STATISTICS = ("numel", "zeros", "nan", "inf", "amax", "amin", "mean", "rms", "kurtosis", "peak_to_median")
EXACT = {"numel", "zeros", "nan", "inf", "amax", "amin", "underflow", "saturated", "at_max", "subnormal"}

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flat": lambda x: x,
    "scalar": lambda x: x[0],
    "empty": lambda x: x[:0].reshape(3, 0, 2),
    "offset": lambda x: x[1:],
    "every other": lambda x: x[::2],
    "transposed": lambda x: x[: x.numel() // 2 * 2].reshape(2, -1).t(),
    "columns": lambda x: x[: x.numel() // 3 * 3].reshape(-1, 3)[:, 1:],
    "permuted": lambda x: x[: x.numel() // 6 * 6].reshape(2, 3, -1).permute(2, 0, 1),
    "expanded": lambda x: x[:, None].expand(-1, 3),
    "expanded twice": lambda x: x[None, :, None].expand(2, -1, 5).transpose(0, 2),
    "overlapping": lambda x: x.unfold(0, 2, 1) if x.numel() > 1 else x,
    "parameter": lambda x: torch.nn.Parameter(x),
}

dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
layouts = st.sampled_from(sorted(LAYOUTS))
formats = st.sampled_from(sorted(slow.DTYPES))
scales = st.sampled_from([1.0, 448.0, 2.0**-9, 1e-30, 1e30]) | st.floats(2.0**-60, 2.0**60)


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Any bit patterns, or values of ordinary size, zeros of both signs, NaN and infinities, in any layout."""
    dtype = dtype or draw(dtypes)
    bits = 32 if dtype is torch.float32 else 16
    ordinary = torch.randn(64, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 2.0 ** draw(
        st.integers(-12, 12)
    )
    special = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 448.0, 464.0, 61440.0, 2.0**-10])
    pool = torch.cat([ordinary, special]).to(dtype)
    patterns = draw(st.lists(st.integers(0, 2**bits - 1), max_size=40))
    chosen = draw(st.lists(st.integers(0, pool.numel() - 1), min_size=1, max_size=80))
    unsigned = np.array(patterns, dtype=np.uint64).astype(f"u{bits // 8}")
    arbitrary = torch.from_numpy(unsigned.view(f"i{bits // 8}")).view(dtype)
    return LAYOUTS[draw(layouts)](torch.cat([arbitrary, pool[chosen]]))


def assert_same(got: dict[str, Any], wanted: dict[str, Any], rms: float | None) -> None:
    """Counts and extremes equal; None where None; the rest to 1e-10, means relative to the rms."""
    for name, value in wanted.items():
        if value is None or name in EXACT:
            assert got[name] == value, name
        else:
            slack = 1e-12 * (rms or 0.0) if name == "mean" else 1e-10 if name in ("bias", "sqnr_db") else 0.0
            assert got[name] == pytest.approx(value, rel=1e-10, abs=slack), name


def statistics(c: Census) -> dict[str, Any]:
    return {name: getattr(c, name) for name in STATISTICS}


def everything(c: Census) -> tuple[Any, ...]:
    """All figures, to be compared bit for bit."""
    cast = [asdict(c.quantised(fmt, scale)) for fmt in ("e4m3", "e5m2") for scale in (1.0, 37.3)]
    return statistics(c), c.histogram(), cast
