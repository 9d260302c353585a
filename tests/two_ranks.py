"""A rank of a distributed training: ``python -m tests.two_ranks KIND RUN_DIR [RANKS]`` under torchrun's variables."""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8dbg
from tests.nets import Block, Case, build, train_step


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    """The model under DDP, or under FSDP2: its blocks and itself, or each linear layer of its own."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    kinds = (Block,) if kind == "fsdp" else (nn.Linear,)
    for unit in [module for module in model.modules() if isinstance(module, kinds)]:
        fully_shard(unit)
    fully_shard(model)
    return model


def trained(kind: str, run_dir: str | None) -> tuple[list[float], list[torch.Tensor], torch.Tensor]:
    """Losses, weights and random state after three steps of two microbatches, recorded if there is a folder."""
    case = Case(microbatches=2)
    model = wrapped(kind, build(case)[0])
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(model.parameters(), lr=1e-2)]
    torch.manual_seed(dist.get_rank())
    run = fp8dbg.attach(model, run_dir, every=2) if run_dir is not None else None
    losses = [train_step(case, model, optimizers) for _ in range(3)]
    if run is not None:
        run.close()
    state = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return losses, [p.detach().clone() for p in state], torch.get_rng_state()


def main(kind: str, run_dir: str, ranks: str = "01") -> None:
    """Train without us and then with us on the ``ranks`` given, and compare."""
    dist.init_process_group("gloo")
    bare_losses, bare, bare_random = trained(kind, None)
    losses, weights, random = trained(kind, run_dir if str(dist.get_rank()) in ranks else None)
    assert bare_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(bare, weights, strict=True))
    assert torch.equal(bare_random, random)
    gc.collect()  # a DDP model that outlives its group ends it with the GIL held, which gloo's thread may wait for
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
