"""Formats against ml_dtypes, exhaustively, and against their published constants."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from fp8dbg.errors import UnknownNameError
from fp8dbg.numerics.formats import FORMATS, Format, format_named, gemm_noise, round_torch
from tests import slow

TENSOR_FORMATS = [f for f in FORMATS.values() if f.signed]
every_tensor_format = pytest.mark.parametrize("fmt", TENSOR_FORMATS, ids=lambda f: f.name)
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)


def decoded(fmt: Format) -> npt.NDArray[np.float64]:
    """All finite values that another library decodes from all bit patterns, ascending."""
    if fmt.name == "int8":
        return np.arange(-127.0, 128.0)
    dtype = np.dtype(ml_dtypes.float8_e8m0fnu if fmt.name == "e8m0" else slow.DTYPES[fmt.name])
    patterns = np.arange(16 if fmt.name == "e2m1" else 256**dtype.itemsize)
    with np.errstate(invalid="ignore"):
        values = patterns.astype(f"u{dtype.itemsize}").view(dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def dense_values(fmt: Format) -> npt.NDArray[np.float32]:
    """All bfloat16 and float16 values; every code, every tie between codes, and float32's neighbours of all these."""
    with np.errstate(all="ignore"):
        codes = fmt.codes().astype(np.float32)
        ties = ((fmt.codes()[:-1] + fmt.codes()[1:]) / 2).astype(np.float32)
        edges = np.concatenate([codes, ties, np.array([fmt.boundary, -fmt.boundary], np.float32)])
        around = [np.nextafter(edges, np.float32(s)) for s in (-np.inf, np.inf)]
        patterns = np.arange(65536, dtype=np.uint16)
        halves = [patterns.view(ml_dtypes.bfloat16).astype(np.float32), patterns.view(np.float16).astype(np.float32)]
        return np.concatenate([edges, *around, *halves])


@every_format
def test_codes_are_those_of_ml_dtypes(fmt: Format) -> None:
    """Every finite value of the format, no other, in ascending order."""
    assert np.array_equal(fmt.codes(), decoded(fmt))


@every_tensor_format
def test_rounding_is_that_of_ml_dtypes(fmt: Format) -> None:
    """All 16-bit values, all codes, all ties and their neighbours round as in ml_dtypes with explicit saturation."""
    x = dense_values(fmt)
    x = x[~np.isnan(x)]
    assert np.array_equal(fmt.round(x), slow.rounded(x, fmt.name))


def test_e8m0_rounds_to_the_nearest_power_of_two() -> None:
    """As ml_dtypes from 2^-126 up; saturating above, NaN for zero and negative values.

    Below, ml_dtypes rounds everything above 2^-127 up to 2^-126, be it nearer or not.
    """
    fmt, x = FORMATS["e8m0"], dense_values(FORMATS["e8m0"])
    inside = x[(x >= 2.0**-126) & (x < fmt.boundary)]
    assert np.array_equal(fmt.round(inside), inside.astype(ml_dtypes.float8_e8m0fnu).astype(np.float64))
    assert fmt.round([2.0**127 * 1.9, np.inf, 1e-45]).tolist() == [2.0**127, 2.0**127, 2.0**-127]
    assert fmt.round([1.49 * 2.0**-127, 1.5 * 2.0**-127]).tolist() == [2.0**-127, 2.0**-126]
    assert np.isnan(fmt.round([0.0, -1.0, np.nan])).all()


@every_format
def test_torch_twin_rounds_identically(fmt: Format) -> None:
    """The torch version gives the same values, NaN and infinities included."""
    x = dense_values(fmt)
    twin = round_torch(fmt, torch.from_numpy(x))
    assert twin.dtype is torch.float32
    assert np.array_equal(twin.double().numpy(), fmt.round(x), equal_nan=True)


@every_tensor_format
def test_rounding_a_code_changes_nothing(fmt: Format) -> None:
    """Rounding is idempotent."""
    assert np.array_equal(fmt.round(fmt.codes()), fmt.codes())


@every_tensor_format
def test_saturation_starts_at_the_rounding_boundary(fmt: Format) -> None:
    """A value saturates where rounding with steps that go on would end above the maximum; not a bit earlier."""
    x = dense_values(fmt)
    x = x[~np.isnan(x)]
    assert np.array_equal(fmt.saturates(x), slow.saturates(x, fmt.name))


