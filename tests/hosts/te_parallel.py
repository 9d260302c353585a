"""A rank that trains Transformer Engine's linears under tensor parallelism: ``python -m tests.hosts.te_parallel OUT``.

Each of ``KINDS`` under each recipe, with sequence parallelism and without, each in a run folder of its own.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dbg
import tests.hosts.conftest  # noqa: F401  puts an older Transformer Engine first, where one is asked for
from tests.hosts import te_cpu, te_nets
from tests.hosts.megatron_run import Spy

KINDS = ("linear", "basic", "groupless", "module", "mlp")
"""``te.ops.Linear``, ``te.ops.BasicLinear``, the same without a group given, ``te.Linear``, ``te.LayerNormMLP``."""

RECIPES, PARALLEL = ("delayed", "current"), ("tensor", "sequence")

_COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier", "all_gather")


def net(kind: str, sequence: bool) -> nn.Module:
    """128 features, 256 columns split over the ranks, GELU, and back by rows; BF16; each rank's part is another."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch import ops

    torch.manual_seed(dist.get_rank())
    group: Any = dist.group.WORLD
    if kind in ("module", "mlp"):
        shared: dict[str, Any] = {"params_dtype": torch.bfloat16, "tp_group": group, "tp_size": 2}
        shared |= {"sequence_parallel": sequence}
        if kind == "mlp":
            return nn.Sequential(te.LayerNormMLP(128, 256, set_parallel_mode=True, **shared))
        up, down = (
            te.Linear(128, 256, parallel_mode="column", **shared),
            te.Linear(256, 128, parallel_mode="row", **shared),
        )
        return nn.Sequential(up, nn.GELU(), down)
    shared = {"dtype": torch.bfloat16, "sequence_parallel": sequence}
    shared |= {"tensor_parallel_group": None if kind == "groupless" else group}
    made = ops.Linear if kind == "linear" else ops.BasicLinear
    up, down = (
        made(128, 256, tensor_parallel_mode="column", **shared),
        made(256, 128, tensor_parallel_mode="row", **shared),
    )
    return nn.Sequential(ops.Sequential(up, ops.GELU(), down))


def autocast(recipe: Any) -> Any:
    """Transformer Engine's, whose amaxes are reduced over both ranks, under its name in either version."""
    import transformer_engine.pytorch as te

    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe, amax_reduction_group=dist.group.WORLD)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=dist.group.WORLD)


def train(model: nn.Module, recipe: str, sequence: bool) -> list[Tensor]:
    """As ``te_nets.train_spread``. Each rank has all tokens, or its half of them."""
    fp8 = te_nets.recipe(recipe)

    def part(x: Tensor) -> Tensor:
        return x.chunk(2)[dist.get_rank()] if sequence else x

    return te_nets.train_spread(model, lambda: autocast(fp8), part=part)


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """How often each collective is called."""
    calls: dict[str, int] = {}
    originals = {name: getattr(dist, name) for name in _COLLECTIVES}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return originals[name](*args, **kwargs)

        return call

    for name in _COLLECTIVES:
        setattr(dist, name, counted(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def compare(kind: str, recipe: str, sequence: bool, out: Path) -> None:
    """Train without us and with us; write whether that was the same, the collectives called, and every cast."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    with counting() as usual:
        bare = train(net(kind, sequence), recipe, sequence)
    FP8GlobalStateManager.reset()
    model = net(kind, sequence)
    spy = Spy(model)
    te_cpu.OBSERVERS.append(spy)
    with fp8dbg.attach(model, out, every=1), counting() as calls:
        watched = train(model, recipe, sequence)
    te_cpu.OBSERVERS.remove(spy)
    found = {"same": all(map(torch.equal, bare, watched)), "usual": usual, "calls": calls, "casts": spy.casts}
    (out / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))


def main(out: str) -> None:
    """Everything, in one process a rank."""
    te_cpu.install()
    dist.init_process_group("gloo")
    for kind, recipe, parallel in itertools.product(KINDS, RECIPES, PARALLEL):
        compare(kind, recipe, parallel == "sequence", Path(out, f"{kind}-{recipe}-{parallel}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
