"""Shadow GEMMs on sampled rows, against whole GEMMs in float64 of values that other libraries have cast."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8dbg.errors import UnknownNameError
from fp8dbg.numerics.casting import OPERANDS, contraction_axis, tensor_scale
from fp8dbg.numerics.gemm import (
    Shadow,
    gemm_figures,
    quantise,
    sample_rows,
    shadow,
    shadow_gemm,
    uncancelled_error,
)
from fp8dbg.numerics.recipes import Recipe, recipe_named
from fp8dbg.runs.schema import GEMMS
from tests import slow_blocks

LABELS = ("delayed", "current", "tensorwise", "rowwise", "rowwise:power_of_2=false", "block", "mxfp8", "nvfp4")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def seen(x: Tensor, recipe: Recipe, role: str, gemm: str) -> Tensor:
    """What the GEMM sees of an operand, by the slow version; float64."""
    granularity = recipe.granularity(role, gemm)
    found = slow_blocks.cast(x, recipe, role, granularity, contraction_axis(role, gemm))["seen"]
    return torch.from_numpy(found).double()


def whole(gemm: str, a: Tensor, b: Tensor) -> Tensor:
    """All output rows, in float64: tokens for fprop and dgrad, input features for wgrad."""
    a, b = a.double(), b.double()
    return {"fprop": lambda: a @ b.t(), "dgrad": lambda: a @ b, "wgrad": lambda: b.t() @ a}[gemm]()


def operands(gemm: str, dtype: torch.dtype, tokens: int = 160, k: int = 96, n: int = 144) -> tuple[Tensor, Tensor]:
    """A GEMM's two operands, with a spread that makes the scales of their blocks differ."""
    shapes = {"input": (tokens, k), "weight": (n, k), "grad_output": (tokens, n)}
    made = []
    for seed, role in enumerate(OPERANDS[gemm]):
        rows, columns = shapes[role]
        spread = torch.exp(normal(rows, 1, seed=seed + 7) + normal(1, columns, seed=seed + 9))
        made.append((normal(rows, columns, seed=seed) * spread).to(dtype))
    return made[0], made[1]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("label", LABELS)
