"""The smallest set of GEMMs that must stay in BF16, found by trying: delta debugging over short reruns.

Nothing here starts a program: what a trial is, is the caller's (fp8dbg/bisecting.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, stdev
from typing import TypeVar

from fp8dbg.errors import NothingRecordedError
from fp8dbg.runs.plan import Plan, PlanEntry
from fp8dbg.runs.schema import GEMMS

T = TypeVar("T")

Unit = tuple[str, str]
"""A layer and one of its GEMMs."""

SPACES = ("gemms", "layers", "kinds")
"""What is told apart: single GEMMs of single layers; whole layers; the kinds of GEMM over all layers together."""

RECOVERED = 0.95
"""Share of the loss gap between FP8 and BF16 that a set must close."""

NOISE = 3.0
"""Standard deviations of the repeats by which a loss may exceed BF16's and still count as BF16's."""


def ddmin(units: Sequence[T], good: Callable[[Sequence[T]], bool]) -> list[T]:
    """A subset that is good and of which no single unit can be left out; in the order of ``units``.

    Args:
        units: a set that is good as a whole; it is not tried again.
        good: whether a subset does; asked for none twice, and never for the empty set.

    Source: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002.
    """
    asked: dict[tuple[int, ...], bool] = {}

    def does(chosen: list[int]) -> bool:
        key = tuple(chosen)
        if key not in asked:
            asked[key] = good([units[i] for i in chosen])
        return asked[key]

    kept, parts = list(range(len(units))), 2
    while len(kept) > 1:
        pieces = _split(kept, parts)
        rests = [[i for i in kept if i not in piece] for piece in pieces] if parts > 2 else []
        smaller = next((p for p in [*pieces, *rests] if does(p)), None)
        if smaller is not None:
            parts = 2 if smaller in pieces else max(parts - 1, 2)
            kept = smaller
        elif parts < len(kept):
            parts = min(2 * parts, len(kept))
        else:
            break
    return [units[i] for i in kept]


def _split(kept: list[int], parts: int) -> list[list[int]]:
    """As even as can be, in order."""
    parts = min(parts, len(kept))
    ends = [round(i * len(kept) / parts) for i in range(parts + 1)]
    return [kept[a:b] for a, b in pairwise(ends)]


@dataclass(frozen=True)
class Criterion:
    """When a trial counts as recovered.

    Attributes:
        bf16, fp8: mean loss of the repeats of either; infinite where a run diverged.
        bf16_spread, fp8_spread: standard deviation between the repeats; 0 where there is one, or one diverged.
    """

    bf16: float
    fp8: float
    bf16_spread: float
    fp8_spread: float

    @classmethod
    def from_repeats(cls, bf16: Sequence[float], fp8: Sequence[float]) -> Criterion:
        """From the losses of the repeats with everything in BF16 and with nothing.

        Raises:
            NothingRecordedError: the BF16 runs have no finite loss to compare with.
        """
        if not all(map(math.isfinite, bf16)):
            raise NothingRecordedError(
                "With everything in BF16 the last losses are not finite, or were not recorded.",
                "See the trial's log; log the loss with run.log, or call backward on a scalar loss.",
            )
        return cls(mean(bf16), mean(fp8), _spread(bf16), _spread(fp8))

    @property
    def limit(self) -> float:
        """The largest loss that counts as recovered: how far broken runs scatter says nothing of one that is well."""
        gap = self.fp8 - self.bf16
        allowed = (1 - RECOVERED) * (gap if math.isfinite(gap) else abs(self.bf16))
        return self.bf16 + max(self._noise(self.bf16_spread), allowed)

    @property
    def harmed(self) -> bool:
        """Whether FP8 costs anything beyond the noise, of whichever scatters more."""
        return not self.fp8 <= self.bf16 + self._noise(max(self.bf16_spread, self.fp8_spread))

    def _noise(self, spread: float) -> float:
        return NOISE * spread + 1e-6 * abs(self.bf16)

    def recovered(self, loss: float) -> bool:
        """Whether a trial with this loss is as good as BF16; one that diverged is not."""
        return loss <= self.limit


def _spread(losses: Sequence[float]) -> float:
    return stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else 0.0


@dataclass(frozen=True)
class Found:
    """What the trials found.

    Attributes:
        criterion: what they were measured by.
        plan: the smallest set, as a plan; empty where FP8 does no harm.
        detail: the outcome in a sentence.
    """

    criterion: Criterion
    plan: Plan
    detail: str


def search(
    units: Sequence[Unit], space: str, criterion: Criterion, loss_of: Callable[[Sequence[Unit]], float]
) -> Found:
    """Find the smallest set: first the kinds of GEMM, then halves of the layers down to single ones, then their GEMMs.

    Args:
        units: every GEMM that runs in FP8, in execution order.
        space: one of ``SPACES``.
        criterion: from trials with all of the units in BF16, and with none.
        loss_of: runs a trial with these units in BF16.
    """
    if not criterion.harmed:
        return Found(criterion, Plan(), f"FP8 costs nothing: {_losses(criterion)}; nothing needs BF16.")

    def good(groups: Iterable[Sequence[Unit]]) -> bool:
        return criterion.recovered(loss_of([unit for group in groups for unit in group]))

    kept = list(units)
    if space != "layers":
        kept = _joined(ddmin(_groups(kept, 1), good), units)
    if space != "kinds":
        kept = _joined(ddmin(_groups(kept, 0), good), units)
    if space == "gemms":
        kept = _joined(ddmin([[unit] for unit in kept], good), units)
    return Found(criterion, plan_of(kept, _losses(criterion)), f"{len(kept)} of {len(units)} GEMMs need BF16.")


def plan_of(units: Iterable[Unit], reason: str = "") -> Plan:
    """The units as a fallback plan."""
    layers: dict[str, list[str]] = {}
    for layer, gemm in units:
        layers.setdefault(layer, []).append(gemm)
    return Plan(tuple(PlanEntry(layer, tuple(gemms), "bf16", reason) for layer, gemms in layers.items()))


def _groups(units: Iterable[Unit], by: int) -> list[list[Unit]]:
    """Units that share a layer (0) or a kind of GEMM (1)."""
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit[by], []).append(unit)
    return [groups[name] for name in sorted(groups, key=list(GEMMS).index)] if by else list(groups.values())


def _joined(groups: Iterable[Sequence[Unit]], order: Sequence[Unit]) -> list[Unit]:
    chosen = {unit for group in groups for unit in group}
    return [unit for unit in order if unit in chosen]


def _losses(criterion: Criterion) -> str:
    return f"loss {criterion.fp8:.5g} in FP8, {criterion.bf16:.5g} in BF16, {criterion.limit:.5g} counts as recovered"
