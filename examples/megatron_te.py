"""Megatron-Core with Transformer Engine's FP8 layers, recorded; the plan is written as Megatron's own configuration.

    python -m examples.megatron_te [OUT]                        # in the root of a checkout
    torchrun --nproc-per-node 2 -m examples.megatron_te [OUT]

It needs Megatron-Core and Transformer Engine (pip install '.[megatron,te]'), and runs over the tests' stand-in for the
latter's CUDA code, on gloo.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import fp8dbg


def helpers() -> Any:
    """What builds and trains the model; where a part is missing the program ends with a sentence."""
    missing = [name for name in ("megatron", "transformer_engine") if find_spec(name) is None]
    if missing:
        sys.exit(f"This example needs {' and '.join(missing)}: pip install '.[megatron,te]'")
    try:
        from tests.hosts import megatron_run
    except ModuleNotFoundError as error:
        if error.name not in ("tests", "tests.hosts"):
            sys.exit(f"This example needs {error.name}: pip install '.[megatron,te]'")
        sys.exit("Run it in the root of a checkout of fp8dbg: python -m examples.megatron_te")
    return megatron_run


def main() -> None:
    """Train four steps under tensorwise FP8 on every rank; rank 0 says what was recorded."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "megatron_run")
    megatron_run = helpers()
    megatron_run.start()
    options = Namespace(
        spec="te",
        recipe="current",
        sequence_parallel=False,
        recompute=False,
        stale=False,
        precision_file=None,
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
