"""Simulated FP8 layers under DistributedDataParallel and FSDP2, two processes on gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from fp8dbg.numerics.simulated import simulate

WORLD, STEPS = 2, 3


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False), nn.Linear(32, 32))
    return simulate(model, "delayed:history=4", ["3", "2:wgrad"])


def batch(step: int, rank: int) -> Tensor:
    """Rank 1's inputs are larger."""
    return (1 + 7 * rank) * torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, rank: int) -> list[float]:
    """Losses of a few steps over this rank's batches."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 1e-3), []
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch(step, rank)).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def states(model: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("fp8_scales")]


def work(rank: int, folder: str) -> None:
    """One process: train under DDP, then under FSDP2, and write down what came of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found: dict[str, Any] = {}
    data_parallel = DistributedDataParallel(build(), broadcast_buffers=False)
    losses = train(data_parallel, rank)
    found["ddp"] = losses, states(data_parallel), [p.detach() for p in data_parallel.parameters()]
    sharded = build()
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(sharded)
    found["fsdp"] = train(sharded, rank), states(sharded)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Both wrappers train: DDP's ranks end with equal weights and scales of their own; FSDP2 loses as DDP does."""
    spawn(work, args=(str(tmp_path),), nprocs=WORLD)  # type: ignore[no-untyped-call]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    for rank in range(WORLD):
        ddp_losses, scales, weights = found[rank]["ddp"]
        assert all(torch.equal(a, b) for a, b in zip(weights, found[0]["ddp"][2], strict=True))
        assert ddp_losses[0] == pytest.approx(train(build(), rank)[0], rel=1e-3)
        assert len(scales) == 2
        assert found[rank]["fsdp"][0] == pytest.approx(ddp_losses, rel=1e-3)
        for a, b in zip(scales, found[rank]["fsdp"][1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=0.0)
    input_scales = [found[rank]["ddp"][1][0][0].item() for rank in range(WORLD)]
    assert input_scales[0] > 4 * input_scales[1]
