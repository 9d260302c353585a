"""The two faults of the demo: one that FP8 alone cannot stand, and one batch whose activations jump."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from fp8dbg.demo.model import SwiGLU


@torch.no_grad()
def plant_outliers(mlp: SwiGLU, optimizer: torch.optim.Optimizer, neurons: Sequence[int], factor: float = 1e6) -> None:
    """Make some rows of ``up`` larger and the columns of ``down`` that read them smaller, by the same factor.

    In exact arithmetic, and to within rounding in BF16, the function is what it was. Under one FP8 scale per tensor
    the outliers take the whole range: every other weight of ``up`` and every other input of ``down`` becomes zero.

    Training knows nothing of the factor: a step of the usual size would overwrite the small columns, and their
    gradients, larger by the factor, would have all others clipped. So from here on the neurons have no gradient and
    keep their weights.

    Args:
        mlp: the layer's SwiGLU.
        optimizer: what trains it.
        neurons: rows of ``up``.
        factor: how much larger.
    """
    chosen = torch.tensor(neurons)
    mlp.up.weight[chosen] *= factor
    mlp.down.weight[:, chosen] /= factor
    rows, columns = mlp.up.weight[chosen].clone(), mlp.down.weight[:, chosen].clone()
    for weight, dim in ((mlp.up.weight, 0), (mlp.down.weight, 1)):
        weight.register_hook(partial(Tensor.index_fill, dim=dim, index=chosen, value=0.0))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @torch.no_grad()
    def hold(*_: object) -> None:
        mlp.up.weight[chosen] = rows  # momentum and weight decay would still move them
        mlp.down.weight[:, chosen] = columns

    optimizer.register_step_post_hook(hold)


@contextmanager
def amplified(modules: Iterable[nn.Module], factor: float) -> Iterator[None]:
    """While it lasts, what the modules put out is ``factor`` times larger, as with one bad batch of data."""

    def amplify(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output * factor

    with ExitStack() as handles:
        for module in modules:
            handles.callback(module.register_forward_hook(amplify).remove)
        yield
