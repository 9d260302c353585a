"""Attach to a plain PyTorch training loop: python examples/plain_pytorch.py [RUN_DIR], then fp8dbg report RUN_DIR."""

import sys

import torch
from torch import nn

import fp8dbg

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16))
teacher = nn.Linear(64, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run_dir = sys.argv[1] if len(sys.argv) > 1 else "plain_run"

# The model trains in BF16; the run says what delayed scaling in FP8 would have done to each of its layers.
with fp8dbg.attach(model, run_dir, optimizer=optimizer, recipe="delayed:history=16", every=20) as run:
    for _ in range(100):
        x = torch.randn(256, 64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), teacher(x).argmax(-1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.log(grad_norm=norm)

print(f"loss {loss.item():.3f}; see: fp8dbg report {run_dir}")
