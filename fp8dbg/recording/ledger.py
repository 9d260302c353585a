"""Finished calls -> rows of ``amax``, and the delayed-scaling state that a BF16 layer would have by now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from torch import Tensor

from fp8dbg.numerics.census import Amax, read_together
from fp8dbg.numerics.recipes import DelayedState, Recipe
from fp8dbg.recording.extents import Extent, extent_of, merged
from fp8dbg.runs.schema import OPERANDS

if TYPE_CHECKING:
    from fp8dbg.recording.calls import Call
    from fp8dbg.recording.watch import Watch

Row = dict[str, Any]

_place = attrgetter("step", "microbatch", "watch.number", "index")
_microbatch = attrgetter("step", "microbatch", "watch")


class Emulated(NamedTuple):
    """A recipe that a layer is compared with, and the state it would have, by role; none where it keeps none."""

    recipe: Recipe
    states: dict[str, DelayedState]


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

    def emulated(self, watch: Watch) -> tuple[Emulated, ...]:
        """The recipes emulated for a layer: what it is compared with, being BF16, and the others asked for."""
        real = watch.layer.recipe
        if watch.emulated is None or watch.emulated[0] is not real:
            main = real or self.recipe
            others = [r for r in self._what_if if r.label != main.label]
            recipes = others if real is not None else [main, *others]
            watch.emulated = real, tuple(Emulated(r, _states(watch, r)) for r in recipes)
        return watch.emulated[1]

    def settle(self, calls: Iterable[Call]) -> list[Row]:
        """Rows of ``amax`` for finished calls, one per layer, operand and microbatch; the emulated states move on.

        Waits for the accelerator if amaxes are still there: one transfer for all.
        """
        calls = sorted(calls, key=_place)
        read_together(amax for call in calls for amax in (call.input, call.weight, call.grad_output) if amax)
        groups = (list(group) for _, group in groupby(calls, _microbatch))
        return [row for group in groups for row in self._rows(group)]

    def _rows(self, calls: list[Call]) -> Iterator[Row]:
        """Rows of one layer's calls in one microbatch, which share a scale."""
        last, watch = calls[-1], calls[-1].watch
        for role in OPERANDS:
            amaxes: list[tuple[Amax, Call]] = [(a, c) for c in calls if (a := getattr(c, role)) is not None]
            if not amaxes:
                continue
            extent = merged(extent_of(amax, call.dtype) for amax, call in amaxes)
            yield {
                "step": last.step,
                "microbatch": last.microbatch,
                "rank": self.rank,
                "layer": watch.layer.name,
                "tensor": role,
                "amax": extent.amax,
                "scale": self._scale(last, role, extent),
                "nan": extent.nan,
                "inf": extent.inf,
            }

    def _scale(self, call: Call, role: str, extent: Extent) -> float | None:
        """The scale in force: live, emulated, or the recipe's own choice; the emulated states see the amax.

        A layer that has run in FP8 has none in force where it runs in BF16: an emulated one would look like a jump.
        """
        live = call.scales is not None
        watch = call.watch
        if live and watch.ran_in_fp8 is False:
            detail = "It computes in FP8 from this step on; before, it ran in BF16."
            watch.recorder.writer.event(call.step, "fp8", watch.layer.name, detail)
        watch.ran_in_fp8 = watch.ran_in_fp8 or live
        emulates = not watch.ran_in_fp8
        scale: float | Tensor | None = call.scales.get(role, (None, None))[0] if call.scales is not None else None
        for recipe, states in self.emulated(call.watch):
            if role in states:
                if recipe is self.recipe and emulates:
                    scale = states[role].scale
                states[role].update(extent.seen)
        dynamic = call.watch.layer.recipe if live else self.recipe if emulates else None
        if scale is None and _chooses_per_tensor(dynamic, role):
            scale = dynamic.current_scale(extent.seen_by(dynamic), role)
        return None if scale is None else float(scale)


def _states(watch: Watch, recipe: Recipe) -> dict[str, DelayedState]:
    """The layer's states under a recipe, which stay while the layer goes to FP8 and comes back."""
    if recipe.name != "delayed":
        return {}
    return {role: watch.states.setdefault((recipe.label, role), DelayedState(recipe, role)) for role in OPERANDS}


def _chooses_per_tensor(recipe: Recipe | None, role: str) -> TypeGuard[Recipe]:
    """Whether the recipe takes one scale for the whole operand from this operand alone."""
    return recipe is not None and recipe.name not in ("bf16", "delayed") and recipe.granularity(role) == "tensor"
