"""Recipes against the libraries' formulas, each written here another way than in the package."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fp8dbg.errors import UnknownNameError, UsageError
from fp8dbg.numerics.formats import FORMATS
from fp8dbg.numerics.recipes import Recipe, parse_recipe, recipe_named, recipe_names
from fp8dbg.numerics.scales import e8m0_exponent, e8m0_reciprocal

FLT_MAX = torch.finfo(torch.float32).max
E4M3, E5M2 = FORMATS["e4m3"], FORMATS["e5m2"]


def many_amaxes() -> npt.NDArray[np.float32]:
    """Positive finite float32 values over the whole range, subnormals and both sides of powers of two among them."""
    bits = np.random.default_rng(0).integers(1, 0x7F800000, 100_000).astype(np.uint32)
    powers = np.float32(2.0) ** np.arange(-149, 128, dtype=np.float32)
    near = [np.nextafter(powers, np.float32(s), dtype=np.float32) for s in (0, np.inf)]
    every = np.concatenate([bits.view(np.float32), powers, *near])
    return np.asarray(every[(every > 0) & np.isfinite(every)], dtype=np.float32)


def same_bits(a: Any, b: Any) -> bool:
    return np.array_equal(np.asarray(a, np.float32).view(np.uint32), np.asarray(b, np.float32).view(np.uint32))


@pytest.mark.parametrize(("role", "largest"), [("input", 448.0), ("weight", 448.0), ("grad_output", 57344.0)])
def test_current_is_a_float32_division(role: str, largest: float) -> None:
    """torch's own float32 division gives the same bits; a quotient of Inf becomes FLT_MAX."""
    amax = many_amaxes()
    wanted = (torch.tensor(largest) / torch.from_numpy(amax)).clamp(max=FLT_MAX)
    assert same_bits(recipe_named("current").scales(amax, role), wanted.numpy())


def test_current_hides_what_it_cannot_scale() -> None:
    """Transformer Engine answers 1.0 for an amax of 0, Inf or NaN, with and without power of two."""
    for name in ("current", "current_pow2", "delayed", "block", "int8"):
        assert [recipe_named(name).current_scale(a, "input") for a in (0.0, math.inf, math.nan)] == [1.0, 1.0, 1.0]


def test_current_power_of_two_cuts_the_mantissa() -> None:
    """The scale is the largest power of two not above the quotient."""
    amax = many_amaxes()
    exact = recipe_named("current").scales(amax, "input")
    mantissa, exponent = np.frexp(exact)
    floor = np.ldexp(np.float32(0.5), exponent)
    normal = exact >= np.float32(2.0**-126)
    assert mantissa.min() >= 0.5
    assert same_bits(recipe_named("current_pow2").scales(amax, "input")[normal], floor[normal])


def test_current_epsilon_is_a_floor_for_amax() -> None:
    """amax_epsilon replaces smaller amaxes, 0 included."""
    recipe = recipe_named("current", amax_epsilon=0.5)
    assert [recipe.current_scale(a, "input") for a in (0.0, 0.25, 0.5, 1.0)] == [896.0, 896.0, 896.0, 448.0]


def test_block_scale_stays_within_bfloat16() -> None:
    """Where the quotient is Inf, TE takes the input dtype's maximum: 2^127 as a power of two."""
    assert recipe_named("block").current_scale(1e-37, "input") == 2.0**127
    assert recipe_named("block", power_of_2=False).current_scale(1e-37, "input") == torch.finfo(torch.bfloat16).max
    assert recipe_named("block").current_scale(3.0, "grad_output") == 128.0


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_tensorwise_is_torchao_to_the_letter(role: str, power_of_2: bool) -> None:
    """float8_utils.amax_to_scale, written with torch: float64 division, clamp at 1e-12, float32, exp2(floor(log2))."""
    amax = np.concatenate([many_amaxes(), np.array([0.0, np.inf, np.nan], np.float32)])
    dtype = torch.float8_e5m2 if role == "grad_output" else torch.float8_e4m3fn
    wanted = torch.finfo(dtype).max / torch.clamp(torch.from_numpy(amax).to(torch.float64), min=1e-12)
    wanted = wanted.to(torch.float32)
    if power_of_2:
        wanted = torch.exp2(torch.floor(torch.log2(wanted)))
    got = recipe_named("tensorwise", power_of_2=power_of_2).scales(amax, role)
    assert np.array_equal(got, wanted.numpy(), equal_nan=True)


def test_torchao_is_loud() -> None:
    """0 gives 448e12, Inf gives 0, NaN gives NaN."""
    recipe = recipe_named("tensorwise")
    assert recipe.current_scale(0.0, "input") == float(np.float32(448e12))
    assert recipe.current_scale(math.inf, "input") == 0.0
    assert math.isnan(recipe.current_scale(math.nan, "input"))


