"""The three GEMMs of a linear layer as an FP8 recipe computes them, and their autograd function."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8dbg.numerics import tiles
from fp8dbg.numerics.casting import OPERANDS, Quantised, cast
from fp8dbg.numerics.recipes import Recipe
from fp8dbg.numerics.scaling_state import Scale

Scales = dict[str, Scale]


class SimulatedGemms(torch.autograd.Function):
    """y = x w' + bias, with fprop, dgrad and wgrad each by its own recipe.

    The high-precision operands are what is saved, as in ``nn.Linear``: no copy of a weight outlives the forward, and
    recipes that scale along the contraction cast an operand anew for each GEMM, as their libraries do.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipes: dict[str, Recipe],
        scales: Scales,
        layer: Any,
    ) -> Tensor:
        """x [.., k], weight [n, k], bias [n] or None, all of one dtype; ``layer`` tells the output gradient's scale."""
        ctx.save_for_backward(x, weight)
        ctx.recipes, ctx.scales, ctx.layer = recipes, scales, layer
        if not recipes["fprop"].quantises("fprop"):
            return F.linear(x, weight, bias)
        y = _gemm("fprop", x.reshape(-1, x.shape[-1]), weight, recipes["fprop"], scales, x.dtype, bias)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias, in their dtypes."""
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        with torch.autocast(grad.device.type, enabled=False):
            scales = {**ctx.scales, **ctx.layer.backward_scales(grad)}
            grad_x = _backward_gemm("dgrad", grad, weight, ctx.recipes, scales) if wants_x else None
            flat = x.reshape(-1, x.shape[-1])
            grad_weight = _backward_gemm("wgrad", grad, flat, ctx.recipes, scales) if wants_weight else None
            grad_bias = grad.sum(0) if wants_bias else None
        return None if grad_x is None else grad_x.view_as(x), grad_weight, grad_bias, None, None, None


def _backward_gemm(gemm: str, grad: Tensor, other: Tensor, recipes: dict[str, Recipe], scales: Scales) -> Tensor:
    if recipes[gemm].quantises(gemm):
        return _gemm(gemm, grad, other, recipes[gemm], scales, other.dtype)
    return grad @ other if gemm == "dgrad" else grad.t() @ other


def _gemm(
    gemm: str, a: Tensor, b: Tensor, recipe: Recipe, scales: Scales, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """One quantised GEMM of matrices, as stored: weight [n, k], input [t, k], grad_output [t, n]."""
    first, second = OPERANDS[gemm]
    kept = scales if recipe.name == "delayed" else {}
    wide = None if dtype == torch.bfloat16 and _multiplies_bfloat16(a.device.type) else torch.float32
    q_a, q_b = (
        cast(a, recipe, first, gemm, kept.get(first), wide),
        cast(b, recipe, second, gemm, kept.get(second), wide),
    )
    if gemm == "wgrad":
        q_a = Quantised(q_a.values.t(), q_a.factor)
    if gemm == "fprop":
        q_b = Quantised(q_b.values.t(), q_b.factor)
    return _product(q_a, q_b, dtype, bias)


@cache
def _multiplies_bfloat16(device: str) -> bool:
    """Whether the machine multiplies bfloat16 itself.

    On a CPU that does not, as most with AVX2, torch's product takes 4 to 50 times as long as that of float32 (2,048
    tokens, 512 features), which is as exact.
    """
    if device != "cpu":
        return True
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return False


def _product(a: Quantised, b: Quantised, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """a times b plus bias, accumulated in float32 and rounded once to ``dtype``."""
    factor = a.factor * b.factor
    narrow = a.values.dtype == b.values.dtype == dtype == torch.bfloat16
    if narrow and isinstance(factor, float) and tiles.on_host(a.values):
        # the factor is applied before the result is rounded; with beta=0 what is added to is not read
        start = a.values.new_zeros(b.values.shape[1]) if bias is None else bias
        return torch.addmm(start, a.values, b.values, beta=0 if bias is None else 1, alpha=factor)
    # a bfloat16 product is rounded twice here: torch has no wider output on every device
    product = a.values @ b.values if narrow else a.values.float() @ b.values.float()
    product = product.float() * factor
    return (product if bias is None else product + bias.float()).to(dtype)
