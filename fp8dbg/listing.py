"""What a run folder holds of each tensor: figures, amax rows, saved values."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from fp8dbg.errors import NothingRecordedError, UnknownNameError
from fp8dbg.runs.folder import Folder
from fp8dbg.runs.queries import ask

Rows = list[dict[str, Any]]


def recorded_and_saved(run: Folder, glob: str = "*") -> tuple[Rows, Rows]:
    """The tensors with figures or an amax, and those saved whole, each by layer and tensor.

    Args:
        run: an open run folder.
        glob: only layers of this name, or whose name matches, as ``layers.3.*``; case counts.

    Raises:
        NothingRecordedError: there is neither in the whole folder.
        UnknownNameError: no layer's name matches; the message lists the layers.
    """
    recorded = ask(run, "recorded")
    saved = [
        {"step": d.step, "rank": d.rank, "layer": d.layer, "tensor": d.tensor, "file": str(d.path)} for d in run.dumps()
    ]
    layers = {str(row["layer"]) for row in (*recorded, *saved)}
    if not layers:
        raise NothingRecordedError(
            f"No tensors in {run.path}: nothing was attached to a model.",
            "Call fp8dbg.attach(model, ...) before training.",
        )
    chosen = {name for name in layers if name == glob or fnmatchcase(name, glob)}
    if not chosen:
        raise UnknownNameError("layer", glob, list(layers))
    return [r for r in recorded if r["layer"] in chosen], [r for r in saved if r["layer"] in chosen]
