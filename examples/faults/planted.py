"""The faults: each planted in a model by a few lines, with what is known of it: layer, tensor, onset, right action."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from examples.faults.lab import Scene

FACTOR = 1e6
"""How much larger a planted outlier is: beyond E4M3's reach of 458,752."""

Undo = Callable[[], None]
"""Ends a fault of one batch, after its step."""


# Channels made larger by a factor where something computes them and smaller where something reads them: in exact
# arithmetic the function is what it was.


@torch.no_grad()
def swiglu_outlier(scene: Scene, block: int) -> None:
    """Rows of ``up`` times the factor, the columns of ``down`` that read them divided by it."""
    up, down = (_linear(scene, f"layers.{block}.mlp.{name}") for name in ("up", "down"))
    _exchange(scene, (up.weight, 0), (down.weight, 1), (5, 40))


@torch.no_grad()
def query_key_outlier(scene: Scene, block: int) -> None:
    """A pair of query channels (that rotary positions mix) times the factor, the key's divided by it."""
    qkv = _linear(scene, f"layers.{block}.attention.qkv")
    head = scene.size.width // scene.size.heads
    rows = (3, 3 + head // 2)
    keys = tuple(scene.size.width + row for row in rows)
    qkv.weight[list(rows)] *= FACTOR
    qkv.weight[list(keys)] /= FACTOR
    scene.hold(qkv.weight, 0, (*rows, *keys))


@torch.no_grad()
def value_outlier(scene: Scene, block: int) -> None:
    """Value channels times the factor, the columns of the attention's output projection divided by it."""
    qkv, out = (_linear(scene, f"layers.{block}.attention.{name}") for name in ("qkv", "out"))
    channels = torch.tensor([2, 11])
    rows = channels + 2 * scene.size.width
    qkv.weight[rows] *= FACTOR
    out.weight[:, channels] /= FACTOR
    scene.hold(qkv.weight, 0, rows.tolist())
    scene.hold(out.weight, 1, channels.tolist())


@torch.no_grad()
def embedding_outlier(scene: Scene) -> None:
    """A channel of the embedding times the factor, the projection's column divided by it."""
    table = scene.model.get_parameter("embed.0.weight")
    _exchange(scene, (table, 1), (_linear(scene, "embed.1").weight, 1), (7,))


@torch.no_grad()
def head_outlier(scene: Scene) -> None:
    """A gain of the last norm times the factor, the head's column divided by it."""
    _exchange(scene, (scene.model.get_parameter("norm.weight"), 0), (_linear(scene, "head").weight, 1), (7,))


def hidden_outlier(scene: Scene) -> None:
    """Outliers in the embedding and, behind it, before the head: what the first destroys, the second cannot harm."""
    embedding_outlier(scene)
    head_outlier(scene)


def _exchange(
    scene: Scene, larger: tuple[nn.Parameter, int], smaller: tuple[nn.Parameter, int], index: tuple[int, ...]
) -> None:
    for (parameter, dim), factor in ((larger, FACTOR), (smaller, 1 / FACTOR)):
        chosen = torch.tensor(index)
        parameter.index_copy_(dim, chosen, parameter.index_select(dim, chosen) * factor)
        scene.hold(parameter, dim, index)


# Faults of the scale.


def amax_jump(scene: Scene, norms: Iterable[str], factor: float = 16.0) -> Undo:
    """One batch whose activations behind these norms are larger by a factor."""
    undos = [_on_output(scene, norm, lambda y: y * factor) for norm in norms]

    def undo() -> None:
        for each in undos:
            each()

    return undo


def norms(scene: Scene) -> list[str]:
    """The names of the model's norms."""
    return [name for name, module in scene.model.named_modules() if isinstance(module, nn.RMSNorm)]


def lone_spike(scene: Scene, norm: str, size: float = 1e6) -> Undo:
    """One batch with a single huge value behind a norm: it stays in the amax window."""

    def spike(y: Tensor) -> Tensor:
        one = torch.zeros_like(y)
        one[0, -1, 3] = size  # the last position: no other token attends to it
        return y + one

    return _on_output(scene, norm, spike)


def infinite_gradient(scene: Scene, layer: str) -> Undo:
    """One batch whose gradient overflows behind a layer; that gradient is dropped."""

    def overflow(grad: Tensor) -> Tensor:
        return grad.index_fill(0, torch.tensor([0]), torch.inf)

    def hook(_module: nn.Module, _inputs: object, y: Tensor) -> None:
        y.register_hook(overflow)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    return scene.model.get_submodule(layer).register_forward_hook(hook).remove


def scale_never_updated(scene: Scene, layer: str) -> None:
    """A layer whose scales stay at 1: its update is left out. In BF16 there is none."""
    scaling = getattr(_linear(scene, layer), "_scaling", None)
    if scaling is not None:
        vars(scaling)["_roll"] = lambda layer, roles: None


def state_lost(scene: Scene, layer: str) -> None:
    """A layer that comes back from a checkpoint without its scales."""
    linear = _linear(scene, layer)
    linear._scaling.reset(linear)


def spread_gradients(scene: Scene) -> None:
    """Tokens that weigh log-normally (sigma 3) in the loss, so that gradients span more binades than E4M3."""
    weights = torch.randn(scene.size.rows * scene.size.length, generator=torch.Generator().manual_seed(5)).mul(3).exp()
    scene.token_weights = weights / weights.mean()


# Faults of the software.


def nan_weight_gradient(scene: Scene, layer: str) -> None:
    """The weight gradient of one layer becomes NaN; its operands are finite."""
    linear = _linear(scene, layer)
    usual = linear.forward

    def forward(x: Tensor) -> Tensor:
        y = usual(x)
        if y.grad_fn is not None:
            y.grad_fn.register_hook(lambda given, _: (given[0], given[1] * torch.nan, *given[2:]))
        return y

    vars(linear)["forward"] = forward


@torch.no_grad()
def dead_layer(scene: Scene, layer: str) -> None:
    """A weight becomes zero in every element and stays so."""
    weight = _linear(scene, layer).weight
    weight.zero_()
    scene.hold(weight, 0, range(weight.shape[0]))


def stale_weight(scene: Scene, layer: str) -> None:
    """A layer computes with the weight as it is now, whatever its parameter becomes."""
    linear = _linear(scene, layer)
    usual, cached = linear.forward, linear.weight.detach().clone()

    def forward(x: Tensor) -> Tensor:
        # the parameter keeps its gradient; only the value is that of another step
        vars(linear)["weight"] = linear.weight + (cached - linear.weight).detach()
        try:
            return usual(x)
        finally:
            del vars(linear)["weight"]

    vars(linear)["forward"] = forward


def few_bits(scene: Scene, layer: str, bits: int = 4) -> None:
    """A layer's fprop adds its products up in a few bits, four at a time."""
    linear = _linear(scene, layer)
    usual = linear.forward

    def forward(x: Tensor) -> Tensor:
        y = usual(x)
        with torch.no_grad():
            wide, weight = x.float(), linear.weight.float()
            total = torch.zeros_like(y, dtype=torch.float32)
            for start in range(0, weight.shape[1], 4):
                total = _rounded(total + wide[..., start : start + 4] @ weight[:, start : start + 4].t(), bits)
            lost = (total - wide @ weight.t()).to(y.dtype)
        return y + lost

    vars(linear)["forward"] = forward


def _rounded(x: Tensor, bits: int) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)


def amax_not_reduced(scene: Scene, layer: str) -> None:
    """A layer whose amax this rank keeps to itself."""
    scene.not_reduced.add(layer)


def random_text(scene: Scene) -> Undo:
    """One batch of codes without sense: the loss spikes, and FP8 has no part in it."""
    scene.change = lambda codes, following: (codes, torch.randint_like(following, 128))

    def undo() -> None:
        scene.change = None

    return undo


def _on_output(scene: Scene, module: str, change: Callable[[Tensor], Tensor]) -> Undo:
    return scene.model.get_submodule(module).register_forward_hook(lambda _module, _inputs, y: change(y)).remove


class _Linear(Protocol):
    """A layer, as the faults see it: plain where the model is in BF16."""

    weight: nn.Parameter
    forward: Callable[[Tensor], Tensor]
    _scaling: Any


def _linear(scene: Scene, layer: str) -> _Linear:
    found: Any = scene.model.get_submodule(layer)
    linear: _Linear = found
    return linear
