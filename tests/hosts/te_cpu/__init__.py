"""Transformer Engine on a machine without a GPU: a CPU stand-in for its compiled module.

Transformer Engine's own Python (modules, quantizers, recipes, debug features) runs unmodified; only
``transformer_engine_torch`` is replaced, and one CUDA device is played on the CPU. Serves 2.8 and 2.20.

    from tests.hosts import te_cpu
    te = te_cpu.install()          # before anything imports transformer_engine

For tests and examples only: numerics are the formulas of the CUDA kernels with float32 accumulation, not checked
against a GPU; a kernel that is not here can be imported and raises when it is called.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from typing import Any

import torch

from tests.hosts.te_cpu import activations, enums, fake_cuda, fake_triton, gemm, kernels, quantizers, values
from tests.hosts.te_cpu.quantizers import OBSERVERS, te_version

__all__ = ["OBSERVERS", "absent", "install", "te_version"]

_EXTENSION = "transformer_engine_torch"


def absent() -> str | None:
    """Why Transformer Engine cannot be run here, or None if it can."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "transformer_engine is not installed"
    if te_version() < (2, 8):
        return f"the CPU stand-in serves Transformer Engine 2.8 and later, not {te_version()}"
    return None


def install(capability: tuple[int, int] = (9, 0), also_for: tuple[str, ...] = ()) -> Any:
    """Put the stand-in in place and return ``transformer_engine.pytorch``.

    ``capability`` is the GPU generation to play: (9, 0) Hopper, (10, 0) Blackwell; the first call decides.
    ``also_for`` names further packages that must see a GPU ("megatron").
    """
    fake_cuda.AUDIENCE.update(also_for)
    if _EXTENSION in sys.modules:
        return sys.modules["transformer_engine.pytorch"]
    os.environ.setdefault("NVTE_PROJECT_BUILDING", "1")  # do not load cuDNN, NVRTC and the core library
    os.environ.setdefault("NVTE_TORCH_COMPILE", "0")  # its fusions compile for a GPU
    quantizers.CAPABILITY[:] = capability
    fake_cuda.play(capability)
    with fake_triton.importable():
        sys.modules[_EXTENSION] = _extension()
        te = _import_host()
    _allow_every_recipe()
    return te


def _import_host() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        host = importlib.import_module("transformer_engine")  # cannot find its .so and goes on without `pytorch`
        common = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
        sys.modules.pop("transformer_engine.pytorch", None)
        te = importlib.import_module("transformer_engine.pytorch")
    host.pytorch = te  # type: ignore[attr-defined]
    return te


def _allow_every_recipe() -> None:
    """Support checks ask the device and the CUDA version; and dequantisation would move block formats to a GPU."""
    newer = sys.modules.get("transformer_engine.pytorch.quantization")
    quantization: Any = newer or sys.modules["transformer_engine.pytorch.fp8"]
    for recipe in ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling"):
        setattr(quantization, f"check_{recipe}_support", lambda: (True, ""))
        if hasattr(quantization, f"_{recipe.upper()}_SUPPORT"):
            setattr(quantization, f"_{recipe.upper()}_SUPPORT", (True, ""))
    for module, function in (("mxfp8_tensor_storage", "_FromMXFP8Func"), ("nvfp4_tensor_storage", "_FromNVFP4Func")):
        storage: Any = sys.modules.get(f"transformer_engine.pytorch.tensor.storage.{module}")
        if storage is not None:
            getattr(storage, function).forward = staticmethod(lambda ctx, x, dtype: values.dequantize(x, dtype))


def _extension() -> types.ModuleType:
    module = types.ModuleType(_EXTENSION)
    module.__file__ = __file__
    module.__spec__ = importlib.machinery.ModuleSpec(_EXTENSION, None)
    for name, cls in enums.classes(te_version()).items():
        setattr(module, name, cls)
    for name, kernel in _kernels().items():
        setattr(module, name, torch.no_grad()(kernel))
    module.__all__ = [name for name in vars(module) if not name.startswith("_")]  # type: ignore[attr-defined]
    module.__getattr__ = _missing_kernel  # type: ignore[method-assign]
    return module


def _missing_kernel(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"The CPU stand-in for Transformer Engine has no kernel {name}.")

    return missing


def _kernels() -> dict[str, Any]:
    softmaxes = ("", "masked_", "upper_triang_masked_", "aligned_causal_masked_")
    named: tuple[Any, ...] = (
        quantizers.quantize,
        quantizers.create_empty_quantized_tensor,
        values.dequantize,
        quantizers.fp8_transpose,
        activations.bgrad_quantize,
        gemm.generic_gemm,
        gemm.te_general_grouped_gemm,
        gemm.split_quantize,
        gemm.multi_tensor_quantize,
        kernels.layernorm_fwd,
        kernels.layernorm_bwd,
        kernels.rmsnorm_fwd,
        kernels.rmsnorm_bwd,
        kernels.fused_amax_and_scale_update_after_reduction,
        kernels.compute_amax,
        kernels.scaled_softmax_forward,
        kernels.scaled_masked_softmax_forward,
        kernels.scaled_upper_triang_masked_softmax_forward,
        kernels.multi_tensor_adam,
        kernels.multi_tensor_l2norm,
        kernels.multi_tensor_scale,
    )
    made = {function.__name__: function for function in named} | activations.kernels()
    made |= {f"scaled_{kind}softmax_backward": kernels.scaled_softmax_backward for kind in softmaxes}
    made["scaled_aligned_causal_masked_softmax_forward"] = kernels.scaled_upper_triang_masked_softmax_forward
    return made | _answers()


def _answers() -> dict[str, Any]:
    """Questions about the machine."""
    no_backend = enums.classes(te_version())["NVTE_Fused_Attn_Backend"].NVTE_No_Backend
    backend = (no_backend, "CPU stand-in") if te_version() >= (2, 17) else no_backend
    values: dict[str, Any] = {
        "get_cublasLt_version": 130100,
        "get_cudnn_version": 91400,
        "get_num_cublas_streams": 4,
        "get_fused_attn_backend": backend,
        "ubuf_built_with_mpi": False,
        "nvte_built_with_cublasmp": False,
        "device_supports_multicast": False,
        "get_stream_priority_range": (0, 0),
    }
    return {name: _constant(value) for name, value in values.items()}


def _constant(value: Any) -> Any:
    return lambda *args, **kwargs: value
