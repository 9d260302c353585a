"""A rank of a distributed training: ``python -m tests.two_ranks KIND RUN_DIR [RANKS]`` under torchrun's variables."""

from __future__ import annotations

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


def main(kind: str, run_dir: str, ranks: str = "01") -> None:
    """Train three steps of two microbatches, without us and then with us on the ``ranks`` given, and compare."""
    dist.init_process_group("gloo")
    finals = []
    for attach in (False, True):
        case = Case(microbatches=2)
        model = wrapped(kind, build(case)[0])
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(model.parameters(), lr=1e-2)]
        torch.manual_seed(dist.get_rank())
        run = fp8dbg.attach(model, run_dir, every=2) if attach and str(dist.get_rank()) in ranks else None
        losses = [train_step(case, model, optimizers) for _ in range(3)]
        if run is not None:
            run.close()
        state = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        finals.append((losses, [p.detach().clone() for p in state], torch.get_rng_state()))
    (bare_losses, bare, bare_random), (losses, weights, random) = finals
    assert bare_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(bare, weights, strict=True))
    assert torch.equal(bare_random, random)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
