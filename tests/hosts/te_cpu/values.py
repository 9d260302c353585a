"""Quantized tensors of Transformer Engine back to the dense float32 values that a GEMM reads out of them."""

from __future__ import annotations

from typing import Any

import torch

from tests.hosts.te_cpu import casts, nvfp4
from tests.hosts.te_cpu.enums import torch_dtype
from tests.hosts.te_cpu.quantizers import as_matrix


def _turned_back(transposed: torch.Tensor) -> torch.Tensor:
    """[C, ...] -> [..., C], the inverse of ``fp8_transpose``."""
    matrix = transposed.reshape(transposed.shape[0], -1)
    return matrix.t().contiguous().reshape(*transposed.shape[1:], transposed.shape[0])


def dense(x: Any, columnwise: bool = False) -> torch.Tensor:
    """float32 values of a plain tensor or of any quantized one, as the GEMM reads them.

    Block formats hold two copies, quantised along rows and along columns: ``columnwise`` says which to read where
    both are there.
    """
    if hasattr(x, "_scale_inv"):
        data = x._data if x._data is not None else _turned_back(x._transpose)
        values: torch.Tensor = casts.values_of_bytes(data, torch_dtype(x._fp8_dtype)) * x._scale_inv
        return values
    if hasattr(x, "_is_2D_scaled"):
        return _dense_blockwise(x, _read_rows(x, columnwise))
    if hasattr(x, "_amax_rowwise"):
        return _dense_nvfp4(x, _read_rows(x, columnwise))
    if hasattr(x, "_rowwise_data"):
        return _dense_mxfp8(x, _read_rows(x, columnwise))
    plain: torch.Tensor = x.detach().float()
    return plain


def _read_rows(x: Any, columnwise: bool) -> bool:
    return x._columnwise_data is None or (x._rowwise_data is not None and not columnwise)


def _dense_blockwise(x: Any, rowwise: bool) -> torch.Tensor:
    data = x._rowwise_data if rowwise else x._columnwise_data
    scale_inv = x._rowwise_scale_inv if rowwise else x._columnwise_scale_inv
    matrix = as_matrix(data) if rowwise else data.reshape(data.shape[0], -1)
    rows, columns = matrix.shape
    per_row = scale_inv.repeat_interleave(128, 0)[:rows] if x._is_2D_scaled else scale_inv.t()[:rows]
    spread = per_row.repeat_interleave(128, 1)[:, :columns]
    values = (casts.values_of_bytes(matrix, torch_dtype(x._fp8_dtype)) * spread).reshape(data.shape)
    return values if rowwise else _turned_back(values)


def _dense_mxfp8(x: Any, rowwise: bool) -> torch.Tensor:
    data = x._rowwise_data if rowwise else x._columnwise_data
    matrix = as_matrix(data)
    rows, columns = matrix.shape
    scale = torch.exp2((x._rowwise_scale_inv if rowwise else x._columnwise_scale_inv).float() - 127.0)
    if rowwise:
        spread = scale[:rows, : columns // casts.MX_BLOCK].repeat_interleave(casts.MX_BLOCK, 1)
    else:
        spread = scale[: rows // casts.MX_BLOCK, :columns].repeat_interleave(casts.MX_BLOCK, 0)
    values: torch.Tensor = (casts.values_of_bytes(matrix, torch_dtype(x._fp8_dtype)) * spread).reshape(data.shape)
    return values


def _dense_nvfp4(x: Any, rowwise: bool) -> torch.Tensor:
    if rowwise:
        data, scales, amax = x._rowwise_data, x._rowwise_scale_inv, x._amax_rowwise
        return nvfp4.dense(as_matrix(data), scales, amax).reshape(*data.shape[:-1], 2 * data.shape[-1])
    data, scales, amax = x._columnwise_data, x._columnwise_scale_inv, x._amax_columnwise
    values = nvfp4.dense(data.reshape(data.shape[0], -1), scales, amax)
    return _turned_back(values.reshape(*data.shape[:-1], 2 * data.shape[-1]))


def dequantize(x: Any, dtype: Any) -> torch.Tensor:
    """``tex.dequantize``."""
    return dense(x).to(torch_dtype(dtype))
