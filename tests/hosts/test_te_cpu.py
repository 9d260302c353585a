"""The CPU stand-in for Transformer Engine: its casts against fp8dbg's own formulas, and its layers in training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fp8dbg.numerics.formats import format_named
from fp8dbg.numerics.recipes import DelayedState, recipe_named
from fp8dbg.numerics.scales import e8m0_exponent, e8m0_reciprocal
from tests.hosts import te_nets
from tests.hosts.te_cpu import casts as casting
from tests.hosts.te_cpu import gemm, kernels, quantizers
from tests.hosts.te_cpu.values import dense

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}

AMAXES = [0.0, 1e-40, 1e-36, 3e-5, 0.4999999, 1.0, 150.0, 447.9, 448.0, 57344.0, 3e38, float("inf"), float("nan")]


def many_amaxes() -> np.ndarray[Any, np.dtype[np.float32]]:
    """The edges, then 20,000 values over 60 binades."""
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.uniform(-30, 30, 20_000)) * rng.uniform(1, 2, 20_000)
    return np.concatenate([AMAXES, spread]).astype(np.float32)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_the_cast_rounds_as_fp8dbg_does(name: str) -> None:
    """Every bfloat16 value through the byte cast equals Format.round, NaN staying NaN and +-Inf saturating."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    cast = casting.values_of_bytes(casting.cast_to_bytes(x, FORMATS[name]), FORMATS[name])
    np.testing.assert_array_equal(cast.double().numpy(), format_named(name).round(x.numpy()))


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_current_scales_agree_bit_for_bit(name: str, power_of_2: bool) -> None:
    """compute_scale_from_amax against the current recipe, over the edges and 60 binades."""
    role = "grad_output" if name == "e5m2" else "input"
    amax = many_amaxes()
    expected = recipe_named("current", power_of_2=power_of_2).scales(amax, role)
    scale = casting.ScaleRule(power_of_2=power_of_2).scale(torch.from_numpy(amax), FORMATS[name])
    np.testing.assert_array_equal(scale.numpy(), expected)


def test_e8m0_scales_agree_bit_for_bit() -> None:
    """The MXFP8 exponent byte and its reciprocal, over the edges and 60 binades (NaN cannot reach a block's amax)."""
    amax = many_amaxes()
    amax = amax[~np.isnan(amax)]
    code = casting.e8m0_of_amax(torch.from_numpy(amax), E4M3)
    expected = e8m0_exponent(amax, format_named("e4m3"))
    np.testing.assert_array_equal(code.numpy(), expected)
    np.testing.assert_array_equal(casting.reciprocal_of_e8m0(code).numpy(), e8m0_reciprocal(expected))


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("history", [1, 2, 5])
@pytest.mark.parametrize("margin", [0, 1])
def test_delayed_updates_agree_bit_for_bit(algorithm: str, history: int, margin: int) -> None:
    """300 updates with spikes, zeros, Inf and NaN among the amaxes: every scale and every history equal."""
    state = DelayedState(recipe_named("delayed", history=history, algorithm=algorithm, margin=margin), "input")
    rows, scale = torch.zeros(history, 1), torch.ones(1)
    rng = np.random.default_rng(history)
    for amax in np.concatenate([np.exp2(rng.normal(0, 6, 300)), AMAXES])[rng.permutation(300 + len(AMAXES))]:
        state.update(float(np.float32(amax)))
        last = torch.tensor([amax], dtype=torch.float32)
        kernels.fused_amax_and_scale_update_after_reduction(last, [rows], [scale], algorithm, 7, margin)
        assert scale.item() == state.scale
        assert rows[:, 0].tolist() == pytest.approx(state.history, abs=0, nan_ok=True)


def test_block_formats_hold_the_tensor_within_their_noise(te: Any) -> None:
    """Row and column copies of MXFP8 and blockwise tensors both dequantise to within E4M3's own error."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name in ("block", "mxfp8"):
        linear = te.Linear(256, 64, params_dtype=torch.bfloat16)
        with te_nets.autocast(te, te_nets.recipe(name)):
            linear(x)
        quantizer = linear.quantizers["scaling_fwd"][0].copy()
        quantizer.set_usage(rowwise=True, columnwise=True)
        quantized = quantizers.quantize(x, quantizer)
        for columnwise in (False, True):
            error = (dense(quantized, columnwise) - x.float()).norm() / x.float().norm()
            assert error < 0.028


def test_the_gemm_reads_each_operand_along_the_contraction(te: Any) -> None:
    """An MXFP8 wgrad uses the column copies of both operands, not the row copies."""
    quantizer_class = __import__("transformer_engine.pytorch.tensor.mxfp8_tensor", fromlist=["x"]).MXFP8Quantizer
    generator = torch.Generator().manual_seed(1)
    x, dy = ((4 * torch.randn(64, 64, generator=generator)).exp2() for _ in range(2))
    qx, qdy = (quantizers.quantize(t, quantizer_class(7, rowwise=True, columnwise=True)) for t in (x, dy))
    expected = dense(qdy, columnwise=True).t() @ dense(qx, columnwise=True)
    assert torch.equal(gemm.product(qx, False, qdy, True), expected)
    assert not torch.equal(dense(qx, columnwise=True), dense(qx))


def test_a_cast_tells_the_observers_what_it_made(te: Any, casts: list[quantizers.Cast]) -> None:
    """Three operands per GEMM layer and microbatch, the fused norm's own cast among them."""
    te_nets.train(te, te_nets.four_layers(te), te_nets.recipe("delayed"), steps=2)
    assert len(casts) == 2 * 5 * 3
    for cast in casts:
        dtype = E4M3 if int(cast.quantizer.dtype) == 7 else E5M2
        assert cast.scale is not None
        assert torch.equal(cast.data, casting.cast_to_bytes(cast.dense.float() * cast.scale, dtype))


@pytest.mark.parametrize("name", te_nets.RECIPES)
def test_layers_train_under_every_recipe(te: Any, name: str) -> None:
    """Twenty steps of real TE modules bring the loss down as far as BF16 does, by another path."""
    exact = te_nets.train(te, te_nets.four_layers(te), None, steps=20)
    losses = te_nets.train(te, te_nets.four_layers(te), te_nets.recipe(name), steps=20)
    assert losses[-1] < 0.1 * losses[0]
    assert losses[-1] == pytest.approx(exact[-1], abs=0.02)
    assert losses != exact


def test_without_fp8_a_layer_equals_torch(te: Any) -> None:
    """te.Linear with no autocast is a BF16 linear layer, forward and backward."""
    linear = te.Linear(128, 64, params_dtype=torch.bfloat16)
    x = te_nets.batch(0).requires_grad_()
    y = linear(x)
    y.sum().backward()
    assert torch.allclose(y, torch.nn.functional.linear(x, linear.weight, linear.bias), rtol=0.01, atol=0.01)
    assert x.grad is not None
    assert torch.allclose(x.grad, linear.weight.sum(0).expand_as(x), rtol=0.02, atol=0.02)


def test_a_missing_kernel_says_so(te: Any) -> None:
    """A kernel that the stand-in lacks can be imported and raises only when it is called."""
    import transformer_engine_torch as tex

    with pytest.raises(RuntimeError, match="no kernel fused_attn_fwd"):
        tex.fused_attn_fwd()
