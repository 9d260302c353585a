"""One tensor under one recipe: which scale, which columns, and what is None."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8dbg
from fp8dbg.errors import UnknownNameError, UsageError
from fp8dbg.numerics.measurement import Measurement, measure, measure_recipes, measure_results, read_back
from fp8dbg.numerics.recipes import recipe_named, recipe_names
from fp8dbg.runs.schema import TABLES
from tests import slow
from tests.tensors import STATISTICS, assert_same, tensors

X = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_attributes_are_columns_of_tensors() -> None:
    """Every attribute is a column, and every column but the caller's own (step, layer, what_if, ...) an attribute."""
    columns = set(TABLES["tensors"].names)
    attributes = set(measure(X).row())
    assert attributes <= columns
    assert columns - attributes == {"step", "microbatch", "call", "rank", "layer", "tensor", "host", "what_if"}


def test_measure_is_public() -> None:
    """fp8dbg.measure is this function."""
    assert fp8dbg.measure is measure


def test_current_scaling_is_the_default() -> None:
    """E4M3, one scale, chosen from the tensor: 448 / amax, and the figures of that cast."""
    m = measure(X)
    scale = (torch.tensor(448.0) / X.abs().max().float()).item()
    assert (m.recipe, m.format, m.granularity, m.dtype, m.shape) == ("current", "e4m3", "tensor", "bfloat16", "64x96")
    assert (m.scale, m.scale_current, m.scale_delta, m.scale_source) == (scale, scale, 0.0, "emulated")
    wanted = slow.statistics(X)
    assert_same(m.row(), wanted, wanted["rms"])
    assert_same(m.row(), slow.cast(X, "e4m3", scale), None)


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_measures_every_role(name: str, role: str) -> None:
    """Format and granularity are the recipe's; scales are one or a range; the error is the format's noise, about."""
    recipe = recipe_named(name)
    m = measure(X, recipe=name, role=role)
    assert (m.recipe, m.format, m.granularity) == (name, recipe.format(role).name, recipe.granularity(role))
    assert m.numel == 64 * 96
    one = m.granularity == "tensor" and m.format != "bf16"
    assert (m.scale is not None, m.scale_min is not None) == (one, m.granularity != "tensor")
    noise = recipe.format(role).noise
    assert noise is not None
    assert m.rel_l2 == pytest.approx(0.0 if m.format == "bf16" else noise.rel_l2, rel=0.4)


def test_scale_in_force_against_the_scale_wanted() -> None:
    """A scale given is taken as it is; scale_delta compares it with the recipe's own under the same margin."""
    wanted = recipe_named("delayed", margin=1).current_scale(float(X.abs().max()), "input")
    m = measure(X, recipe="delayed:margin=1", scale=wanted * 4)
    assert (m.scale, m.scale_current, m.scale_delta, m.scale_source) == (wanted * 4, wanted, 2.0, "live")
    assert m.saturated == (X.float().abs() * wanted * 4 > 464).sum()


def test_unscaled_is_compared_with_current_scaling() -> None:
    """Scale 1 on a tensor that would want 448: nothing chosen, and the delta says how far off."""
    m = measure(torch.ones(4), recipe="unscaled")
    assert (m.scale, m.scale_current) == (1.0, 448.0)
    assert m.scale_delta == pytest.approx(-math.log2(448))


def test_format_given_replaces_the_recipes() -> None:
    """An FNUZ twin gets its own maximum; by role, hybrid recipes differ."""
    amax = float(X.abs().max())
    assert measure(X, "e4m3fnuz").scale == pytest.approx(240 / amax)
    assert measure(X, role="grad_output").format == "e5m2"
    assert measure(X, "e4m3", role="grad_output").scale == pytest.approx(448 / amax)


@pytest.mark.parametrize(("recipe", "scale"), [("current", 1.0), ("tensorwise", 0.0)])
def test_inf_does_to_the_scale_what_it_does_in_the_library(recipe: str, scale: float) -> None:
    """Transformer Engine silently falls back to 1, torchao's scale is 0 and every product lost."""
    x = X.clone()
    x[0, 0] = math.inf
    m = measure(x, recipe=recipe)
    assert (m.inf, m.scale) == (1, scale)
    assert (m.rel_l2 is None) == (scale == 0.0)


def test_nan_kills_the_scale_of_torchao_only() -> None:
    """TE's amax never sees it; torchao's scale is NaN, which is written as None."""
    x = X.clone()
    x[0, 0] = math.nan
    assert measure(x, recipe="current").scale is not None
    m = measure(x, recipe="tensorwise")
    assert (m.nan, m.scale, m.rel_l2, m.underflow) == (1, None, None, 0)


