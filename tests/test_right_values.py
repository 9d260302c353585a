"""The right values of the metrics' definition, for one tensor: each test is a row of its table, by number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fp8dbg.numerics.census import amax_of, census
from fp8dbg.numerics.formats import FORMATS
from fp8dbg.numerics.gemm import gemm_figures, quantise
from fp8dbg.numerics.measurement import Measurement, measure
from fp8dbg.numerics.recipes import DelayedState, recipe_named
from fp8dbg.numerics.scales import e8m0_exponent, e8m0_reciprocal

E4M3, E5M2 = FORMATS["e4m3"], FORMATS["e5m2"]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def underflow(m: Measurement) -> float:
    """Share of the non-zero finite elements that the cast turns into zero."""
    assert m.underflow is not None
    return m.underflow / (m.numel - m.zeros - m.nan - m.inf)


def saturated(m: Measurement) -> float:
    assert m.saturated is not None
    return m.saturated / m.numel


def test_1_e4m3_saturates_beyond_464() -> None:
    """447 to 464 round to 448 and are not saturated; 464.01 and 1000 are; Inf and NaN are counted as such."""
    x = torch.tensor([447, 448, 463.99, 464, 464.01, 1000, math.inf, math.nan])
    assert E4M3.round(x.numpy())[:4].tolist() == [448.0] * 4
    m = measure(x, scale=1.0)
    assert (m.saturated, m.at_max, m.inf, m.nan) == (2, 6, 1, 1)
    assert [measure(v, scale=1.0).saturated for v in x[:6]] == [0, 0, 0, 0, 1, 1]


def test_2_ties_at_both_ends() -> None:
    """Half of E4M3's smallest value is a tie that underflows; E5M2's 61440 is a tie that saturates."""
    assert E4M3.round([0.0015, 2.0**-10, 2.0**-10 * 1.001]).tolist() == [2.0**-9, 0.0, 2.0**-9]
    assert measure(torch.tensor([0.0015, 2.0**-10, 2.0**-10 * 1.001]), scale=1.0).underflow == 1
    assert E5M2.round([58000.0, 61439.9]).tolist() == [57344.0, 57344.0]
    x = torch.tensor([58000.0, 61439.9, 61440.0])
    assert [measure(v, "e5m2", scale=1.0).saturated for v in x] == [0, 0, 1]


def test_3_a_scale_left_over() -> None:
    """Scale 448 from amax 1 on a tensor that has grown to 8: the peak is clipped, by 3 octaves."""
    x = torch.tensor([8.0, 1.0, 0.5])
    assert (E4M3.round(x.numpy() * 448.0) / 448.0).tolist() == [1.0, 1.0, 0.5]
    m = measure(x, scale=448.0)
    assert (m.saturated, m.scale_delta, m.scale_source) == (1, 3.0, "live")
    assert m.mse == pytest.approx(49 / 3)


def test_4_one_outlier_drowns_the_small() -> None:
    """5000 among values in [-1, 1]: one step is 11.16 / 512, and 0.01 is lost."""
    x = torch.tensor([5000.0, 1.0, -0.5, 0.01])
    m = measure(x)
    assert m.scale is not None
    assert 1 / m.scale == pytest.approx(11.16, abs=0.005)
    assert E4M3.round(0.01 * m.scale) == 0.0
    assert m.underflow == 1


def test_5_delayed_scaling_over_a_window_of_4() -> None:
    """An Inf freezes the scale while it is in the window; a spike holds it down for as long."""
    recipe = recipe_named("delayed", history=4)
    frozen, held = DelayedState(recipe, "input"), DelayedState(recipe, "input")
    got = [frozen.update(a) for a in (1, 2, math.inf, 1, 1, 1, 1, 1)]
    assert got == [448.0, 224.0, 224.0, 224.0, 224.0, 224.0, 448.0, 448.0]
    low = float(np.float32(4.48))
    assert [held.update(a) for a in (1, 100, 1, 1, 1, 1, 1)] == [448.0, low, low, low, low, 448.0, 448.0]


def test_6_amax_grows_tenfold_between_steps() -> None:
    """What saturates is what lies beyond 464/448 of the old amax; scale_delta is log2(10)."""
    x = normal(256, 1024)
    state = DelayedState(recipe_named("delayed"), "input")
    scale = state.update(float(amax_of(x)))
    m = measure(10 * x, recipe="delayed", scale=scale)
    share = ((10 * x).abs() > 464 / 448 * x.abs().max()).double().mean().item()
    assert saturated(m) == pytest.approx(share, abs=2e-6)
    assert share > 0.5
    assert m.scale_delta == pytest.approx(math.log2(10), abs=1e-6)


@pytest.mark.parametrize(("factor", "per_tensor"), [(100, 0.026), (1e4, 0.049), (3e4, 0.141)])
def test_7_outlier_channels_cost_the_other_channels(factor: float, per_tensor: float) -> None:
    """Four channels of 1024 scaled up: error of columns 128 and up, per tensor against 1x128 blocks.

    The peak of the four, which the error of the others follows, is set to 3.75 standard deviations.
    """
    x = normal(256, 1024)
    x[0, 0] = 3.75
    x[:, :4] *= factor
    scale = measure(x).scale
    rest = x[:, 128:]
    assert measure(rest, scale=scale).rel_l2 == pytest.approx(per_tensor, rel=0.03)
    assert measure(rest, recipe="block").rel_l2 == pytest.approx(0.026, rel=0.03)


def test_8_mxfp8_rounding_modes() -> None:
    """amax 957 becomes 896 under floor (clipped), 960 under round-up; for amax 150 the biased exponents differ."""
    x = torch.full((1, 32), 957.0)
    assert (quantise(x, recipe_named("mxfp8", rounding="floor"), "input", "fprop") == 896.0).all()
    assert (quantise(x, recipe_named("mxfp8"), "input", "fprop") == 960.0).all()
    assert measure(x, recipe="mxfp8:rounding=floor").saturated == 32
    assert measure(x, recipe="mxfp8").saturated == 0
    assert [int(e8m0_exponent(150.0, E4M3, mode)) for mode in ("up", "ceil")] == [126, 127]
    assert e8m0_reciprocal(np.array([126, 127], np.uint8)).tolist() == [2.0, 1.0]


def test_9_microbatches_combine() -> None:
    """amax is the largest of the four; underflow the sum of counts over the sum of sizes."""
    parts = [a * normal(64, 64, seed=i).clamp(-1, 1).bfloat16() for i, a in enumerate((12, 3, 1.5, 0.75))]
    total = census(parts[0])
    for part in parts[1:]:
        total = total + census(part)
    assert total.amax == 12.0
    alone = [census(p).quantised("e4m3", 2.0**-4).underflow for p in parts]
    assert alone[3] > alone[0]
    assert total.quantised("e4m3", 2.0**-4).underflow == sum(alone)
    assert total.numel == 4 * 64 * 64


def test_10_wide_gradients_in_e4m3() -> None:
    """Log-normal rows (sigma 3): half underflows in E4M3, next to nothing in E5M2, and no error figure shows it."""
    spread = torch.special.ndtri((torch.arange(8192) + 0.5) / 8192)  # the quantiles of a normal distribution
    x = (normal(8192, 256) * torch.exp(3 * spread)[:, None]).bfloat16()
    m = measure(x)
    assert underflow(m) == pytest.approx(0.538, rel=0.02)
    assert underflow(measure(x, "e5m2")) == pytest.approx(0.0024, rel=0.05)
    assert m.rel_l2 == pytest.approx(0.0245, rel=0.03)
    assert m.cosine == pytest.approx(0.9997, abs=5e-5)


def test_11_aligned_swiglu_channel() -> None:
    """One channel of gate and up grows together: amax grows with the square, 43 % underflows, rel_l2 improves."""
    torch.manual_seed(0)
    x, gate, up = torch.randn(2048, 256), torch.randn(512, 256) / 16, torch.randn(512, 256) / 16
    found = []
    for growth in (1, 4, 16, 64):
        up[0] = gate[0] / gate[0].norm() * growth
        gate[0] = up[0]
        found.append(measure((torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())).bfloat16()))
    peaks = [m.amax or 0.0 for m in found]
    assert [peaks[i + 1] / peaks[i] for i in (1, 2)] == pytest.approx([16, 16], rel=0.05)
    assert underflow(found[0]) == pytest.approx(0.0005, abs=0.0002)
    assert underflow(found[3]) == pytest.approx(0.43, abs=0.03)
    assert (found[3].rel_l2 or 1) < (found[0].rel_l2 or 0)


@pytest.mark.parametrize(("gain", "norm_ratio"), [(2.0, 2.0), (1 / 4000, 2.5e-4)])
def test_12_gain_errors_show_in_the_norm_alone(gain: float, norm_ratio: float) -> None:
    """A scale and its inverse that disagree: norm_ratio says by how much, at a healthy cosine."""
    x = normal(256, 256)
    y = quantise(x, recipe_named("current"), "input", "fprop")
    figures = gemm_figures(x, y * gain, y, y)
    assert figures.norm_ratio == pytest.approx(norm_ratio, rel=1e-3)
    assert figures.cosine == pytest.approx(0.9997, abs=1e-4)


def test_12_outlier_hides_the_loss_of_everything_under_it() -> None:
    """One element of 1e6 among a million of size 1: cosine 1.0000 with 97 % underflow."""
    x = normal(1024, 1024).bfloat16()
    x[0, 0] = 1e6
    m = measure(x)
    assert m.cosine == pytest.approx(1.0, abs=5e-5)
    assert underflow(m) == pytest.approx(0.97, abs=0.005)


def test_12_nan_row_is_counted_and_left_out() -> None:
    """One row of 256: cosine 0.9997 of the rest, nan ratio 0.0039."""
    x = normal(256, 1024).bfloat16()
    x[17] = math.nan
    m = measure(x)
    assert m.cosine == pytest.approx(0.9997, abs=1e-4)
    assert m.nan / m.numel == pytest.approx(0.0039, abs=1e-4)


def test_13_gradient_scale_stuck_at_one() -> None:
    """E5M2 under scale 1: std 1e-5 loses 55.4 %, std 1e-6 everything, and upstream of that all is zero."""
    x = normal(1024, 1024)
    assert underflow(measure(x * 1e-5, "e5m2", scale=1.0)) == pytest.approx(0.554, abs=0.002)
    lost = measure(x * 1e-6, "e5m2", scale=1.0)
    assert (underflow(lost), lost.cosine, lost.rel_l2, lost.norm_ratio) == (1.0, None, 1.0, 0.0)
    upstream = measure(torch.zeros(8, 8), "e5m2", scale=1.0)
    assert (upstream.zeros, upstream.underflow, upstream.amax, upstream.rel_l2) == (64, 0, None, None)


@pytest.mark.parametrize("recipe", ["rowwise", "block", "mxfp8", "nvfp4"])
def test_15_zero_rows_under_fine_scales(recipe: str) -> None:
    """Zeros stay zeros: no NaN, nothing saturated."""
    x = normal(256, 256).bfloat16()
    x[::2] = 0.0
    y = quantise(x, recipe_named(recipe), "input", "fprop")
    assert (y[::2] == 0).all()
    assert y.isfinite().all()
    m = measure(x, recipe=recipe)
    assert (m.zeros, m.saturated, m.nan) == (128 * 256, 0, 0)
    assert m.rel_l2 is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_16_a_scale_that_would_be_infinite(dtype: torch.dtype) -> None:
    """amax 1e-36: the scale is FLT_MAX, zero stays zero, and every figure exists."""
    m = measure(torch.tensor([1e-36, 0.0, -1e-36], dtype=dtype))
    assert m.scale == torch.finfo(torch.float32).max
    assert (m.zeros, m.underflow, m.saturated) == (1, 0, 0)
    assert m.norm_ratio == pytest.approx(1.0, abs=0.05)
    assert E4M3.round(0.0 * m.scale) == 0.0


def test_17_blocks_do_not_straddle_rows() -> None:
    """Rows of 48 in blocks of 32: the huge end of one row leaves the tiny start of the next alone."""
    x = torch.full((2, 48), 2.0**-20)
    x[0, 32:] = 2.0**20
    m = measure(x, recipe="mxfp8")
    assert (m.underflow, m.saturated, m.rel_l2) == (0, 0, 0.0)
    assert (m.scale_min, m.scale_max) == (2.0**-12, 2.0**28)


def test_18_shards_of_two_ranks() -> None:
    """Merged amax, underflow, rms, kurtosis equal those of the whole exactly; the mean of per-rank ones does not."""
    x = (normal(64, 1024) * torch.linspace(0.1, 10, 64)[:, None]).bfloat16()
    shards, whole = [census(part) for part in x.chunk(2)], census(x)
    merged = shards[0] + shards[1]
    for name in ("amax", "mean", "rms", "kurtosis", "peak_to_median"):
        assert getattr(merged, name) == getattr(whole, name)
    assert merged.quantised("e4m3", 7.0) == whole.quantised("e4m3", 7.0)
    assert (shards[0].kurtosis or 0) + (shards[1].kurtosis or 0) != pytest.approx(2 * (whole.kurtosis or 0), rel=0.01)


@pytest.mark.parametrize(
    ("fmt", "recipe", "rel_l2", "sqnr_db", "cosine"),
    [
        ("bf16", "unscaled", 0.0017, 55.6, 0.999999),
        ("e4m3", "current", 0.0265, 31.6, 0.99965),
        ("e4m3", "mxfp8", 0.0265, 31.6, 0.99965),
        ("e5m2", "current", 0.0526, 25.6, 0.99862),
        ("e2m1", "nvfp4", 0.095, 20.4, 0.9955),
    ],
)
def test_healthy_values(fmt: str, recipe: str, rel_l2: float, sqnr_db: float, cosine: float) -> None:
    """Gaussian data: within 3 % of the table, in the error, its decibels and what the cosine lacks of 1."""
    m = measure(normal(1024, 1024), fmt, recipe)
    noise = FORMATS[fmt].noise
    assert noise is not None
    assert m.rel_l2 == pytest.approx(rel_l2, rel=0.03)
    assert m.rel_l2 == pytest.approx(noise.rel_l2, rel=0.03)
    assert m.sqnr_db == pytest.approx(sqnr_db, abs=0.26)  # 3 % of the error
    assert m.cosine == pytest.approx(cosine, abs=0.06 * (1 - cosine) + 5e-6)  # its square, and the table's digits