def test_non_finite_values() -> None:
    """NaN stays NaN and never saturates; infinities become the maximum and do; a zero keeps its sign."""
    fmt = FORMATS["e4m3"]
    y = fmt.round([np.nan, np.inf, -np.inf, -0.0])
    assert math.isnan(y[0])
    assert y[1:3].tolist() == [448.0, -448.0]
    assert np.signbit(y[3])
    assert fmt.saturates([np.nan, np.inf, -np.inf]).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("name", "largest", "normal", "subnormal", "boundary", "tie_saturates"),
    [
        ("e4m3", 448, 2**-6, 2**-9, 464, False),
        ("e5m2", 57344, 2**-14, 2**-16, 61440, True),
        ("e4m3fnuz", 240, 2**-7, 2**-10, 248, True),
        ("e5m2fnuz", 57344, 2**-15, 2**-17, 61440, True),
        ("e2m1", 6, 1, 0.5, 7, True),
        ("fp16", 65504, 2**-14, 2**-24, 65520, True),
        ("int8", 127, 1, 1, 127.5, True),
    ],
)
def test_published_constants(
    name: str, largest: float, normal: float, subnormal: float, boundary: float, tie_saturates: bool
) -> None:
    """Maxima, smallest values and boundaries as the formats' specifications give them."""
    f = format_named(name)
    assert (f.max, f.smallest_normal, f.smallest_subnormal) == (largest, normal, subnormal)
    assert (f.boundary, f.boundary_saturates) == (boundary, tie_saturates)


@every_tensor_format
def test_noise_floor_is_what_gaussian_data_gives(fmt: Format) -> None:
    """Within 3 % of the error measured on a million normal values under current scaling (BF16 and FP16 unscaled)."""
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).numpy()
    scale: Any = np.float32(1.0 if fmt.name in ("bf16", "fp16") else fmt.max / np.abs(x).max())
    if fmt.name == "e2m1":
        blocks = x.reshape(-1, 16)
        scale = np.float32(6.0) / np.abs(blocks).max(axis=1, keepdims=True)
        scale = 1 / FORMATS["e4m3"].round(1 / scale).clip(2**-9)
        x = blocks
    x, y = x.astype(np.float64), fmt.round((x * scale).astype(np.float32)) / scale
    assert fmt.noise is not None
    rel_l2 = float(np.linalg.norm(y - x) / np.linalg.norm(x))
    assert fmt.noise.rel_l2 == pytest.approx(rel_l2, rel=0.03)
    assert fmt.noise.sqnr_db == pytest.approx(-20 * math.log10(rel_l2), abs=0.3)
    cosine = float((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y))
    assert 1 - fmt.noise.cosine == pytest.approx(1 - cosine, rel=0.06)  # the square of a rel_l2 within 3 %


@pytest.mark.parametrize(
    ("a", "b", "rel_l2"), [("bf16", "bf16", 0.0024), ("e4m3", "e4m3", 0.0375), ("e5m2", "e4m3", 0.0590)]
)
def test_gemm_noise_floor(a: str, b: str, rel_l2: float) -> None:
    """The healthy GEMM errors of the metrics' table follow from the formats' own."""
    noise = gemm_noise(FORMATS[a], FORMATS[b])
    assert noise is not None
    assert noise.rel_l2 == pytest.approx(rel_l2, rel=0.03)


def test_scale_format_has_no_noise_floor() -> None:
    """E8M0 holds scales: there is no healthy error of a tensor in it, alone or in a GEMM."""
    assert FORMATS["e8m0"].noise is None
    assert gemm_noise(FORMATS["e8m0"], FORMATS["e4m3"]) is None


def test_unknown_format_lists_the_valid_ones() -> None:
    """The error names what was asked for and what there is."""
    with pytest.raises(UnknownNameError, match=r"No format is called 'e3m4'\. Valid names: .*e4m3.*e5m2"):
        format_named("e3m4")


def test_formats_need_no_torch() -> None:
    """Reading a run's figures imports the formats, and must not wait for torch."""
    code = "import sys, fp8dbg.numerics.recipes, fp8dbg.numerics.formats as f; f.FORMATS['e4m3'].round([1.1]); "
    code += "raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
