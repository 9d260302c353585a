"""Tells a team training in FP8 where the numbers break, why, what to keep in BF16, and whether that helped.

    with fp8dbg.attach(model, "run_dir", optimizer=optimizer) as run:
        ...  # the training loop, unchanged

The names below are resolved on first use: ``import fp8dbg`` alone imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8dbg.analysis.run import open_run
    from fp8dbg.hooks import apply_fallback
    from fp8dbg.numerics.measurement import measure
    from fp8dbg.numerics.simulated import simulate
    from fp8dbg.recording.attach import attach

__version__ = "0.1.0"

__all__ = ["__version__", "apply_fallback", "attach", "measure", "open_run", "simulate"]

_HOMES = {
    "apply_fallback": "fp8dbg.hooks",
    "attach": "fp8dbg.recording.attach",
    "measure": "fp8dbg.numerics.measurement",
    "open_run": "fp8dbg.analysis.run",
    "simulate": "fp8dbg.numerics.simulated",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fp8dbg' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
