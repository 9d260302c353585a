"""A training loop that has never heard of fp8dbg: ``python launched_plain.py [ENDING]`` prints losses and a hash.

ENDING: "crash" raises after the third step, "kill" kills the process there.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(ending: str) -> None:
    """Five steps; under torchrun by every rank, with data of its own."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank())
        net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(5):
        loss = net(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item())
        if step == 2 and ending == "crash":
            raise RuntimeError("out of luck")
        if step == 2 and ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    print(hashlib.sha256(weights).hexdigest(), torch.rand(1).item())
    if dist.is_initialized():
        dist.destroy_process_group()


main(sys.argv[1] if len(sys.argv) > 1 else "")
