"""Bounds from binades: they hold the exact figures of every tensor that has the histogram."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8dbg.numerics.bounds import Binades, cast_bounds, finer_bounds
from fp8dbg.numerics.census import census
from fp8dbg.numerics.formats import format_named
from fp8dbg.numerics.measurement import measure


def spread(seed: int, sigma: float, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Log-normal values of either sign, some zeros."""
    random = torch.Generator().manual_seed(seed)
    values = torch.exp(torch.randn(size, generator=random) * sigma) * torch.randn(size, generator=random)
    values[::7] = 0.0
    return values.to(dtype)


def binades(tensor: torch.Tensor) -> Binades:
    """What a row of ``tensors`` keeps of it."""
    found = census(tensor)
    return Binades(*found.histogram(), found.amin, found.amax, found.dtype)


@given(
    seed=st.integers(0, 1 << 16),
    sigma=st.floats(0.0, 6.0),
    exponent=st.floats(-30.0, 30.0),
    fmt=st.sampled_from(["e4m3", "e5m2", "e2m1", "int8", "bf16"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
@settings(max_examples=60, deadline=None)
def test_per_tensor_bounds_enclose(seed: int, sigma: float, exponent: float, fmt: str, dtype: torch.dtype) -> None:
    """Underflow, saturation and error of the real tensor lie between the bounds, at any scale."""
    tensor, scale = spread(seed, sigma, 300, dtype), float(np.float32(2.0**exponent))
    found, real = cast_bounds(binades(tensor), format_named(fmt), scale), census(tensor).quantised(fmt, scale)
    assert found is not None
    assert found.underflow[0] <= real.underflow <= found.underflow[1]
    assert found.saturated[0] <= real.saturated <= found.saturated[1]
    if real.mse is not None:
        finite = tensor.numel() - int((~tensor.isfinite()).sum())
        assert found.d2[0] <= real.mse * finite <= found.d2[1]


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8:rounding=floor", "block", "rowwise"])
@pytest.mark.parametrize("sigma", [0.0, 2.0, 5.0])
def test_finer_bounds_enclose(recipe: str, sigma: float) -> None:
    """A scale per block or row: it flushes no more than one scale for all does, and clips only where it may."""
    from fp8dbg.numerics.recipes import recipe_named

    tensor = spread(3, sigma, 64 * 256, torch.bfloat16).reshape(64, 256)
    real, chosen = measure(tensor, recipe=recipe, role="input"), recipe_named(recipe)
    scale = chosen.current_scale(float(tensor.abs().max()), "input")
    found = finer_bounds(binades(tensor), chosen.format("input"), scale, clips="floor" in recipe)
    assert found is not None
    assert real.underflow is not None
    assert real.saturated is not None
    assert real.mse is not None
    assert found.underflow[0] <= real.underflow <= found.underflow[1]
    assert found.saturated[0] <= real.saturated <= found.saturated[1]
    assert found.d2[0] <= real.mse * tensor.numel() <= found.d2[1]


def test_binades_that_fall_on_one_side_are_exact() -> None:
    """E4M3, scale 1: what lies wholly below 2^-10 is flushed, what lies wholly above 512 is clipped."""
    found = cast_bounds(Binades(-12, [5, 0, 0, 3] + [0] * 18 + [2]), format_named("e4m3"), 1.0)
    assert found is not None
    assert found.underflow == (5.0, 5.0)
    assert found.saturated == (2.0, 2.0)


def test_one_element_that_is_known_narrows_the_bounds() -> None:
    """amax 500 clips for sure, although its binade reaches down to 256."""
    found = cast_bounds(Binades(8, [10], amax=500.0), format_named("e4m3"), 1.0)
    assert found is not None
    assert found.saturated == (1.0, 10.0)


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_a_scale_that_is_none_gives_no_bounds(scale: float) -> None:
    """Nothing is invented."""
    assert cast_bounds(Binades(0, [1]), format_named("e4m3"), scale) is None
