"""torchao float8 training, recorded: tensorwise and rowwise scales on the same data, and what each loses.

    python examples/torchao_float8.py [OUT]

Runs on a CPU (GEMMs emulated) and on a GPU alike.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import fp8dbg

STEPS = 12


def train(recipe: str, run_dir: Path) -> float:
    """Train a small MLP on inputs of very unequal rows; returns the last loss."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(device, torch.bfloat16)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=device == "cpu")
    convert_to_float8_training(model, config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1)
    with fp8dbg.attach(model, run_dir, optimizer, every=4):
        for _ in range(STEPS):
            rows = torch.exp2(torch.randn(512, 1, generator=data) * 6)
            x = (torch.randn(512, 256, generator=data) * rows).to(device, torch.bfloat16)
            loss = 1.0 - torch.cosine_similarity(model(x).float(), x.float(), dim=-1).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


def main() -> None:
    """Both recipes, and the share of each layer's input that becomes zero under them."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "torchao_run")
    query = """
        select layer, max(underflow_ratio) as worst from tensor_ratios
        where tensor = 'input' and what_if is null and recipe is not null group by layer order by layer
    """
    for recipe in ("tensorwise", "rowwise"):
        loss = train(recipe, out / recipe)
        print(f"{recipe}: loss {loss:.4f}")
        for layer, worst in fp8dbg.open_run(out / recipe).sql(query).fetchall():
            print(f"  layer {layer}: up to {worst:.1%} of the input's non-zeros become zero")
    print(f"next: fp8dbg compare {out / 'tensorwise'} {out / 'rowwise'}")


if __name__ == "__main__":
    main()
