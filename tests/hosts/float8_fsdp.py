"""A rank of a torchao float8 training under FSDP2: ``python -m tests.hosts.float8_fsdp RECIPE GATHER RUN_DIR``."""

from __future__ import annotations

import dataclasses
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import fp8dbg


def sharded(recipe: str, gather: bool) -> nn.Module:
    """Two float8 layers, each sharded over the ranks; ``gather``: their weights are gathered in float8."""
    torch.manual_seed(0)
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=True, enable_fsdp_float8_all_gather=gather)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    convert_to_float8_training(net, config=config)
    for layer in (net[0], net[2]):
        fully_shard(layer)
    fully_shard(net)
    return net


def train(net: nn.Module) -> list[Tensor]:
    """Losses of three steps on this rank's own batches, and its shards of the weights."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        loss = net(torch.randn(32, 64, generator=generator)).pow(2).mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(p.detach().to_local().clone() for p in net.parameters())]  # type: ignore[attr-defined]


def main(recipe: str, gather: str, run_dir: str) -> None:
    """Train without us and with us, and compare."""
    dist.init_process_group("gloo")
    bare = train(sharded(recipe, gather == "float8"))
    net = sharded(recipe, gather == "float8")
    with fp8dbg.attach(net, run_dir, every=1):
        watched = train(net)
    assert all(map(torch.equal, bare, watched))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
