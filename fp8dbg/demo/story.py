"""The demo from end to end: train with faults, ask the run folder what to keep in BF16, check that it helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp8dbg
from fp8dbg.demo.held_out import losses, save
from fp8dbg.demo.training import Settings, train


def tell(out: Path, settings: Settings, advance: Callable[[int, str], None]) -> list[dict[str, Any]]:
    """Train, recorded in ``out``; then judge the plan that the run folder recommends on held-out text.

    Args:
        out: the run folder; new or empty.
        settings: what to train.
        advance: called after each step with the number of steps done and a few words.

    Returns:
        rows with ``in_bf16`` and ``loss``, also saved in ``out``; see `fp8dbg.demo.held_out.losses`.
    """
    weights = train(out, settings, lambda done, loss: advance(done, f"loss {loss:.3f}"))
    with fp8dbg.open_run(out) as run:
        plan = run.plan().as_fallback()
    rows = losses(weights, plan, settings)
    save(rows, settings.planted_at, out)
    return rows
