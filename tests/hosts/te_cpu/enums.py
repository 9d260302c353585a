"""The enumerations and empty classes of ``transformer_engine_torch``, with the values its C++ headers give them.

Transformer Engine's Python asserts that its own mirrors of these agree, so the numbers matter.
Sources: csrc/common.h and transformer_engine.h of Transformer Engine 2.20.2 and 2.8.0.
"""

from __future__ import annotations

import enum
from typing import Any

import torch


class DType(enum.IntEnum):
    """``transformer_engine::DType``."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


TORCH_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a TE dtype code; a torch dtype passes through."""
    return dtype if isinstance(dtype, torch.dtype) else TORCH_DTYPES[DType(int(dtype))]


class FP8TensorMeta:
    """Scale and amax history as Transformer Engine 1.x kept them."""

    def __init__(self) -> None:
        self.scale: torch.Tensor | None = None
        self.scale_inv: torch.Tensor | None = None
        self.amax_history: torch.Tensor | None = None


class CommOverlapHelper:
    """Userbuffers bookkeeping: named by annotations, never made on a CPU."""


class CommOverlapCore:
    """Userbuffers base class: named by annotations, never made on a CPU."""


class CommOverlap(CommOverlapCore):
    """Userbuffers collective overlap: named by annotations, never made on a CPU."""


class CommOverlapP2P(CommOverlapCore):
    """Userbuffers ring overlap: named by annotations, never made on a CPU."""


# Members in order, numbered from 0.
_COUNTED = {
    "NVTE_Bias_Type": "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI",
    "NVTE_Mask_Type": "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
    "NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    "NVTE_Softmax_Type": "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
    "NVTE_QKV_Layout": "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD "
    "NVTE_BS3HD NVTE_BSH3D NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD "
    "NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD "
    "NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD "
    "NVTE_Paged_KV_BSHD_BSHD_BSHD NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD "
    "NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD "
    "NVTE_BHSD_BHSD_BHSD NVTE_QKV_Layout_NOT_SET",
    "Float8BlockScaleTensorFormat": "GEMM_READY COMPACT INVALID",
    "CommOverlapType": "RS AG",
    "CommOverlapAlgo": "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS "
    "SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
    "NVTERoutingMapFormat": "BYTEMAP BITMAP_U8",
    "NVTEQBHistogramMode": "TWO_KERNEL FUSED_ATOMIC",
    "FP8FwdTensors": " ".join(f"GEMM{i}_{kind}" for i in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT")),
    "FP8BwdTensors": " ".join(f"GRAD_{kind}{i}" for i in (1, 2, 3) for kind in ("OUTPUT", "INPUT")),
}

# Members whose values are not their position.
_NUMBERED = {
    "NVTEScalingMode": {
        "NVTE_DELAYED_TENSOR_SCALING": 0,
        "NVTE_MXFP8_1D_SCALING": 1,
        "NVTE_BLOCK_SCALING_1D": 2,
        "NVTE_BLOCK_SCALING_2D": 3,
        "NVTE_NVFP4_1D_SCALING": 4,
        "NVTE_INVALID_SCALING": 100,
    },
    "NVTE_QKV_Format": {
        "NVTE_BSHD": 1,
        "NVTE_SBHD": 0,
        "NVTE_THD": 2,
        "NVTE_SBHD_2BSHD": 4,
        "NVTE_BSHD_2SBHD": 3,
        "NVTE_THD_2BSHD": 5,
        "NVTE_THD_2SBHD": 6,
        "NVTE_BHSD": 7,
        "NVTE_QKV_Format_NOT_SET": 8,
    },
}

_ATTENTION_BACKENDS = {"NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2, "NVTE_No_Backend": -1}


def classes(version: tuple[int, int]) -> dict[str, Any]:
    """Every class and enumeration of the module by name, as Transformer Engine ``version`` (major, minor) has them."""
    made: dict[str, Any] = {
        name: enum.IntEnum(name, [(member, i) for i, member in enumerate(members.split())])
        for name, members in _COUNTED.items()
    }
    made |= {name: enum.IntEnum(name, list(members.items())) for name, members in _NUMBERED.items()}
    backends = dict(_ATTENTION_BACKENDS)
    if version < (2, 17):
        backends = {"NVTE_F16_max512_seqlen": 0} | backends
    made["NVTE_Fused_Attn_Backend"] = enum.IntEnum("NVTE_Fused_Attn_Backend", list(backends.items()))
    for cls in (DType, FP8TensorMeta, CommOverlapHelper, CommOverlapCore, CommOverlap, CommOverlapP2P):
        made[cls.__name__] = cls
    return made
