"""The census against a slow float64 oracle, for every dtype, layout, format and scale."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from fp8dbg.errors import UsageError
from fp8dbg.numerics.census import Amax, Stream, amax_of, census
from fp8dbg.numerics.census import _amax_by_torch as amax_by_torch
from tests import slow
from tests.tensors import STATISTICS, assert_same, formats, scales, statistics, tensors


@settings(deadline=None)  # the first example compiles
@given(tensors())
def test_statistics_equal_the_oracle(x: torch.Tensor) -> None:
    """Counts, extremes, moments, median: any bits, dtype and layout."""
    wanted = slow.statistics(x)
    assert_same(statistics(census(x)), wanted, wanted["rms"])


@settings(deadline=None)  # the first example compiles
@given(tensors())
def test_histogram_equals_the_oracle(x: torch.Tensor) -> None:
    """Elements per binade, from the first occupied one to the last."""
    exponent, counts = census(x).histogram()
    assert {exponent + i: n for i, n in enumerate(counts) if n} == slow.histogram(x)
    assert not counts or (counts[0] and counts[-1])


@settings(max_examples=300, deadline=None)
@given(tensors(), formats, scales)
@example(torch.tensor([1.0, 2.0]).bfloat16(), "e4m3", 464.0)
def test_cast_figures_equal_the_oracle(x: torch.Tensor, fmt: str, scale: float) -> None:
    """Every count and error of a cast under any scale into any format."""
    wanted = slow.cast(x, fmt, scale)
    assert_same(asdict(census(x).quantised(fmt, scale)), wanted, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_tensor_equals_the_oracle(dtype: torch.dtype) -> None:
    """Sizes that are shared out over threads, with ends that fill no machine word."""
    x = (torch.randn(3_000_003, generator=torch.Generator().manual_seed(1)) ** 3).to(dtype)[1:]
    x[::1001], x[::5003], x[7] = 0.0, math.nan, math.inf
    c, wanted = census(x), slow.statistics(x)
    assert_same(statistics(c), wanted, wanted["rms"])
    assert_same(asdict(c.quantised("e4m3", 3.0)), slow.cast(x, "e4m3", 3.0), None)
    found, clean = amax_of(x), torch.nan_to_num(x, 0.0, 0.0, 0.0)
    assert (found.amax, found.nan, found.inf) == (wanted["amax"], wanted["nan"], wanted["inf"])
    assert amax_of(clean).amax == clean.abs().max().item()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_repeated_values_are_counted_right(share: float) -> None:
    """Tensors with any share of zeros, which are counted another way where neighbours are often equal."""
    x = torch.randn(100_001, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[torch.rand(100_001, generator=torch.Generator().manual_seed(4)) < share] = 0.0
    codes, counts = np.unique(x.view(torch.int16).numpy().view(np.uint16), return_counts=True)
    found = census(x).codes()
    assert found is not None
    assert np.array_equal(found[0], codes)
    assert np.array_equal(found[1], counts)


@pytest.mark.parametrize(("scale", "underflow", "saturated"), [(0.0, 3, 0), (math.inf, 0, 3), (math.nan, 0, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_impossible_scales(scale: float, underflow: int, saturated: int, dtype: torch.dtype) -> None:
    """0, Inf and NaN give the counts their products have, and no error figure."""
    figures = census(torch.tensor([1.0, -2.0, 3.0, 0.0, math.nan], dtype=dtype)).quantised("e4m3", scale)
    assert (figures.underflow, figures.saturated, figures.at_max) == (underflow, saturated, saturated)
    assert figures.mse is figures.rel_l2 is figures.sqnr_db is figures.cosine is figures.norm_ratio is figures.bias
    assert figures.mse is None


def test_sign_of_a_scale_does_not_matter() -> None:
    """Formats are symmetric, so y is the same."""
    c = census(torch.randn(100).bfloat16())
    assert c.quantised("e4m3", -50.0) == c.quantised("e4m3", 50.0)


def test_scale_beyond_float32() -> None:
    """A Python float that float32 cannot hold is an infinite scale, not an exception."""
    assert census(torch.ones(2).bfloat16()).quantised("e4m3", 1e39).saturated == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nothing_to_take_a_figure_over(dtype: torch.dtype) -> None:
    """Empty: counts 0 and no figure. All NaN: the same, and counted. All zero: mean, rms and mse are 0, ratios None."""
    for x in (torch.empty(0, 4, dtype=dtype), torch.full((3,), math.nan, dtype=dtype)):
        c = census(x)
        assert [getattr(c, n) for n in STATISTICS[4:]] == [None] * 6
        assert list(asdict(c.quantised("e4m3", 1.0)).values()) == [0] * 4 + [None] * 6
    c = census(torch.zeros(3, dtype=dtype))
    assert (c.amax, c.mean, c.rms, c.kurtosis) == (None, 0.0, 0.0, None)
    assert list(asdict(c.quantised("e4m3", 1.0)).values()) == [0, 0, 0, 0, 0.0, None, None, None, None, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kurtosis_of_equal_elements_does_not_exist(dtype: torch.dtype) -> None:
    """No variance, no kurtosis, even where the mean of a million equal values is not exactly theirs."""
    assert census(torch.full((1_000_001,), 0.1, dtype=dtype)).kurtosis is None
    assert census(torch.tensor([0.1, -0.1], dtype=dtype)).kurtosis == 1.0


def test_kurtosis_with_a_large_mean() -> None:
    """A normal spread of 0.01 around 10: central moments, so nothing cancels."""
    x = 10 + 0.01 * torch.randn(400_000, generator=torch.Generator().manual_seed(5))
    assert census(x).kurtosis == pytest.approx(3.0, abs=0.05)


def test_other_floating_dtypes_are_taken_as_float32() -> None:
    """float64, and float8 whose code 0xff would be lost in bfloat16."""
    assert census(torch.tensor([1.0, 1e-300, math.nan], dtype=torch.float64)).zeros == 1
    every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    c = census(every)
    assert (c.dtype, c.nan, c.zeros, c.amax, c.amin) == ("float32", 2, 2, 448.0, 2.0**-9)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "not list"),
        (torch.ones(2, dtype=torch.int32), "int32 tensor cannot be measured"),
        (torch.ones(2, dtype=torch.complex64), "complex64 tensor cannot be measured"),
        (torch.ones(2, device="meta"), "meta tensor cannot be measured"),
    ],
)
def test_what_cannot_be_measured(value: Any, message: str) -> None:
    """One sentence says what was given."""
    for look in (census, amax_of):
        with pytest.raises(UsageError, match=message):
            look(value)


def test_scale_formats_hold_no_tensors() -> None:
    """E8M0 has no zero."""
    with pytest.raises(UsageError, match="e8m0 holds scales"):
        census(torch.ones(2)).quantised("e8m0", 1.0)


@settings(deadline=None)  # the first example compiles
@given(tensors())
def test_amax_equals_the_oracle(x: torch.Tensor) -> None:
    """Largest finite value, NaN and Inf counts; 0 for zeros, None for nothing finite; on a device the same."""
    wanted = slow.statistics(x)
    amax = None if wanted["numel"] == wanted["nan"] + wanted["inf"] else wanted["amax"] or 0.0
    flat = x.detach().reshape(-1)
    for found in (amax_of(x), Amax((0.0, 0, 0), x.numel(), amax_by_torch(flat, 1))):
        assert (found.amax, found.nan, found.inf) == (amax, wanted["nan"], wanted["inf"])
        assert float(found) == (math.inf if wanted["inf"] else amax or 0.0)


def test_stream_is_the_twin_of_a_census() -> None:
    """The same bfloat16 values, counted by code and streamed as float32, give the same figures."""
    x = torch.randn(70_000, generator=torch.Generator().manual_seed(6)).bfloat16()
    a, b = census(x), census(x.float())
    assert isinstance(b, Stream)
    assert_same(statistics(b), statistics(a), a.rms)
    assert a.histogram() == b.histogram()
    assert_same(asdict(b.quantised("e4m3", 99.0)), asdict(a.quantised("e4m3", 99.0)), None)
