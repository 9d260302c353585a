"""Delayed scaling's state inside a layer: tensors that are saved with the model, on its device, never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8dbg.numerics import tiles
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
        amax = _amax(operands)
        key = _key(operands, amax)
        if recomputing():
            for known in reversed(self._passes):
                if torch.equal(known.key, key):
                    return known.scales
            return self._in_force(layer)
        if layer.training:
            self._roll(layer, operands)
            self._collect(layer, operands, amax)
        scales = self._in_force(layer)
        if layer.training:
            self._passes.append(_Pass(key, scales))
        return scales

    def backward_scale(self, layer: nn.Module, grad_output: Tensor) -> Scale:
        """The scale for this backward's cast of the output gradient; the next one is then in force."""
        scale, operand = self._in_force(layer)["grad_output"], {"grad_output": grad_output}
        if layer.training:
            self._collect(layer, operand, _amax(operand))
            self._roll(layer, operand)
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
        values = scales.tolist() if tiles.on_host(scales) else scales.clone().unbind()
        return dict(zip(ROLES, values, strict=True))

    def _collect(self, layer: nn.Module, roles: Iterable[str], amax: Tensor) -> None:
        slots = layer.get_buffer("fp8_amax_history")[_rows(roles), 0]
        slots.copy_(torch.maximum(slots, amax))

    def _roll(self, layer: nn.Module, roles: Iterable[str]) -> None:
        rows, over_window = _rows(roles), self.recipe.parameters["algorithm"] == "max"
        scales, history, updates = (layer.get_buffer(name)[rows] for name in STATE)
        # the roles that move together, input and weight, have the same format
        roll_(history, scales, updates, float(self.recipe.scaled_max(next(iter(roles)))), over_window)


def roll_(history: Tensor, scale: Tensor, updates: Tensor, scaled_max: float, over_window: bool) -> None:
    """One update, in place and without reading a value back: the twin of ``DelayedState.update``, bit for bit.

    ``history`` float32 [roles, length], ``scale`` float32 [roles], ``updates`` int64 [roles]. See ``DelayedState``.
    """
    last = history[:, 0].clone()
    rolled = history.roll(-1, dims=1)
    amax = rolled.amax(dim=1) if over_window else last
    usable = (last != 0) & amax.isfinite() & (amax > 0)
    # torch makes number / tensor a product with the reciprocal, which rounds twice
    wanted = torch.full_like(amax, scaled_max).div(amax).clamp(max=float(FLT_MAX))
    scale.copy_(torch.where(usable, wanted, scale))
    updates.add_(usable)
    rolled[:, 0] = 0.0
    history.copy_(torch.where((last != 0)[:, None], rolled, history))


def _rows(roles: Iterable[str]) -> slice:
    """The rows of these roles, which are neighbours."""
    places = [ROLES.index(role) for role in roles]
    return slice(min(places), max(places) + 1)


def _amax(operands: dict[str, Tensor]) -> Tensor:
    """What an fmax-style reduction gives, float32 [roles], on the tensors' device: Inf counts, NaN does not."""
    tensors = [t.detach() for t in operands.values()]
    if tiles.on_host(tensors[0]):
        return torch.tensor([float(amax_of(t)) for t in tensors])
    filled = [t if t.numel() else t.new_zeros(1) for t in tensors]
    return torch.stack([t.abs().float().nan_to_num(nan=0.0, posinf=torch.inf).amax() for t in filled])


def _key(operands: dict[str, Tensor], amax: Tensor) -> Tensor:
    """A few numbers that tell one forward's operands from another's."""
    parts = [amax]
    for tensor in operands.values():
        flat = tensor.detach().reshape(-1)
        parts.append(flat[:: max(1, flat.numel() // _SAMPLES)].float())
    return torch.cat(parts)
