"""A short run in simulated FP8 with two faults: ``python bisected.py [COUNT]`` appends a byte to COUNT when it starts.

The model is its own teacher, so in BF16 its loss is rounding alone. One hidden unit is a million times too large in
the first layer and as much too small in the second, which no BF16 result shows: FP8 flushes the rest of the first
layer's weight and of the second one's input. The other layers are well.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import fp8dbg

WIDTHS = [16, 32, 32, 32, 8]


def net() -> nn.Sequential:
    """Four layers with ReLU between them; the faults are planted in the first two."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS)]
    with torch.no_grad():
        layers[0].weight[3] *= 1e6
        layers[1].weight[:, 3] /= 1e6
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))


def main() -> None:
    """Six steps with a learning rate of next to nothing."""
    if len(sys.argv) > 1:
        with Path(sys.argv[1]).open("ab") as count:
            count.write(b".")
    teacher, model = net(), fp8dbg.simulate(net(), "current")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    torch.manual_seed(int(os.environ["FP8DBG_REPEAT"]))
    for _ in range(6):
        x = torch.randn(64, WIDTHS[0])
        loss = (model(x) - teacher(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), flush=True)


main()