def test_rowwise_rounds_down_to_a_power_of_two() -> None:
    """448 / 3 = 149.3 becomes 128 under torchao's rowwise, and stays under tensorwise."""
    assert recipe_named("rowwise").current_scale(3.0, "input") == 128.0
    assert recipe_named("tensorwise").current_scale(3.0, "input") == float(np.float32(448 / 3))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_mx_round_up_is_the_exact_ceiling(fmt: Any) -> None:
    """The byte is ceil(log2(amax * float32(1/max))) + 127 in exact arithmetic, and no value then saturates."""
    amax = many_amaxes()[::29]
    factor = Fraction(float(np.float32(1.0 / fmt.max)))
    for a, e in zip(amax, e8m0_exponent(amax, fmt, "up"), strict=True):
        product = Fraction(float(np.float32(a) * np.float32(float(factor))))
        wanted = max(-127, ceil_log2(product) if product else -127)
        assert int(e) - 127 == wanted
    largest = amax * e8m0_reciprocal(e8m0_exponent(amax, fmt, "up"))
    assert largest.max() <= fmt.max
    normal = (amax > 1e-30) & (amax < 1e30)
    assert largest[normal].min() > fmt.max / 2


def ceil_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length() - 1
    while Fraction(2) ** exponent < value:
        exponent += 1
    return exponent


@pytest.mark.parametrize(("rounding", "threshold"), [("floor", 2.0), ("ceil", 1.0), ("even", 1.9375)])
def test_mx_other_roundings(rounding: str, threshold: float) -> None:
    """amax's exponent less E4M3's 8, one more from a mantissa of: never (floor), above 1 (ceil), 1.9375 (even) on."""
    for a in many_amaxes()[::31]:
        mantissa, exponent = math.frexp(float(a))
        if float(a) < 2.0**-100:
            continue
        up = 2 * mantissa > threshold if rounding == "ceil" else 2 * mantissa >= threshold
        assert int(e8m0_exponent(a, E4M3, rounding)) == min(255, exponent - 1 + up - 8 + 127)


def test_mx_special_values() -> None:
    """0 gives 2^127; TE's round-up makes Inf the largest power, 2^-127 as a multiplier; the others give NaN."""
    up, floor = recipe_named("mxfp8"), recipe_named("mxfp8", rounding="floor")
    assert up.scales(np.array([0.0, np.inf], np.float32), "input").tolist() == [2.0**127, 2.0**-127]
    assert floor.current_scale(0.0, "input") == 2.0**127
    for recipe, amax in ((up, math.nan), (floor, math.nan), (floor, math.inf)):
        assert math.isnan(recipe.current_scale(amax, "input"))


def test_mx_reciprocal_is_exact() -> None:
    """2^(127 - e) for every byte, NaN for 255."""
    got = e8m0_reciprocal(np.arange(256).astype(np.uint8)).tolist()
    assert got[:255] == [2.0 ** (127 - e) for e in range(255)]
    assert math.isnan(got[255])


def test_nvfp4_tensor_scale() -> None:
    """448 * 6 / amax in float32; 1 for an amax of 0 or Inf; at most FLT_MAX."""
    amax = many_amaxes()
    recipe = recipe_named("nvfp4")
    wanted = (torch.tensor(2688.0) / torch.from_numpy(amax)).clamp(max=FLT_MAX)
    assert same_bits(recipe.scales(amax, "input"), wanted.numpy())
    assert [recipe.current_scale(a, "weight") for a in (0.0, math.inf, math.nan)] == [1.0, 1.0, FLT_MAX]


def test_int8_maps_amax_to_127() -> None:
    """Symmetric: amax 2 gives 63.5."""
    assert recipe_named("int8").current_scale(2.0, "input") == 63.5


def test_casts_without_a_scale() -> None:
    """Unscaled and bf16 multiply by 1 whatever the amax."""
    for name in ("unscaled", "bf16"):
        assert recipe_named(name).scales(np.array([0, 3, np.inf], np.float32), "input").tolist() == [1.0, 1.0, 1.0]


def test_format_override() -> None:
    """Another format takes the place of the role's own in the scale."""
    assert recipe_named("current").current_scale(2.0, "input", FORMATS["e4m3fnuz"]) == 120.0
    assert recipe_named("delayed", margin=1).current_scale(2.0, "input", E5M2) == 57344.0 / 4


