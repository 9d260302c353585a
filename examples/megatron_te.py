"""Megatron-Core with Transformer Engine's FP8 layers, recorded; the plan is written as Megatron's own configuration.

    python -m examples.megatron_te [OUT]
    torchrun --nproc-per-node 2 -m examples.megatron_te [OUT]

Without a GPU it runs over the CPU stand-in of the tests (from a checkout), on gloo.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import torch

import fp8dbg
from tests.hosts import megatron_run


def main() -> None:
    """Train four steps under tensorwise FP8 on every rank; rank 0 says what was recorded."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "megatron_run")
    megatron_run.start()
    options = Namespace(
        spec="te",
        recipe="current",
        sequence_parallel=False,
        recompute=False,
        stale=False,
        steps=4,
        microbatches=2,
        lr=3e-3,
    )
    model = megatron_run.model_of(options)
    with fp8dbg.attach(model, out, every=1):
        losses = megatron_run.train(model, options)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        report(out, losses)
    torch.distributed.destroy_process_group()


def report(out: Path, losses: list[float]) -> None:
    """Losses, rows by rank, and a plan for the noisiest GEMMs as --te-precision-config-file."""
    from fp8dbg.analysis.plan import Plan, PlanEntry
    from fp8dbg.hooks import megatron

    run = fp8dbg.open_run(out)
    print("loss:", " ".join(f"{loss:.3f}" for loss in losses))
    print("rows by rank:", run.sql("select rank, count(*) from tensors group by rank order by rank").fetchall())
    errors = run.sql(
        "select layer, avg(rel_l2) as error from gemms where host = 'nvidia_te' group by layer order by error desc"
    ).fetchall()
    layer, error = errors[0]
    entry = PlanEntry(layer, ("fprop", "dgrad", "wgrad"), reason=f"The noisiest layer, relative error {error:.3f}.")
    print(megatron.write_fallback(run.plan() or Plan((entry,))))


if __name__ == "__main__":
    main()