def test_shadow_is_the_whole_gemm_on_its_rows(label: str, gemm: str) -> None:
    """Exact rows, and what quantising either or both operands changes in them, from float32 and bfloat16 operands."""
    recipe, rows = recipe_named(label), torch.tensor([0, 3, 50, 95])
    first, second = OPERANDS[gemm]
    for dtype in (torch.float32, torch.bfloat16):
        a, b = operands(gemm, dtype)
        q_a, q_b = seen(a, recipe, first, gemm), seen(b, recipe, second, gemm)
        if gemm == "wgrad":
            scale = tensor_scale(b, recipe, second)
            found = shadow(gemm, a, b[:, rows], recipe, scale_b=scale)
        else:
            found = shadow(gemm, a, b, recipe, rows)
        exact = whole(gemm, a, b)[rows]
        assert error(found.exact, exact) < (2**-8 if dtype == torch.bfloat16 and gemm == "wgrad" else 1e-5)
        pairs = {"both": (q_a, q_b), "only_a": (q_a, b), "only_b": (a, q_b)}
        for name, pair in pairs.items():
            wanted = whole(gemm, *pair)[rows]
            change = getattr(found, name) - found.exact
            assert error(change, wanted - exact) < (1e-3 if dtype == torch.float32 else 0.01), name


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("label", LABELS)
def test_large_operands_are_taken_in_parts(label: str, gemm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output columns in parts of 128 give what all at once give: no scale follows from a part alone."""
    recipe, (a, b) = recipe_named(label), operands(gemm, torch.float32, tokens=140, k=300, n=290)
    b, scale_b = (b[:, :8], 2.0**-8) if gemm == "wgrad" else (b, None)
    at_once = shadow(gemm, a, b, recipe, scale_b=scale_b)
    monkeypatch.setattr("fp8dbg.numerics.gemm._PART", 1)
    for whole_rows, parts in zip(at_once, shadow(gemm, a, b, recipe, scale_b=scale_b), strict=True):
        torch.testing.assert_close(parts, whole_rows, rtol=1e-5, atol=1e-4 * whole_rows.abs().max().item())


def test_scales_in_force_are_used() -> None:
    """A scale four times too large for each operand: the rows are those of operands clipped by it."""
    recipe, (a, b) = recipe_named("delayed"), operands("dgrad", torch.float32)
    scales = [4 * tensor_scale(x, recipe, role) for x, role in ((a, "grad_output"), (b, "weight"))]
    found = shadow("dgrad", a, b, recipe, torch.arange(9), *scales)
    clipped = [
        quantise(x, recipe, role, "dgrad", s) for x, role, s in zip((a, b), OPERANDS["dgrad"], scales, strict=True)
    ]
    assert error(found.both, whole("dgrad", *clipped)[:9]) < 1e-5
    assert clipped[1].abs().max() == pytest.approx(b.abs().max().item() / 4, rel=0.07)


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("times", [1.0, 4.0, 64.0, 2.0**14, 2.0**30])
def test_what_little_the_casts_leave_is_measured_by_itself(times: float, dtype: torch.dtype, gemm: str) -> None:
    """Both operands clipped ever harder: rounding the exact product says nothing of what is left of it."""
    recipe, roles = recipe_named("delayed"), OPERANDS[gemm]
    a, b = operands(gemm, dtype)
    scales = [times * tensor_scale(x, recipe, role) for x, role in zip((a, b), roles, strict=True)]
    made = gemm_figures(*shadow(gemm, a, b, recipe, None, *scales))
    casts = [quantise(x, recipe, role, gemm, s) for x, role, s in zip((a, b), roles, scales, strict=True)]
    exact, left = whole(gemm, a, b), whole(gemm, *casts)
    size = float(exact.norm())
    assert made.norm_ratio == pytest.approx(float(left.norm()) / size, rel=4e-3)
    assert made.cosine == pytest.approx(float((exact * left).sum() / (exact.norm() * left.norm())), abs=4e-3)
    assert made.rel_l2 == pytest.approx(float((left - exact).norm()) / size, rel=1e-2)
    assert made.grad_alignment == pytest.approx(float((exact * left).sum() / exact.square().sum()), rel=1e-2)


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_the_casts_leave_nothing_there_is_no_direction(dtype: torch.dtype, gemm: str) -> None:
    """All of one operand flushed: cosine does not exist, the error is all of it."""
    a, b = operands(gemm, dtype)
    made = gemm_figures(*shadow(gemm, 2.0**-30 * a, b, recipe_named("unscaled")))
    assert (made.cosine, made.norm_ratio, made.grad_alignment) == (None, 0.0, 0.0)
    assert made.rel_l2 == pytest.approx(1.0, rel=1e-6)


def test_leading_axes_are_tokens() -> None:
    """[batch, time, features] counts as [batch * time, features]; without rows, all tokens are compared."""
    x, w = normal(2, 5, 32), normal(8, 32, seed=1)
    found = shadow("fprop", x, w, recipe_named("current"))
    assert found.exact.shape == (10, 8)
    assert error(found.exact, whole("fprop", x.view(10, 32), w)) < 1e-6


def test_quantise_gives_what_the_gemm_sees() -> None:
    """float32, in the operand's shape, equal to another library's cast."""
    x = normal(3, 7, 64).bfloat16()
    for label in LABELS:
        recipe = recipe_named(label)
        found = quantise(x, recipe, "input", "fprop")
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found.double().numpy(), seen(x, recipe, "input", "fprop").numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("gemm", "label", "rel_l2", "sqnr_db", "cosine"),
    [
        ("fprop", "delayed", 0.0375, 28.5, 0.99930),
        ("dgrad", "delayed", 0.0590, 24.6, 0.99826),
        ("wgrad", "delayed", 0.0590, 24.6, 0.99826),
        ("fprop", "mxfp8", 0.0375, 28.5, 0.99930),
        ("fprop", "block", 0.0375, 28.5, 0.99930),
        ("wgrad", "rowwise", 0.0375, 28.5, 0.99930),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_healthy_gemms(gemm: str, label: str, rel_l2: float, sqnr_db: float, cosine: float, dtype: torch.dtype) -> None:
    """Gaussian operands: within 3 % of the table, whether the tensors come in float32 or bfloat16."""
    shapes = {"input": (512, 512), "weight": (512, 512), "grad_output": (512, 512)}
    a, b = (normal(*shapes[role], seed=i).to(dtype) for i, role in enumerate(OPERANDS[gemm]))
    found = gemm_figures(*shadow(gemm, a, b, recipe_named(label)))
    assert found.rel_l2 == pytest.approx(rel_l2, rel=0.03)
    assert found.sqnr_db == pytest.approx(sqnr_db, abs=0.26)
    assert found.cosine is not None
    assert 1 - found.cosine == pytest.approx(1 - cosine, rel=0.06, abs=5e-6)


def test_healthy_bfloat16_gemm() -> None:
    """Two operands rounded to BF16 and multiplied exactly, against float64."""
    x, w = normal(512, 512), normal(512, 512, seed=1)
    found = gemm_figures(*shadow_gemm(x, w.t(), x.bfloat16(), w.bfloat16().t()))
    assert found.rel_l2 == pytest.approx(0.0024, rel=0.03)
    assert found.sqnr_db == pytest.approx(52.6, abs=0.26)


@pytest.mark.parametrize(("depth", "sqnr_db"), [(2, 25.5), (3, 23.8)])
def test_healthy_chains_of_gemms(depth: int, sqnr_db: float) -> None:
    """Each GEMM adds its own noise to what it is given."""
    recipe, x = recipe_named("current"), normal(512, 512)
    exact, emulated = x.double(), x
    for i in range(depth):
        w = normal(512, 512, seed=i + 1) / 512**0.5
        exact = exact @ w.double().t()
        emulated = quantise(emulated, recipe, "input", "fprop") @ quantise(w, recipe, "weight", "fprop").t()
    found = gemm_figures(exact.float(), emulated, emulated, emulated)
    assert found.sqnr_db == pytest.approx(sqnr_db, abs=0.26)


def test_blame_goes_to_the_operand_that_is_at_fault() -> None:
    """One outlier in the weight: its error alone explains nearly all of the GEMM's."""
    x, w = normal(128, 256), normal(64, 256, seed=1)
    w[0, 0] = 1e6
    found = gemm_figures(*shadow("fprop", x, w, recipe_named("current"), torch.arange(1, 128)))
    rest = gemm_figures(*Shadow(*(rows[:, 1:] for rows in shadow("fprop", x, w, recipe_named("current")))))
    assert rest.error_from_a == pytest.approx(0.0265, rel=0.05)
    assert rest.error_from_b == pytest.approx(0.97, abs=0.02)  # 97 % of the weight is gone
    assert found.rel_l2 is not None
    assert found.rel_l2 < 0.05  # the outlier's own row of the weight dominates the norm and hides the rest


def test_small_difference_of_large_terms_is_healthy() -> None:
    """Inputs of mean 10 that the weight cancels: rel_l2 0.4 with healthy casts, which the operands' size puts right."""
    x, w = 10 + normal(512, 512), normal(512, 512, seed=1)
    w = w - w.mean(dim=1, keepdim=True)
    found = gemm_figures(*shadow("fprop", x, w, recipe_named("current")))
    assert found.rel_l2 == pytest.approx(0.40, rel=0.15)
    assert found.mse is not None
    fair = uncancelled_error(found.mse, x.square().mean().sqrt().item(), w.square().mean().sqrt().item(), 512)
    assert fair == pytest.approx(0.0375, rel=0.15)
    plain = gemm_figures(*shadow("fprop", x - 10, w, recipe_named("current")))
    assert plain.mse is not None
    assert uncancelled_error(plain.mse, 1.0, 1.0, 512) == pytest.approx(plain.rel_l2, rel=0.02)
    assert uncancelled_error(0.0, 0.0, 1.0, 512) is None


def test_sampled_rows_are_a_fair_sample() -> None:
    """Ascending, distinct, each row equally often; all rows if there are no more; the global generator is untouched."""
    generator, counts = random.Random(3), torch.zeros(20)
    before = torch.get_rng_state()
    for _ in range(4000):
        rows = sample_rows(20, 5, generator)
        assert (rows.diff() > 0).all()
        counts[rows] += 1
    assert torch.equal(torch.get_rng_state(), before)
    assert counts.sum() == 20000
    chi_squared = ((counts - 1000) ** 2 / (1000 * 0.75)).sum() * 19 / 20
    assert chi_squared < 45  # p < 0.001 for 19 degrees of freedom
    assert sample_rows(4, 16, generator).tolist() == [0, 1, 2, 3]
    assert len(sample_rows(10**12, 16, generator)) == 16


def test_sampling_repeats_with_its_generator() -> None:
    """Same seed, same rows; another seed, other rows."""
    first, again, other = (sample_rows(2048, 16, random.Random(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("gemm", "a", "b", "made"),
    [
        ("fprop", (4, 8), (0, 8), (4, 0)),
        ("fprop", (0, 8), (4, 8), (0, 4)),
        ("dgrad", (4, 8), (8, 0), (4, 0)),
        ("wgrad", (0, 8), (0, 3), (3, 8)),
        ("fprop", (4, 0), (3, 0), (4, 3)),
    ],
)
def test_empty_operands(gemm: str, a: tuple[int, int], b: tuple[int, int], made: tuple[int, int]) -> None:
    """No tokens, no features, no outputs: rows of the right shape, and no figures that mean anything."""
    found = shadow(gemm, torch.zeros(a), torch.zeros(b), recipe_named("current"))
    assert found.exact.shape == made
    assert gemm_figures(*found).rel_l2 is None


def test_unknown_gemm_lists_the_valid_ones() -> None:
    """A sentence with the names."""
    with pytest.raises(UnknownNameError, match="dgrad, fprop, wgrad"):
        shadow("backward", normal(4, 4), normal(4, 4), recipe_named("current"))
