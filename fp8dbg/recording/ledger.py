"""Finished calls -> rows of ``amax``, and the delayed-scaling state that a BF16 layer would have by now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from fp8dbg.numerics.census import Amax, read_together
from fp8dbg.numerics.recipes import DelayedState, Recipe
from fp8dbg.recording.extents import Extent, merged, rounded
from fp8dbg.runs.schema import OPERANDS

if TYPE_CHECKING:
    from fp8dbg.recording.watch import Call, Watch

Row = dict[str, Any]


class _Entry(NamedTuple):
    """One operand of one layer in one microbatch: the amaxes of its calls, the dtype the GEMM reads, its live scale."""

    watch: Watch
    step: int
    microbatch: int
    role: str
    dtype: torch.dtype
    scale: float | Tensor | None
    live: bool
    amaxes: list[Amax]


class Ledger:
    """Keeps the emulated scales; one per recorder.

    Args:
        recipe: what BF16 layers are compared with.
        what_if: further recipes, compared for every layer.
        rank: for the rows.
    """

    def __init__(self, recipe: Recipe, what_if: Iterable[Recipe], rank: int) -> None:
        self.recipe, self.rank = recipe, rank
        self._what_if = tuple({r.label: r for r in what_if}.values())

    def recipes(self, watch: Watch) -> tuple[Recipe, ...]:
        """The recipes emulated for a layer: what it is compared with, being BF16, and the others asked for."""
        main = watch.layer.recipe or self.recipe
        others = tuple(r for r in self._what_if if r.label != main.label)
        return others if watch.layer.recipe is not None else (main, *others)

    def state(self, watch: Watch, recipe: Recipe, role: str) -> DelayedState | None:
        """The delayed state of an operand under a recipe; None where the recipe keeps none."""
        if recipe.name != "delayed":
            return None
        key = recipe.label, role
        state = watch.states.get(key)
        if state is None:
            state = watch.states[key] = DelayedState(recipe, role)
        return state

    def settle(self, calls: Iterable[Call]) -> list[Row]:
        """Rows of ``amax`` for finished calls, one per layer, operand and microbatch; the emulated states move on.

        Waits for the accelerator if amaxes are still there: one transfer for all.
        """
        entries = self._entries(calls)
        read_together(a for e in entries for a in e.amaxes)
        extents = _extents(entries)
        return [self._row(e, extent) for e, extent in zip(entries, extents, strict=True)]

    def _entries(self, calls: Iterable[Call]) -> list[_Entry]:
        found: dict[tuple[int, int, int, str], _Entry] = {}
        for call in sorted(calls, key=lambda c: (c.step, c.microbatch, c.index)):
            for role in OPERANDS:
                amax: Amax | None = getattr(call, role)
                if amax is None:
                    continue
                key = id(call.watch), call.step, call.microbatch, role
                if key in found:
                    found[key].amaxes.append(amax)
                    continue
                scale = call.scales.get(role, (None, None))[0] if call.scales is not None else None
                live = call.scales is not None
                found[key] = _Entry(call.watch, call.step, call.microbatch, role, call.dtype, scale, live, [amax])
        return list(found.values())

    def _row(self, e: _Entry, extent: Extent) -> Row:
        scale = float(e.scale) if e.scale is not None else None
        for recipe in self.recipes(e.watch):
            state = self.state(e.watch, recipe, e.role)
            if state is not None:
                if recipe is self.recipe and not e.live:
                    scale = state.scale
                state.update(extent.seen)
        dynamic = e.watch.layer.recipe if e.live else self.recipe
        if scale is None and _chooses_per_tensor(dynamic, e.role):
            scale = dynamic.current_scale(extent.seen, e.role)
        return {
            "step": e.step,
            "microbatch": e.microbatch,
            "rank": self.rank,
            "layer": e.watch.layer.name,
            "tensor": e.role,
            "amax": extent.amax,
            "scale": scale,
            "nan": extent.nan,
            "inf": extent.inf,
        }


def _chooses_per_tensor(recipe: Recipe | None, role: str) -> TypeGuard[Recipe]:
    """Whether the recipe takes one scale for the whole operand from this operand alone."""
    return recipe is not None and recipe.name not in ("bf16", "delayed") and recipe.granularity(role) == "tensor"


def _extents(entries: list[_Entry]) -> list[Extent]:
    """One extent per entry, taken in the dtype that the GEMM reads."""
    flat = [(a, e.dtype) for e in entries for a in e.amaxes]
    cast: dict[int, Extent] = {}
    for dtype in {d for _, d in flat}:
        places = [i for i, (_, d) in enumerate(flat) if d is dtype]
        cast |= zip(places, rounded([flat[i][0] for i in places], dtype), strict=True)
    result, start = [], 0
    for e in entries:
        result.append(merged(cast[i] for i in range(start, start + len(e.amaxes))))
        start += len(e.amaxes)
    return result
