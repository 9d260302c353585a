"""Delayed scaling's state inside a layer: tensors that are saved with the model, on its device, never waited for."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8dbg.numerics.census import amax_of
from fp8dbg.numerics.recipes import ROLES, Recipe
from fp8dbg.numerics.scales import FLT_MAX

STATE = ("fp8_scales", "fp8_amax_history", "fp8_updates")
"""Buffers of a layer, a row per role in the order of ``ROLES``: scale in force (float32), amax window (float32, slot 0
collects), and how many updates have set the scale (int64)."""

_REMEMBERED = 64
_SAMPLES = 15

Scale = float | Tensor


class _Pass(NamedTuple):
    """One forward that may be recomputed: enough of its input to know it again, and the scales it used."""

    key: Tensor
    scales: dict[str, Scale]


def recomputing() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing, of either kind."""
    return bool(torch._C._current_graph_task_id() != -1)


class DelayedScaling:
    """The delayed scaling of one layer; the numbers live in the layer's buffers.

    A forward in training first rolls what the last one collected (input and weight), then casts and collects. A
    recompute finds the scales of the forward that it repeats, in whatever order microbatches come back, and changes
    nothing. A backward casts the output gradient, collects, and rolls at its end. So every cast sees the scale that
    follows from all earlier casts of its role, as in Transformer Engine with one autocast region per forward; and an
    output gradient's scale in force can be read before the backward of its layer begins.
    """

    def __init__(self, layer: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        self._passes: deque[_Pass] = deque(maxlen=_REMEMBERED)
        size, device = int(recipe.parameters["history"]), next(layer.parameters()).device
        layer.register_buffer("fp8_scales", torch.ones(len(ROLES), device=device))
        layer.register_buffer("fp8_amax_history", torch.zeros(len(ROLES), size, device=device))
        layer.register_buffer("fp8_updates", torch.zeros(len(ROLES), dtype=torch.int64, device=device))

    def forward_scales(self, layer: nn.Module, operands: dict[str, Tensor]) -> dict[str, Scale]:
        """The scales for this forward's casts of input and weight (those given), and the bookkeeping they need."""
        amax = {role: _amax(tensor) for role, tensor in operands.items()}
        key = _key(operands, amax)
        if recomputing():
            for known in reversed(self._passes):
                if torch.equal(known.key, key):
                    return known.scales
            return self._in_force(layer)
        if layer.training:
            for role in operands:
                self._roll(layer, role)
                self._collect(layer, role, amax[role])
        scales = self._in_force(layer)
        if layer.training:
            self._passes.append(_Pass(key, scales))
        return scales

    def backward_scale(self, layer: nn.Module, grad_output: Tensor) -> Scale:
        """The scale for this backward's cast of the output gradient; the next one is then in force."""
        scale = self._in_force(layer)["grad_output"]
        if layer.training:
            self._collect(layer, "grad_output", _amax(grad_output))
            self._roll(layer, "grad_output")
        return scale

    def scale(self, layer: nn.Module, role: str) -> tuple[Scale, str]:
        """The scale in force, and "initial" if no update has ever set it, else "live"."""
        updates = int(layer.get_buffer("fp8_updates")[ROLES.index(role)])
        return self._in_force(layer)[role], "live" if updates else "initial"

    def reset(self, layer: nn.Module) -> None:
        """Back to scale 1 and an empty window, as after a resume that lost the state."""
        layer.get_buffer("fp8_scales").fill_(1.0)
        layer.get_buffer("fp8_amax_history").zero_()
        layer.get_buffer("fp8_updates").zero_()
        self._passes.clear()

    def _in_force(self, layer: nn.Module) -> dict[str, Scale]:
        scales = layer.get_buffer("fp8_scales")
        if scales.device.type == "cpu":
            return dict(zip(ROLES, scales.tolist(), strict=True))
        return dict(zip(ROLES, scales.clone().unbind(), strict=True))

    def _collect(self, layer: nn.Module, role: str, amax: Tensor) -> None:
        slot = layer.get_buffer("fp8_amax_history")[ROLES.index(role), 0]
        slot.copy_(torch.maximum(slot, amax))

    def _roll(self, layer: nn.Module, role: str) -> None:
        i, over_window = ROLES.index(role), self.recipe.parameters["algorithm"] == "max"
        scale, updates = layer.get_buffer("fp8_scales")[i], layer.get_buffer("fp8_updates")[i]
        history = layer.get_buffer("fp8_amax_history")[i]
        roll_(history, scale, updates, float(self.recipe.scaled_max(role)), over_window)


def roll_(history: Tensor, scale: Tensor, updates: Tensor, scaled_max: float, over_window: bool) -> None:
    """One update, in place and without reading a value back: the twin of ``DelayedState.update``, bit for bit.

    ``history`` float32 [length], ``scale`` float32 [], ``updates`` int64 []. See ``DelayedState`` for the rules.
    """
    last = history[0].clone()
    rolled = history.roll(-1)
    amax = rolled.amax() if over_window else last
    usable = (last != 0) & amax.isfinite() & (amax > 0)
    # torch makes number / tensor a product with the reciprocal, which rounds twice
    wanted = torch.full_like(amax, scaled_max).div(amax).clamp(max=float(FLT_MAX))
    scale.copy_(torch.where(usable, wanted, scale))
    updates.add_(usable)
    rolled[0] = 0.0
    history.copy_(torch.where(last != 0, rolled, history))


def _amax(tensor: Tensor) -> Tensor:
    """What an fmax-style reduction gives, float32 [], on the tensor's device: Inf counts, NaN does not."""
    if tensor.device.type == "cpu":
        return torch.tensor(float(amax_of(tensor)))
    magnitudes = tensor.detach().abs().float() if tensor.numel() else tensor.new_zeros(1).float()
    return magnitudes.nan_to_num(nan=0.0, posinf=torch.inf).amax()


def _key(operands: dict[str, Tensor], amax: dict[str, Tensor]) -> Tensor:
    """A few numbers that tell one forward's operands from another's."""
    parts = [torch.stack(list(amax.values()))]
    for tensor in operands.values():
        flat = tensor.detach().reshape(-1)
        parts.append(flat[:: max(1, flat.numel() // _SAMPLES)].float())
    return torch.cat(parts)
