"""Activation kernels of Transformer Engine: forward, backward and bias-gradient forms, each ending in a cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.hosts.te_cpu.quantizers import as_matrix, quantize
from tests.hosts.te_cpu.values import dense

Function = Callable[[torch.Tensor], torch.Tensor]
Kernel = Callable[..., Any]


def _gated(function: Function) -> Function:
    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, linear = x.chunk(2, -1)
        return function(gate) * linear

    return gated


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x) ** 2


_PLAIN: dict[str, Function] = {
    "gelu": _gelu,
    "qgelu": _quick_gelu,
    "relu": F.relu,
    "srelu": _squared_relu,
    "silu": F.silu,
}
_GATED: dict[str, Function] = {
    "glu": _gated(torch.sigmoid),
    "geglu": _gated(_gelu),
    "qgeglu": _gated(_quick_gelu),
    "reglu": _gated(F.relu),
    "sreglu": _gated(_squared_relu),
    "swiglu": _gated(F.silu),
}


def backward(name: str, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of activation ``name`` at ``x`` for the output gradient ``grad``, in float32."""
    function = (_PLAIN | _GATED)[name]
    with torch.enable_grad():
        leaf = x.detach().float().requires_grad_()
        y = function(leaf)
        return torch.autograd.grad(y, leaf, grad.detach().float().view_as(y))[0]


def kernels() -> dict[str, Kernel]:
    """``gelu``, ``dgelu``, ``dbias_dgelu``, ... by the names the compiled module has."""
    made: dict[str, Kernel] = {}
    for name, function in (_PLAIN | _GATED).items():
        made[name] = _forward_kernel(function)
        made["d" + name] = _backward_kernel(name)
    for name in _PLAIN:
        made["dbias_d" + name] = _bias_kernel(name)
    return made


def _forward_kernel(function: Function) -> Kernel:
    def kernel(x: torch.Tensor, quantizer: Any) -> Any:
        return quantize(function(dense(x)).to(x.dtype), quantizer)

    return kernel


def _backward_kernel(name: str) -> Kernel:
    def kernel(grad: torch.Tensor, x: torch.Tensor, quantizer: Any) -> Any:
        return quantize(backward(name, dense(grad), dense(x)).to(grad.dtype), quantizer)

    return kernel


def _bias_kernel(name: str) -> Kernel:
    def kernel(grad: torch.Tensor, x: torch.Tensor, quantizer: Any) -> list[Any]:
        return bgrad_quantize(backward(name, dense(grad), dense(x)).to(grad.dtype), quantizer)

    return kernel


def bgrad_quantize(grad: torch.Tensor, quantizer: Any) -> list[Any]:
    """``tex.bgrad_quantize``: the bias gradient and the cast of the gradient, in one kernel on a GPU."""
    return [as_matrix(grad).float().sum(0).to(grad.dtype), quantize(grad, quantizer)]
