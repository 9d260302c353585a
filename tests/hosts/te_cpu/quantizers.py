"""Transformer Engine's quantizers: a dense tensor to the bytes and scales of its tensor classes.

``OBSERVERS`` hear of every cast, fused ones too: that is how a test learns which bytes the host really made.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version as installed
from typing import Any

import torch

from tests.hosts.te_cpu import casts, nvfp4
from tests.hosts.te_cpu.enums import torch_dtype

Inner = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Cast:
    """One cast that the host made: by which quantizer, of what, with which scale (None for blocks), into what."""

    quantizer: Any
    dense: torch.Tensor
    scale: torch.Tensor | None
    inner: Inner

    @property
    def data(self) -> torch.Tensor:
        """The bytes in the order of ``dense``: of the copy along rows if there is one. NVFP4: one code a byte."""
        if "_amax_rowwise" in self.inner:
            return nvfp4.unpacked(self.inner["_rowwise_data"]).reshape(self.dense.shape)
        for name in ("_data", "_rowwise_data"):
            if name in self.inner:
                return self.inner[name].reshape(self.dense.shape)
        columnwise = self.inner.get("_transpose", self.inner.get("_columnwise_data"))
        assert columnwise is not None
        if columnwise.shape == self.dense.shape and "_transpose" not in self.inner:
            return columnwise  # MXFP8 keeps its column copy untransposed
        return as_matrix(columnwise.reshape(columnwise.shape[0], -1)).t().reshape(self.dense.shape)


OBSERVERS: list[Callable[[Cast], None]] = []
"""Called after each cast."""

CAPABILITY = [9, 0]
"""Compute capability that is played: below 10 a GEMM needs a transposed copy of per-tensor FP8 data."""


_SCALE = "scale"
"""The scale itself, which no tensor class keeps: only its float32 inverse."""


def te_version() -> tuple[int, int]:
    """Major and minor version of the installed Transformer Engine."""
    major, minor = installed("transformer_engine").split(".")[:2]
    return int(major), int(minor)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """The view in which kernels work: all dimensions but the last folded into rows."""
    return x.reshape(-1, x.shape[-1])


def quantize(
    tensor: torch.Tensor,
    quantizer: Any,
    output: Any = None,
    noop: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """``tex.quantize``: cast into a new tensor of the quantizer's class, or into ``output``.

    ``dtype``, for fused kernels: the dtype the result stands for, where ``tensor`` is a float32 intermediate.
    """
    if quantizer is None:
        return tensor
    if noop is not None and output is not None and float(noop.reshape(-1)[0]) != 0.0:
        return output
    inner = _CASTS[type(quantizer).__name__](tensor.detach(), quantizer)
    scale = inner.pop(_SCALE, None)
    for observer in OBSERVERS:
        observer(Cast(quantizer, tensor, scale, inner))
    return _wrap(quantizer, tensor, inner, dtype or tensor.dtype) if output is None else _update(output, inner)


def create_empty_quantized_tensor(quantizer: Any, shape: Any, dtype: Any, device: Any, pin_memory: bool = False) -> Any:
    """``tex.create_empty_quantized_tensor``: a tensor of zeros; nobody is told, since nothing was cast."""
    zeros = torch.zeros(tuple(shape), dtype=torch_dtype(dtype))
    inner = _CASTS[type(quantizer).__name__](zeros, quantizer)
    inner.pop(_SCALE, None)
    return _wrap(quantizer, zeros, inner, zeros.dtype)


def _per_tensor(x: torch.Tensor, quantizer: Any, scale: torch.Tensor) -> Inner:
    data = casts.cast_to_bytes(x.float() * scale, torch_dtype(quantizer.dtype))
    inner = {"_scale_inv": 1.0 / scale, _SCALE: scale}
    has_transpose = CAPABILITY[0] < 10
    if quantizer.rowwise_usage or not has_transpose:
        inner["_data"] = data
    if quantizer.columnwise_usage and has_transpose:
        inner["_transpose"] = fp8_transpose(data)
    return inner


def _delayed(x: torch.Tensor, quantizer: Any) -> Inner:
    # The kernel takes the maximum into row 0 of the history with an atomic, so casts since the last update add up.
    quantizer.amax.copy_(torch.fmax(quantizer.amax.reshape(-1)[0], casts.amax_ignoring_nan(x)))
    return _per_tensor(x, quantizer, quantizer.scale.reshape(-1)[:1].float().clone())


def _current(x: torch.Tensor, quantizer: Any) -> Inner:
    amax = _reduced(casts.amax_ignoring_nan(x), quantizer)
    rule = casts.ScaleRule(quantizer.amax_epsilon, quantizer.force_pow_2_scales)
    return _per_tensor(x, quantizer, rule.scale(amax.reshape(1), torch_dtype(quantizer.dtype)))


def _reduced(amax: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """The largest over the ranks that see parts of one tensor, where the quantizer asks for it."""
    if quantizer.with_amax_reduction and torch.distributed.is_initialized():
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    return amax


def _mxfp8(x: torch.Tensor, quantizer: Any) -> Inner:
    matrix, dtype, inner = as_matrix(x.float()), torch_dtype(quantizer.dtype), {}
    if quantizer.rowwise_usage:
        data, code = casts.mx_blocks(matrix, dtype)
        inner["_rowwise_data"] = data.view(x.shape)
        inner["_rowwise_scale_inv"] = _padded(code, _mx_scale_shape(x.shape, columnwise=False), casts.E8M0_ONE)
    if quantizer.columnwise_usage:
        data, code = casts.mx_blocks(matrix.t().contiguous(), dtype)
        shape = _mx_scale_shape(x.shape, columnwise=True)
        inner["_columnwise_data"] = data.t().contiguous().view(x.shape)
        inner["_columnwise_scale_inv"] = _padded(code.t(), shape, casts.E8M0_ONE)
    return inner


def _mx_scale_shape(shape: torch.Size, *, columnwise: bool) -> tuple[int, int]:
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if columnwise:
        return _round_up(rows // casts.MX_BLOCK, 4), _round_up(columns, 128)
    return _round_up(rows, 128), _round_up(columns // casts.MX_BLOCK, 4)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _padded(x: torch.Tensor, shape: Any, value: float) -> torch.Tensor:
    out = torch.full(tuple(shape), value, dtype=x.dtype)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def _blockwise(x: torch.Tensor, quantizer: Any) -> Inner:
    matrix, inner = as_matrix(x.float()), {}
    rule = casts.ScaleRule(quantizer.amax_epsilon, quantizer.force_pow_2_scales, torch.finfo(x.dtype).max)
    square = quantizer.block_scaling_dim == 2
    rows = quantizer.block_len if square else 1
    for wanted, side, columnwise in (
        (quantizer.rowwise_usage, matrix, False),
        (quantizer.columnwise_usage, matrix.t().contiguous(), True),
    ):
        if not wanted:
            continue
        data, scale_inv = casts.tiles(side, rows, quantizer.block_len, torch_dtype(quantizer.dtype), rule)
        shape = quantizer.get_columnwise_shape(x.shape) if columnwise else x.shape
        prefix = "_columnwise" if columnwise else "_rowwise"
        inner[prefix + "_data"] = data.view(tuple(shape))
        # 1-D tiles keep their scales as the GEMM reads them: [C / 128, R].
        scale_inv = scale_inv if square else scale_inv.t().contiguous()
        inner[prefix + "_scale_inv"] = _padded(scale_inv, quantizer.get_scale_shape(x.shape, columnwise), 0.0)
    return inner


def _nvfp4(x: torch.Tensor, quantizer: Any) -> Inner:
    nvfp4.refuse_extras(quantizer)
    matrix, inner = as_matrix(x.float()), {}
    amax = _reduced(casts.amax_ignoring_nan(x), quantizer).reshape(1)
    for wanted, side, columnwise in (
        (quantizer.rowwise_usage, matrix, False),
        (quantizer.columnwise_usage, matrix.t().contiguous(), True),
    ):
        if not wanted:
            continue
        codes, decode = nvfp4.blocks(side, nvfp4.tensor_scale(amax), quantizer.with_2d_quantization)
        shape = quantizer.get_columnwise_shape(x.shape) if columnwise else x.shape
        way = "columnwise" if columnwise else "rowwise"
        inner[f"_{way}_data"] = nvfp4.packed(codes).view(quantizer.convert_shape_for_fp4(tuple(shape)))
        inner[f"_{way}_scale_inv"] = _padded(decode, quantizer.get_scale_shape(x.shape, columnwise), 0)
        inner[f"_amax_{way}"] = amax.clone()
    return inner


_CASTS: dict[str, Callable[[torch.Tensor, Any], Inner]] = {
    "Float8Quantizer": _delayed,
    "Float8CurrentScalingQuantizer": _current,
    "MXFP8Quantizer": _mxfp8,
    "Float8BlockQuantizer": _blockwise,
    "NVFP4Quantizer": _nvfp4,
}

_TENSOR_CLASSES = {
    "Float8Quantizer": ("Float8Tensor", "float8_tensor"),
    "Float8CurrentScalingQuantizer": ("Float8Tensor", "float8_tensor"),
    "MXFP8Quantizer": ("MXFP8Tensor", "mxfp8_tensor"),
    "Float8BlockQuantizer": ("Float8BlockwiseQTensor", "float8_blockwise_tensor"),
    "NVFP4Quantizer": ("NVFP4Tensor", "nvfp4_tensor"),
}


def _tensor_class(quantizer: Any) -> Any:
    """The class a quantizer makes: a torch.Tensor subclass, or the bare storage where ``internal`` is set."""
    name, module = _TENSOR_CLASSES[type(quantizer).__name__]
    package = "transformer_engine.pytorch.tensor"
    if not quantizer.internal:
        return getattr(importlib.import_module(f"{package}.{module}"), name)
    if te_version() >= (2, 9):
        return getattr(importlib.import_module(f"{package}.storage.{module}_storage"), name + "Storage")
    return getattr(importlib.import_module(f"{package}._internal.{module}_base"), name + "Base")


def _wrap(quantizer: Any, dense: torch.Tensor, inner: Inner, dtype: torch.dtype) -> Any:
    """Inner tensors -> an instance of the quantizer's class; the constructors changed with TE 2.12."""
    kind, recent = type(quantizer).__name__, te_version() >= (2, 12)
    kept = "fp4_dtype" if kind == "NVFP4Quantizer" else "fp8_dtype"
    arguments: dict[str, Any] = {kept: quantizer.dtype, "quantizer": quantizer}
    if kind in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        names = {"data": "_data", "data_transpose": "_transpose", "fp8_scale_inv": "_scale_inv"}
    else:
        both = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        amaxes = ("amax_rowwise", "amax_columnwise") if kind == "NVFP4Quantizer" else ()
        names = {name: "_" + name for name in (*both, *amaxes)}
    arguments |= {name: inner.get(key) for name, key in names.items()}
    if kind in ("MXFP8Quantizer", "NVFP4Quantizer") and recent:
        arguments["with_gemm_swizzled_scales"] = False
    if kind == "Float8BlockQuantizer":
        arguments["is_2D_scaled"] = quantizer.block_scaling_dim == 2
        if not recent:
            arguments["data_format"] = importlib.import_module(
                "transformer_engine_torch"
            ).Float8BlockScaleTensorFormat.GEMM_READY
    if quantizer.internal:
        return _tensor_class(quantizer)(**arguments, **({"fake_dtype": dtype} if recent else {}))
    device = {"device": dense.device} if recent else {}
    return _tensor_class(quantizer)(shape=tuple(dense.shape), dtype=dtype, **arguments, **device)


def _update(output: Any, inner: Inner) -> Any:
    for name, value in inner.items():
        current = getattr(output, name, None)
        if current is not None and current.shape == value.shape:
            current.copy_(value)  # in place: CUDA graphs and workspaces hold on to the storage
        else:
            setattr(output, name, value)
    if hasattr(output, "_transpose"):
        output._transpose_invalid = output._transpose is None
    return output


def fp8_transpose(data: torch.Tensor, dtype: Any = None, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``tex.fp8_transpose``: bytes [..., C] -> [C, ...]."""
    turned = as_matrix(data).t().contiguous().view(data.shape[-1], *data.shape[:-1])
    if out is not None and out.shape == turned.shape:
        return out.copy_(turned)
    return turned
