"""GEMMs of Transformer Engine on a CPU: dequantise what the operands hold, multiply in float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.hosts.te_cpu.activations import backward as activation_backward
from tests.hosts.te_cpu.enums import torch_dtype
from tests.hosts.te_cpu.quantizers import as_matrix, quantize
from tests.hosts.te_cpu.values import dense


def product(a: Any, transpose_a: bool, b: Any, transpose_b: bool) -> torch.Tensor:
    """op(B) @ op(A) in float32, the order in which cuBLAS's column-major call reads row-major tensors.

    Block formats are read along the contraction: A by rows when transposed, B by rows when not.
    """
    left, right = dense(b, columnwise=transpose_b), dense(a, columnwise=not transpose_a)
    out = (as_matrix(left).t() if transpose_b else as_matrix(left)) @ (
        as_matrix(right).t() if transpose_a else as_matrix(right)
    )
    return out if transpose_b else out.view(*left.shape[:-1], out.shape[-1])


def generic_gemm(
    a: Any,
    transpose_a: bool,
    b: Any,
    transpose_b: bool,
    out: torch.Tensor | None,
    quantizer: Any,
    output_dtype: Any,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """``tex.generic_gemm`` with its epilogues: bias, bias gradient, GELU and its derivative, accumulation, cast."""
    result = product(a, transpose_a, b, transpose_b) * alpha
    bias_grad = before_gelu = None
    if bias is not None and grad:
        bias_grad = as_matrix(dense(b)).sum(0).to(bias.dtype)
    elif bias is not None:
        result = result + bias.float()
    if gelu and not grad:
        before_gelu = result.to(torch_dtype(bias_type))
        result = F.gelu(result, approximate="tanh")
    elif gelu and gelu_in is not None:
        result = activation_backward("gelu", result, gelu_in)
    if out is not None and quantizer is None:
        result = result.view(out.shape)
        out.copy_(out.float() + result if accumulate else result)
        return [out, bias_grad, gelu_in if grad else before_gelu, extra_output]
    if output_dtype is None:
        result = result.to(a.dtype if isinstance(a, torch.Tensor) else torch.bfloat16)
    else:
        result = result.to(torch_dtype(output_dtype))
    return [quantize(result, quantizer), bias_grad, gelu_in if grad else before_gelu, extra_output]


def te_general_grouped_gemm(
    a: list[Any],
    transpose_a: bool,
    b: list[Any],
    transpose_b: bool,
    out: list[torch.Tensor],
    output_dtype: Any,
    m_splits: list[int],
    bias: list[torch.Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: Any,
    grad: bool,
    workspace: Any,
    workspace_sizes: Any,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int = 0,
) -> list[torch.Tensor]:
    """``tex.te_general_grouped_gemm``: one GEMM per group, into separate outputs or into slices of the first."""
    start = 0
    for i, (group_a, group_b) in enumerate(zip(a, b, strict=True)):
        with_bias = bool(bias) and bias[i] is not None and bias[i].numel() > 0
        result = product(group_a, transpose_a, group_b, transpose_b)
        if with_bias and not grad:
            result = result + bias[i].float()
        if with_bias and grad:
            bias[i].copy_(as_matrix(dense(group_b)).sum(0))
        if single_output:
            out[0][start : start + result.shape[0]] = result
            start += result.shape[0]
        else:
            out[i].copy_(out[i].float() + result if accumulate else result)
    return bias


def split_quantize(
    tensor: torch.Tensor, sections: list[int], quantizers: list[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    """``tex.split_quantize``: cut along rows, one quantizer per piece."""
    pieces = torch.split(tensor, list(sections))
    return [quantize(piece.contiguous(), q) for piece, q in zip(pieces, quantizers, strict=True)]


def multi_tensor_quantize(tensors: list[torch.Tensor], quantizers: list[Any]) -> list[Any]:
    """``tex.multi_tensor_quantize``."""
    return [quantize(tensor, q) for tensor, q in zip(tensors, quantizers, strict=True)]