@pytest.mark.parametrize(
    ("name", "formats", "granularities", "gemms"),
    [
        ("delayed", "e4m3 e4m3 e5m2", "tensor tensor tensor", "fprop dgrad wgrad"),
        ("delayed:hybrid=false", "e4m3 e4m3 e4m3", "tensor tensor tensor", "fprop dgrad wgrad"),
        ("current", "e4m3 e4m3 e5m2", "tensor tensor tensor", "fprop dgrad wgrad"),
        ("tensorwise", "e4m3 e4m3 e5m2", "tensor tensor tensor", "fprop dgrad wgrad"),
        ("rowwise", "e4m3 e4m3 e4m3", "row row row", "fprop dgrad wgrad"),
        ("rowwise_with_gw_hp", "e4m3 e4m3 e4m3", "row row row", "fprop dgrad"),
        ("block", "e4m3 e4m3 e4m3", "1x128 128x128 1x128", "fprop dgrad wgrad"),
        ("mxfp8", "e4m3 e4m3 e4m3", "1x32 1x32 1x32", "fprop dgrad wgrad"),
        ("nvfp4", "e2m1 e2m1 e2m1", "1x16 1x16 1x16", "fprop dgrad wgrad"),
        ("int8", "int8 int8 bf16", "tensor row tensor", "fprop"),
        ("unscaled", "e4m3 e4m3 e5m2", "tensor tensor tensor", "fprop dgrad wgrad"),
        ("bf16", "bf16 bf16 bf16", "tensor tensor tensor", ""),
    ],
)
def test_what_each_recipe_does(name: str, formats: str, granularities: str, gemms: str) -> None:
    """Format and granularity of input, weight and grad_output; the GEMMs that are quantised."""
    recipe = recipe_named(name)
    roles = ("input", "weight", "grad_output")
    assert [recipe.format(r).name for r in roles] == formats.split()
    assert [recipe.granularity(r) for r in roles] == granularities.split()
    assert [g for g in ("fprop", "dgrad", "wgrad") if recipe.quantises(g)] == gemms.split()


def test_weight_of_dgrad_is_tensorwise_in_rowwise_with_gw_hp() -> None:
    """torchao scales that operand per tensor, the one exception."""
    recipe = recipe_named("rowwise_with_gw_hp")
    assert recipe.granularity("weight", "dgrad") == "tensor"
    assert recipe.granularity("grad_output", "dgrad") == "row"
    assert recipe_named("rowwise").granularity("weight", "dgrad") == "row"


def test_nan_reaches_the_amax_in_torchao_only() -> None:
    """fmaxf leaves NaN out, torch.max does not; Inf gets everywhere."""
    te, ao = recipe_named("current"), recipe_named("tensorwise")
    assert [te.amax_seen(2.0, 0, 0), te.amax_seen(2.0, 1, 0), te.amax_seen(None, 1, 0)] == [2.0, 2.0, 0.0]
    assert te.amax_seen(2.0, 1, 1) == math.inf
    assert math.isnan(ao.amax_seen(2.0, 1, 1))
    assert ao.amax_seen(2.0, 0, 1) == math.inf


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_survive_their_data_and_label(name: str) -> None:
    """to_dict through JSON, and the label, give the recipe back; equal recipes hash alike."""
    recipe = recipe_named(name)
    for again in (Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))), parse_recipe(recipe.label)):
        assert again == recipe
        assert hash(again) == hash(recipe)


def test_label_names_what_is_not_default() -> None:
    """Only changed parameters are in the label, and the label reads back."""
    recipe = recipe_named("delayed", history=16, hybrid=False, margin=0)
    assert recipe.label == str(recipe) == "delayed:history=16,hybrid=false"
    assert recipe_named(" delayed : hybrid = false , history = 16 ".replace(" :", ":").strip()) == recipe
    assert recipe_named(recipe, margin=2).label == "delayed:history=16,margin=2,hybrid=false"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp8", "No recipe is called 'fp8'. Valid names: bf16, block, current"),
        ("delayed:len=4", "called 'len'. Valid names: algorithm, history, hybrid, margin."),
        ("delayed:history=0", "does not take history='0'. Give a whole number from 1 to 1048576."),
        ("delayed:history=2.5", "Give a whole number from 1 to 1048576."),
        ("delayed:margin=inf", "Give a whole number from -64 to 64."),
        ("delayed:algorithm=mean", "Give max or most_recent."),
        ("current:hybrid=maybe", "Give true or false."),
        ("current:amax_epsilon=-1", "Give a number from 0 up."),
        ("mxfp8:rounding=nearest", "Give up or floor or ceil or even."),
        ("bf16:hybrid=true", "Valid names: none."),
    ],
)
def test_wrong_recipes_say_what_is_right(text: str, message: str) -> None:
    """Unknown names, parameters and values list the valid ones."""
    with pytest.raises(UsageError) as caught:
        recipe_named(text)
    assert message in str(caught.value)


def test_unknown_roles_and_gemms() -> None:
    """Results are not operands; a misspelt GEMM is not a quiet False."""
    recipe = recipe_named("current")
    for ask in (lambda: recipe.format("output"), lambda: recipe.granularity("grad"), lambda: recipe.quantises("fp")):
        with pytest.raises(UnknownNameError):
            ask()
