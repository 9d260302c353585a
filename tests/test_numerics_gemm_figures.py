"""Figures of a GEMM from sampled rows: closed forms, harm, and what does not exist."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8dbg.numerics.gemm import (
    GemmFigures,
    gemm_figures,
    sample_rows,
    shadow,
)
from fp8dbg.numerics.recipes import recipe_named
from fp8dbg.runs.schema import TABLES


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def figures(
    exact: Any, emulated: Any, real: Any = None, grad: Any = None, rows_total: int | None = None
) -> GemmFigures:
    """Of rows given as lists; all error is the first operand's."""
    right, wrong, made, slope = (None if v is None else torch.tensor(v).float() for v in (exact, emulated, real, grad))
    assert right is not None
    assert wrong is not None
    return gemm_figures(right, wrong, wrong, right, made, slope, rows_total)


def test_figures_in_closed_form() -> None:
    """Exact (3, 4) seen as (3, 5) by the first operand's fault."""
    found = figures([[3, 4]], [[3, 5]])
    assert found.mse == 0.5
    assert found.rel_l2 == found.error_from_a == pytest.approx(0.2)
    assert found.error_from_b == 0.0
    assert found.sqnr_db == pytest.approx(-20 * math.log10(0.2))
    assert found.cosine == pytest.approx(29 / (5 * math.sqrt(34)))
    assert found.norm_ratio == pytest.approx(math.sqrt(34) / 5)
    assert found.grad_alignment == pytest.approx(29 / 25)
    assert (found.error_unexplained, found.impact, found.sensitivity) == (None, None, None)


def test_real_output_is_the_fp8_side() -> None:
    """The figures are the real rows'; what emulation does not explain is their distance from it."""
    found = figures([[3, 4]], [[3, 5]], real=[[3, 6]])
    assert found.rel_l2 == pytest.approx(0.4)
    assert found.error_from_a == pytest.approx(0.2)
    assert found.error_unexplained == pytest.approx(0.2)


def test_harm_is_scaled_to_all_rows() -> None:
    """Two rows of ten with errors (0, 1) and (2, 0) under gradients (5, 3) and (1, 7): 3 and 2, times five."""
    found = figures([[3, 4], [1, 1]], [[3, 5], [3, 1]], grad=[[5, 3], [1, 7]], rows_total=10)
    assert found.impact == 25.0
    assert found.sensitivity == (9 + 4) * 5
    assert found.grad_alignment is None
    assert figures([[3, 4]], [[3, 5]], grad=[[5, 3]]).impact == 3.0


def test_impact_is_the_change_of_the_loss() -> None:
    """A loss that is linear in the output changes by the impact, all rows measured; a quarter of them estimates it."""
    torch.manual_seed(0)
    recipe, x, w, g = recipe_named("current"), normal(512, 64), normal(32, 64, seed=1), normal(512, 32, seed=2).abs()
    made = shadow("fprop", x, w, recipe)
    change = ((made.both - made.exact).double() * g.double()).sum().item()
    assert gemm_figures(*made, grad=g).impact == pytest.approx(change, rel=1e-5)
    generator, estimates = random.Random(0), []
    for _ in range(200):
        rows = sample_rows(512, 128, generator)
        part = shadow("fprop", x, w, recipe, rows)
        estimates.append(gemm_figures(*part, grad=g[rows], rows_total=512).impact or 0.0)
    spread = float(np.std(estimates)) / math.sqrt(200)
    assert abs(float(np.mean(estimates)) - change) < 4 * spread


def test_what_does_not_exist_is_none() -> None:
    """Empty, all-zero, vanished and non-finite rows: None, never NaN."""
    nothing = torch.zeros(0, 4)
    empty = gemm_figures(nothing, nothing, nothing, nothing, grad=nothing, rows_total=8)
    assert empty == GemmFigures(rows_measured=0)
    zero = figures([[0, 0]], [[0, 1]])
    assert (zero.mse, zero.rel_l2, zero.cosine, zero.norm_ratio, zero.grad_alignment) == (0.5, None, None, None, None)
    lost = figures([[3, 4]], [[0, 0]])
    assert (lost.rel_l2, lost.cosine, lost.norm_ratio) == (1.0, None, 0.0)
    same = figures([[3, 4]], [[3, 4]])
    assert (same.rel_l2, same.sqnr_db, same.mse) == (0.0, None, 0.0)
    for bad in (math.nan, math.inf):
        broken = figures([[3, 4]], [[bad, 4]], real=[[bad, bad]], grad=[[1, 1]])
        assert {k: v for k, v in broken.row().items() if v is not None} == {"rows_measured": 1, "error_from_b": 0.0}


def test_non_finite_operands_give_no_figures() -> None:
    """A NaN in a sampled token, an Inf in the weight: counted elsewhere; here None."""
    x, w = normal(8, 32).bfloat16(), normal(4, 32, seed=1).bfloat16()
    x[2, 3] = math.nan
    assert gemm_figures(*shadow("fprop", x, w, recipe_named("current"))).rel_l2 is None
    clean = torch.tensor([0, 1, 3, 4])
    assert gemm_figures(*shadow("fprop", x, w, recipe_named("current"), clean)).rel_l2 == pytest.approx(0.037, rel=0.3)


def test_rows_that_only_the_exact_gemm_has_not_finite_give_no_figures() -> None:
    """FP8 makes an Inf its maximum: the finite result is no share of an infinite one."""
    exact, emulated = torch.tensor([[1.0, float("inf")]]), torch.tensor([[1.0, 448.0]])
    figures = gemm_figures(exact, emulated, emulated, emulated, real=emulated)
    assert {name for name, value in figures.row().items() if value is not None} == {"rows_measured"}


def test_figures_are_columns_of_gemms() -> None:
    """Every attribute is a column of the table."""
    assert set(GemmFigures(rows_measured=0).row()) <= set(TABLES["gemms"].names)
