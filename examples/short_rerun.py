"""A short training run in simulated FP8, to find out by reruns what has to stay in BF16.

    fp8dbg bisect --plan-space layers -- python -m examples.short_rerun

Every run starts from the same weights; a repeat sees other batches.
"""

from __future__ import annotations

import os

import torch

import fp8dbg
from examples.rehearse_fp8 import build, text, train


def main() -> None:
    """Train in NVFP4, whose 4 bits are too few for the output layer."""
    torch.manual_seed(0)
    repeat = int(os.environ.get("FP8DBG_REPEAT", "0"))
    print(train(fp8dbg.simulate(build(), "nvfp4"), text(), seed=repeat))


if __name__ == "__main__":
    main()
