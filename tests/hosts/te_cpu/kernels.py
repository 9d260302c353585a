"""The other kernels of Transformer Engine on a CPU: norms, softmax, the optimizer, and the delayed-scaling update."""

from __future__ import annotations

from typing import Any

import torch

from tests.hosts.te_cpu import casts
from tests.hosts.te_cpu.enums import torch_dtype
from tests.hosts.te_cpu.quantizers import as_matrix, quantize

# --- norms: the fused kernels end in the cast, so no Python call of the host shows it


def _norm_weight(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1.0 if zero_centered else weight.float()


def _norm_output(y: torch.Tensor, dtype: Any, out: Any, quantizer: Any) -> Any:
    if type(quantizer).__name__ == "Float8Quantizer":
        # The only cast that is fused into the norm: it starts from the float32 value, never rounded to BF16.
        return quantize(y, quantizer, out, dtype=torch_dtype(dtype))
    y = y.to(torch_dtype(dtype))
    if quantizer is not None:
        return quantize(y, quantizer, out)
    return y if out is None else out.copy_(y)


def layernorm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """``tex.layernorm_fwd``: normalised (and cast) output, mean, reciprocal deviation."""
    gamma = _norm_weight(weight, zero_centered_gamma)
    beta = None if bias is None else bias.float()
    y, mean, rsigma = torch.native_layer_norm(x.float(), list(gamma.shape), gamma, beta, eps)
    return [_norm_output(y, dtype, out, quantizer), mean.squeeze(-1), rsigma.squeeze(-1)]


def rmsnorm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """``tex.rmsnorm_fwd``: normalised (and cast) output, no mean, reciprocal deviation."""
    values = x.float()
    rsigma = (values.pow(2).mean(-1) + eps).rsqrt()
    y = values * rsigma[..., None] * _norm_weight(weight, zero_centered_gamma)
    return [_norm_output(y, dtype, out, quantizer), None, rsigma]


def layernorm_bwd(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """``tex.layernorm_bwd``: gradients of input, weight and bias."""
    g = grad.float().view_as(x)
    normed = (x.float() - mean[..., None]) * rsigma[..., None]
    weighted = g * _norm_weight(gamma, zero_centered_gamma)
    centred = weighted - weighted.mean(-1, keepdim=True) - normed * (weighted * normed).mean(-1, keepdim=True)
    dx = (centred * rsigma[..., None]).to(x.dtype)
    return [dx, as_matrix(g * normed).sum(0).to(gamma.dtype), as_matrix(g).sum(0).to(gamma.dtype)]


def rmsnorm_bwd(
    grad: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """``tex.rmsnorm_bwd``: gradients of input and weight."""
    g = grad.float().view_as(x)
    normed = x.float() * rsigma[..., None]
    weighted = g * _norm_weight(gamma, zero_centered_gamma)
    dx = (weighted - normed * (weighted * normed).mean(-1, keepdim=True)) * rsigma[..., None]
    return [dx.to(x.dtype), as_matrix(g * normed).sum(0).to(gamma.dtype)]


# --- delayed scaling


def fused_amax_and_scale_update_after_reduction(
    reduced: torch.Tensor,
    histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    algorithm: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Roll each history and set each scale, in place; ``reduced`` holds every column's amax over the ranks."""
    start = 0
    for history, scale in zip(histories, scales, strict=True):
        last = reduced[start : start + history.shape[1]]
        start += history.shape[1]
        amax = casts.updated_history(history, torch.where(last != 0, last, history[0]), algorithm == "max")
        scale.copy_(casts.delayed_scale(amax, scale, torch_dtype(fp8_dtype), margin))


def compute_amax(x: torch.Tensor, amax: torch.Tensor) -> None:
    """``tex.compute_amax``."""
    amax.copy_(casts.amax_ignoring_nan(x.detach()))


# --- softmax, for the unfused attention


def scaled_masked_softmax_forward(x: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Softmax of x * scale; masked positions get -10000, as in the CUDA kernel."""
    y = x.float() * scale
    return torch.softmax(y if mask is None else y.masked_fill(mask.bool(), -10000.0), -1).to(x.dtype)


def scaled_softmax_forward(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax of x * scale."""
    return scaled_masked_softmax_forward(x, None, scale)


def scaled_upper_triang_masked_softmax_forward(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal softmax of x * scale, aligned to the last row."""
    rows, columns = x.shape[-2:]
    return scaled_masked_softmax_forward(x, torch.ones(rows, columns).triu(1 + columns - rows), scale)


def scaled_softmax_backward(grad: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """Gradient of any of the softmaxes above, from its output."""
    g, values = grad.float(), y.float()
    return ((g - (g * values).sum(-1, keepdim=True)) * values * scale).to(grad.dtype)


# --- optimizer


def multi_tensor_adam(
    chunk: int,
    noop: Any,
    lists: list[list[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    adamw: int,
    bias_correction: int,
    weight_decay: float,
    *rest: Any,
) -> None:
    """``tex.multi_tensor_adam``: lists are gradients, parameters, first and second moments, master weights if any."""
    masters = lists[4] if len(lists) > 4 else lists[1]
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for grad, parameter, m, v, master in zip(*lists[:4], masters, strict=True):
        g, w = grad.float(), master.float()
        if not adamw:
            g = g + weight_decay * w
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        update = (m / first) / ((v / second).sqrt() + eps) + (weight_decay * w if adamw else 0.0)
        master.copy_(w - lr * update)
        if master is not parameter:
            parameter.copy_(master)


def multi_tensor_l2norm(
    chunk: int, noop: Any, lists: list[list[torch.Tensor]], per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``tex.multi_tensor_l2norm``: the norm of all and of each."""
    norms = torch.stack([t.float().norm() for t in lists[0]])
    return norms.norm().reshape(1), norms


def multi_tensor_scale(chunk: int, noop: Any, lists: list[list[torch.Tensor]], scale: float) -> None:
    """``tex.multi_tensor_scale``: second list = first list * scale."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * scale)
