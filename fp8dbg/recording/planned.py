"""The fallback plan of ``fp8dbg run``: applied to each model before its first step, or the program is stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch.distributed as dist
from torch import nn

from fp8dbg.errors import UnknownNameError, UsageError
from fp8dbg.runs.plan import Plan


@dataclass(frozen=True)
class Applied:
    """What came of a plan for one model.

    Attributes:
        file: the plan's.
        layers: those of the plan that the model has.
        missing: those that no model of this process has; they may be another rank's.
        said: a sentence for each thing that a host did otherwise than planned.
    """

    file: str
    layers: tuple[str, ...]
    missing: tuple[str, ...]
    said: tuple[str, ...]

    def events(self) -> Iterator[tuple[str, str | None, str]]:
        """For the run folder: kind, layer, detail. A report tells those of kind "plan"; layers that no rank has."""
        count = "1 layer" if len(self.layers) == 1 else f"{len(self.layers)} layers"
        yield "config", None, f"The fallback plan {self.file} is applied: {count}."
        for sentence in self.said:
            yield "plan", None, f"Not as planned: {sentence}"
        for layer in self.missing:
            yield "plan", layer, f"The fallback plan {self.file} names it; this rank has no such layer."

    def words(self) -> Iterator[str]:
        """For the launcher, which knows the other processes."""
        yield f"planned {json.dumps(self.layers)}"
        for sentence in self.said:
            yield f"unplanned {' '.join(sentence.split())}"
        if _world_size() > int(os.environ.get("LOCAL_WORLD_SIZE") or 1):
            yield "elsewhere"


def apply(
    file: str, model: nn.Module, others: Callable[[], Sequence[nn.Module]], earlier: Collection[str] = ()
) -> Applied:
    """Apply the part of a plan that is this model's.

    Args:
        file: of the plan.
        model: about to be trained.
        others: further models that this process will train, as far as they are known.
        earlier: layers of the plan that models before this one had.

    Raises:
        UsageError: it is no plan, or cannot be applied, or a layer is in no model: a process that is one of several may
            hold a stage of the model, so there this is the launcher's to say.
    """
    hooks = import_module("fp8dbg.hooks")  # which is above this room
    plan = Plan.from_json(Path(file).read_text(encoding="utf-8"))
    own = hooks.layers_of(model)
    missing = [layer for layer in dict.fromkeys(entry.layer for entry in plan.entries) if layer not in own]
    if missing:
        known = {*own, *earlier, *(name for other in others() for name in hooks.layers_of(other))}
        missing = [layer for layer in missing if layer not in known]
        if _world_size() == 1:
            _refuse(missing, sorted(known))
    part = Plan(tuple(entry for entry in plan.entries if entry.layer in own))
    said = hooks.apply_fallback(model, part)
    return Applied(file, tuple(part.as_fallback()), tuple(missing), tuple(map(str, said)))


def _refuse(wrong: Sequence[str], known: list[str]) -> None:
    if wrong:
        unknown = UnknownNameError("layer", wrong[0], known)
        more = f" Nor: {', '.join(wrong[1:4])}{', ...' if len(wrong) > 4 else ''}." if len(wrong) > 1 else ""
        raise UsageError(
            unknown.message + more,
            f"{unknown.hint} A program that makes its models one after another applies its plan itself: "
            "fp8dbg.apply_fallback(model, plan).",
        )


def _world_size() -> int:
    """Processes that train together: torch.distributed's where it is initialised, else the WORLD_SIZE variable's."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() else 1
