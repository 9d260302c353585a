"""``attach``: checks what is asked for, and starts a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from fp8dbg.errors import UsageError
from fp8dbg.numerics.arguments import a_module, whole
from fp8dbg.numerics.recipes import Recipe, recipe_named
from fp8dbg.recording.ledger import Ledger
from fp8dbg.recording.names import rank
from fp8dbg.recording.probe import Probing
from fp8dbg.recording.recorder import Parts
from fp8dbg.recording.sampling import TRIGGER_STEPS, Sampling, Settings
from fp8dbg.recording.session import Session
from fp8dbg.recording.steps import Optimizers
from fp8dbg.recording.triggers import SPIKE
from fp8dbg.runs.writer import RunWriter


def attach(
    model: nn.Module,
    run_dir: str | Path,
    optimizer: object = None,
    recipe: str | Recipe = "delayed",
    every: int = 100,
    *,
    rows: int = 8,
    layers: str | Sequence[str] = ("*",),
    also: Sequence[type[nn.Module]] = (),
    what_if: Sequence[str | Recipe] = (),
    windows: Sequence[tuple[int, int]] = (),
    dump: str | Sequence[str] = (),
    histogram: Literal["binade", "codes"] | None = "binade",
    trigger_steps: int = TRIGGER_STEPS,
    spike: float = SPIKE,
    limits: str | Sequence[str] = (),
    trigger_dump: str | Sequence[str] = (),
    first_step: int = 0,
    max_bytes: int | None = None,
) -> Session:
    """Record a model's training into a run folder, from now until the session is closed.

    Training is not changed: weights, losses and random numbers stay bit for bit what they are without it. Attach after
    the model is wrapped (DistributedDataParallel, fully_shard) and before torch.compile runs it; there every layer hook
    breaks the graph, which ``fullgraph=True`` forbids, and compiled backward GEMMs do not show their results.

    Args:
        model: any module with linear layers; unmodified.
        run_dir: the run folder; made, or continued if it is one. Each rank writes its own files.
        optimizer: the optimizer or optimizers whose steps count; None: those that hold a parameter of the model.
            Without a torch optimizer call ``Session.step`` at the end of each step.
        recipe: what a BF16 layer is compared with, by name ("delayed", "delayed:history=16", "mxfp8", ...); an FP8
            layer brings its own.
        every: measure everything on every n-th step; 0: never. Amaxes are recorded on every step.
        rows: output rows per GEMM that are compared, drawn at random from a generator of its own.
        layers: globs of the layers to record, by canonical name.
        also: module types to record besides linear layers: their operands only.
        what_if: further recipes whose figures are recorded beside the main one's.
        windows: (first, last) steps, inclusive, in which every step is measured.
        dump: ``layer:tensor`` globs of tensors saved whole on measured steps.
        histogram: "binade" counts per power of two, "codes" counts every 16-bit code (of float32, binades), None leaves
            histograms out. With codes ``fp8dbg whatif`` is exact.
        trigger_steps: steps measured in full after a trigger: a loss that is not finite or spikes, a NaN in an operand,
            a figure past its limit; ten times as many follow in which nothing triggers. 0: nothing does.
        spike: times the usual change from step to step by which a spike exceeds the usual loss; two thirds of it where
            the rise is four times that of any of the last 50 losses; 0: none does.
        limits: figures of operands, on measured steps, past which they trigger, as "underflow_ratio > 0.5" or
            "layers.3.*:input saturated_ratio > 0.01".
        trigger_dump: ``layer:tensor`` globs of tensors saved whole on the steps after a trigger, and with them those of
            the last measured steps before it, as far as 16 MiB hold them.
        first_step: number of the first step, for a resumed training.
        max_bytes: recording stops when this session has written as much; None: no limit.

    Raises:
        UsageError: an option does not fit.
        RunFolderError: ``run_dir`` cannot be written, or holds a run of a newer schema.
    """
    model, types = a_module(model), _types(also)
    triggers = {"trigger_steps": trigger_steps, "spike": spike, "limits": limits, "trigger_dump": trigger_dump}
    settings = Settings(every=every).changed({"windows": windows, "dump": dump, "layers": layers} | triggers)
    _check_numbers(rows, first_step, max_bytes)
    if histogram not in ("binade", "codes", None):
        raise UsageError(f"histogram={histogram!r:.100} is no kind of histogram.", "Give 'binade', 'codes' or None.")
    recipes = recipe_named(recipe), [recipe_named(r) for r in _several(what_if)]
    optimizers = Optimizers(model, optimizer)
    options = {"every": every, "rows": rows, "layers": settings.layers, "also": [t.__name__ for t in types]}
    options |= {"what_if": [r.label for r in recipes[1]], "windows": settings.windows, "dump": settings.dump}
    options |= {name: getattr(settings, name) for name in triggers}
    options |= {"histogram": histogram, "first_step": first_step, "max_bytes": max_bytes}
    facts = {"recipe": recipes[0].to_dict(), "options": options, "model": type(model).__name__, "layout": _layout()}
    writer = RunWriter(run_dir, rank(), facts, max_bytes=max_bytes)
    sampling = Sampling(settings, writer.path, lambda kind, detail: session.recorder.event(kind, None, detail))
    parts = Parts(
        writer,
        sampling,
        Ledger(*recipes, writer.rank),
        Probing(rows, histogram),
        optimizers,
        settings.layers,
        settings.dump,
    )
    session = Session(parts, first_step)
    session.start(model, types)
    return session


def _check_numbers(rows: object, first_step: object, max_bytes: object) -> None:
    whole("rows", rows, 1)
    whole("first_step", first_step, 0)
    if max_bytes is not None:
        whole("max_bytes", max_bytes, 0)


def _types(also: object) -> tuple[type[nn.Module], ...]:
    types = (also,) if isinstance(also, type) else tuple(also) if isinstance(also, Iterable) else (also,)
    for one in types:
        if not isinstance(one, type) or not issubclass(one, nn.Module):
            raise UsageError(f"also= got {one!r:.100}, which is no type of module.", "Give types, as (nn.LayerNorm,).")
    return types


def _several(what_if: object) -> Iterable[Any]:
    """One recipe or several; what is neither is refused where recipes are looked up."""
    return what_if if isinstance(what_if, Iterable) and not isinstance(what_if, str) else (what_if,)


def _layout() -> dict[str, int]:
    distributed = dist.is_available() and dist.is_initialized()
    return {"world_size": dist.get_world_size() if distributed else 1}
