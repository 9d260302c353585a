"""The norm inside Transformer Engine's fused modules: computed once more, or on unsampled steps only its amax found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8dbg.hooks import nvidia_te_state as state
from fp8dbg.numerics.census import Amax, amax_of

_graph_task = torch._C._current_graph_task_id

TAME = 1e15
"""Inputs and norm weights below this leave nothing that is not finite: sums of squares and products fit float32."""


def normed(module: Any, x: Tensor, recipe: str) -> Tensor:
    """The module's norm of x: in float32 where the kernel casts to FP8 itself (delayed scaling), else rounded to x's.

    Transformer Engine fuses the cast into the norm for delayed scaling only, and not where the norm is returned too.
    """
    weight = module.layer_norm_weight.to(x.dtype)  # under autocast the norm's parameters are cast as the input is
    bias = None if module.normalization == "RMSNorm" else module.layer_norm_bias.to(x.dtype)
    y = norm(x, weight, bias, module.eps, bool(getattr(module, "zero_centered_gamma", False)))
    fused = recipe == "delayed" and not getattr(module, "return_layernorm_output", False)
    result: Tensor = y if fused else y.to(x.dtype)
    return result


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """LayerNorm of x in float32, as the kernels compute it; RMSNorm where there is no bias."""
    values, gamma = x.detach().float(), weight.detach().float() + (1.0 if zero_centered else 0.0)
    if bias is None:
        return functional.rms_norm(values, gamma.shape, gamma, eps)
    return functional.layer_norm(values, gamma.shape, gamma, bias.detach().float(), eps)


class CastAmax:
    """The amax that a module's cast of its normalised input has left in ``amax_history[0]``, where that is certain.

    Transformer Engine's casts keep the largest there until an update sets it to 0, at the end of an outermost
    autocast. Every call of the module is noticed here; so a value that is not the one after the call before is this
    call's own: larger, or the first since an update. The same value proves nothing, and checkpointing, which puts
    histories aside and back, ends it for good. On a device a look would wait: there it is never known.
    """

    def __init__(self) -> None:
        self._before: float | None = None
        self._now: float | None = None
        self._ended = False

    def notice(self, module: nn.Module, slot: int) -> None:
        """A call of the module has cast its input."""
        self._now, before = None, self._before
        held = None if self._ended else state.state_of(module, "input")
        if held is None or not held.amax_history.is_cpu or not state.in_fp8(module):
            return
        self._ended = _graph_task() != -1 or state.recompute_phase() or _gathers(module)
        self._before = float(held.amax_history.numpy()[0, slot])
        if before is not None and before != self._before and not self._ended:
            self._now = self._before

    def of(self, module: nn.Module, given: Any) -> Amax | None:
        """The amax of the normalised input of the call just noticed, given what the module was; None: not known.

        Casts pass over NaN, so it is known only where there can be none: the input and the norm's weights are tame.
        """
        if self._now is None or not isinstance(given, Tensor) or not self._now < TAME:
            return None
        norm = (p for name, p in module._parameters.items() if name.startswith("layer_norm_") and p is not None)
        tame = all(_is_tame(tensor.detach()) for tensor in (given, *norm))
        return Amax((self._now, 0, 0), given.numel()) if tame else None


def _is_tame(tensor: Tensor) -> bool:
    found = amax_of(tensor)
    return not found.nan and not found.inf and (found.amax or 0.0) < TAME


def _gathers(module: nn.Module) -> bool:
    """Whether the cast may read other ranks' tokens too."""
    return bool(module.__dict__.get("sequence_parallel", False))
