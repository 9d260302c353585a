"""Transformer Engine under delayed scaling, recorded; then once more with the plan that the run asks for.

    python -m examples.transformer_engine [OUT]

Without a GPU it runs the same Python of Transformer Engine over the CPU stand-in of the tests (from a checkout).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import fp8dbg

STEPS, SPIKE = 24, 16


def transformer_engine() -> Any:
    """The library itself on a GPU; over the stand-in for its compiled module elsewhere."""
    if find_spec("transformer_engine") is None:
        sys.exit("This example needs Transformer Engine: pip install '.[te]'")
    if torch.cuda.is_available():
        import transformer_engine.pytorch as te

        return te
    try:
        from tests.hosts import te_cpu
    except ModuleNotFoundError:
        sys.exit("Without a GPU, run it in the root of a checkout of fp8dbg: python -m examples.transformer_engine")
    return te_cpu.install()


def train(te: Any, run_dir: Path, plan: Any = None) -> float:
    """Train a small stack whose second layer has an outlier channel; returns the last loss."""
    from transformer_engine.common.recipe import DelayedScaling

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        te.Linear(128, 256, params_dtype=torch.bfloat16),
        te.LayerNormLinear(256, 128, params_dtype=torch.bfloat16),
        te.Linear(128, 128, params_dtype=torch.bfloat16),
    )
    if plan:
        for sentence in fp8dbg.apply_fallback(model, plan):
            print("cannot be applied:", sentence)
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = torch.Generator().manual_seed(1)
    with fp8dbg.attach(model, run_dir, optimizer, every=1) as run:
        for step in range(STEPS):
            x = torch.randn(256, 128, generator=data).to(device, torch.bfloat16)
            x[:, 0] *= 1e4 if step >= SPIKE else 1.0  # from here on one channel dwarfs the others
            with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
                y = model(x)
            loss = (y.float() - x[:, 1:].float().mean(-1, keepdim=True)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
    return loss.item()


def main() -> None:
    """Train, say what was found, write the plan for Transformer Engine, train again with it."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "te_run")
    te = transformer_engine()
    print(f"FP8 throughout: loss {train(te, out / 'fp8'):.4f}")
    run = fp8dbg.open_run(out / "fp8")
    for finding in run.findings()[:5]:
        print(f"- {finding.summary}")
    plan = run.plan()
    if plan:
        from fp8dbg.hooks import nvidia_te

        (out / "te_debug.yaml").write_text(nvidia_te.write_fallback(plan))
        print(f"with the plan: loss {train(te, out / 'plan', plan):.4f}; {out / 'te_debug.yaml'} says the same to TE")
    print(f"next: fp8dbg report {out / 'fp8'}")


if __name__ == "__main__":
    main()