@settings(deadline=None)
@given(tensors(), st.sampled_from(recipe_names()), st.sampled_from([None, 0.0, 1.0, math.inf, math.nan]))
def test_no_nan_or_inf_is_ever_written(x: torch.Tensor, recipe: str, scale: float | None) -> None:
    """Any tensor under any recipe and any scale gives a row of plain finite numbers."""
    per_tensor = recipe_named(recipe).granularity("input") == "tensor"
    row = measure(x, recipe=recipe, scale=scale if per_tensor else None).row()
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_results_have_statistics_only() -> None:
    """No recipe, no format, no scale, no cast."""
    m = measure_results(X)
    assert [getattr(m, n) for n in STATISTICS] == [getattr(measure(X), n) for n in STATISTICS]
    for name in ("recipe", "format", "granularity", "scale", "underflow", "rel_l2", "scale_source"):
        assert getattr(m, name) is None


def test_several_recipes_at_once() -> None:
    """The same rows as one at a time."""
    casts: list[Any] = [
        ("current", None, None),
        ("delayed", None, 3.0),
        ("mxfp8", None, None),
        ("current", "e5m2", 1.0),
    ]
    wanted = [measure(X, f, r, s) for r, f, s in casts]
    assert measure_recipes(X, casts) == wanted


def test_shapes_and_histogram() -> None:
    """A scalar says so; an empty tensor has no histogram; counts of one binade are where they belong."""
    assert measure(torch.tensor(1.5)).shape == "scalar"
    empty = measure(torch.empty(2, 0, 3))
    assert (empty.shape, empty.numel, empty.histogram, empty.mse) == ("2x0x3", 0, None, None)
    assert measure(torch.tensor([0.3, 4.0, 5.0])).histogram == {
        "exponent": -2,
        "counts": [1, 0, 0, 0, 2],
        "codes": None,
    }


def test_axis_is_the_contraction() -> None:
    """Blocks along the other axis are other blocks."""
    x = torch.ones(64, 64)
    x[:, 0] = 2.0**30
    along, down = measure(x, recipe="mxfp8"), measure(x, recipe="mxfp8", axis=0)
    assert along.underflow == 64 * 31
    assert down.underflow == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": "fp8"}, "No recipe is called 'fp8'"),
        ({"format": "e3m4"}, "No format is called 'e3m4'"),
        ({"role": "output"}, "No operand role is called 'output'"),
        ({"recipe": "mxfp8", "scale": 2.0}, "one scale per 1x32"),
        ({"recipe": "block", "format": "e5m2"}, "casts input to e4m3, not e5m2"),
        ({"format": "e8m0"}, "e8m0 holds scales"),
    ],
)
def test_wrong_requests(arguments: dict[str, Any], message: str) -> None:
    """Each gets one sentence."""
    with pytest.raises(UsageError, match=message):
        measure(X, **arguments)


def test_unknown_names_list_the_valid_ones() -> None:
    """As everywhere."""
    with pytest.raises(UnknownNameError, match="Valid names: bf16, block"):
        measure(X, recipe="")


def test_measurement_of_nothing_is_all_none() -> None:
    """The defaults claim nothing."""
    assert [v for v in Measurement().row().values() if v not in (None, 0)] == []


def test_values_read_back_from_the_same_cast_have_its_errors() -> None:
    """What an exact copy says, float64 sums in another order aside; counts and scale stay the measurement's."""
    m = measure(X)
    assert m.scale is not None
    copy = (X.float() * m.scale).to(torch.float8_e4m3fn).float() / m.scale
    again = read_back(m, X, copy)
    for name in ("mse", "rel_l2", "sqnr_db", "cosine", "norm_ratio"):
        assert getattr(again, name) == pytest.approx(getattr(m, name), rel=1e-5), name
    assert (again.underflow, again.scale, again.amax) == (m.underflow, m.scale, m.amax)


def test_values_read_back_from_another_tensor_show_how_far_it_is() -> None:
    """Twice the values: a gain of 2 at cosine 1; non-finite pairs are left out, over more than one chunk."""
    x = torch.ones(1100, 1000)
    y = 2 * x
    y[0, 0] = float("nan")
    again = read_back(measure(x), x, y)
    assert (again.rel_l2, again.norm_ratio, again.bias) == (1.0, 2.0, 1.0)
    assert again.cosine == pytest.approx(1.0)
