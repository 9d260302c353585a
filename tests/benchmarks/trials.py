"""What the loss becomes when a faulted model trains on with any of its GEMMs in BF16, over several orders of the data.

The effect of a GEMM is a difference of two losses on the same batches, from the same checkpoint; measured once for each
order of the batches it has a mean and a standard deviation. Two effects are measured, as one fault hides another:

- alone: what BF16 in this GEMM takes off the loss of FP8. Nothing, if a fault elsewhere still breaks the model.
- among BF16: what FP8 in this GEMM adds to the loss of a model all of whose other GEMMs are in BF16: nothing hides it.

The noise of an effect is the standard deviation over the orders of that same paired difference, as nothing else says
how far the effect of this GEMM moves by chance: the scatter of the loss itself is mostly the batches', the same on both
sides. It is taken to be no less than the median of its kind in the trial: a deviation of four values is itself off by
40 %, and some of a hundred come out near zero; without that floor GEMMs without effect pass three times their noise.
With it one in a few hundred still does, so what comes near is measured once more, over many orders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TypeVar

from examples.faults.gallery import Case, Fault
from examples.faults.lab import SIZES, Checkpoint, resume, trained
from fp8dbg.numerics.recipes import GEMMS
from fp8dbg.numerics.simulated import SimulatedLinear

STEPS = 40
"""Steps that a trial trains on; a loss is the mean of the last half."""

ORDERS = 4
"""Orders of the data that every loss is averaged over."""

TIMES_NOISE = 3.0
"""Times its noise that an effect must reach to be one."""

NEAR = 2.0
"""Times its noise from which on an effect is measured over ``MANY`` orders instead."""

MANY = 20
"""Orders whose standard deviation is off by a sixth, not by 40 %."""

Gemm = tuple[str, str]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Effect:
    """What a change does to the loss.

    Attributes:
        mean: over the orders of the data.
        noise: standard deviation over them, no less than is usual in the trial.
    """

    mean: float
    noise: float

    @property
    def matters(self) -> bool:
        """Whether it is beyond chance."""
        return self.mean > TIMES_NOISE * self.noise

    @property
    def differs(self) -> bool:
        """Whether it is beyond chance in either direction."""
        return abs(self.mean) > TIMES_NOISE * self.noise


class Ledger:
    """Losses that were measured, kept in a file so that a long benchmark that ends early goes on where it was.

    Args:
        path: a line of JSON for each loss; None: nothing is kept. Delete it after a change to what is computed.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
        self._known: dict[str, float] = dict(json.loads(line) for line in lines)

    def get(self, key: str, measure: Callable[[], float]) -> float:
        """The loss of that key, measured if it is not known."""
        if key not in self._known:
            self._known[key] = measure()
            if self._path:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([key, self._known[key]]) + "\n")
        return self._known[key]


class Trial:
    """One fault in one model.

    Args:
        fault, case: what is planted in which model.
        ledger: where losses are kept.
        orders: of the data.
    """

    def __init__(self, fault: Fault, case: Case, ledger: Ledger | None = None, orders: int = ORDERS) -> None:
        self.fault, self.case, self._orders = fault, case, range(orders)
        self._ledger = ledger or Ledger()

    @cached_property
    def _start(self) -> Checkpoint:
        return trained(SIZES[self.case.size], self.case.seed)

    @property
    def _begins(self) -> int:
        """The step that the fault begins on: a jump clips only against scales made before it, and where it counts."""
        return STEPS // 2 if self.fault.code == "saturation" else 0

    @cached_property
    def gemms(self) -> list[Gemm]:
        """Every GEMM of the model, layers in execution order."""
        model = resume(self._start, self.fault.recipe).model
        return [(n, gemm) for n, m in model.named_modules() if isinstance(m, SimulatedLinear) for gemm in GEMMS]

    def losses(self, in_bf16: Collection[Gemm] = (), recipe: str | None = "") -> list[float]:
        """The loss under each order; ``recipe`` "": the fault's own, None: no FP8 at all."""
        label, kept = self.fault.recipe if recipe == "" else recipe, sorted(set(in_bf16))
        return [self._loss(order, kept, label) for order in self._orders]

    def _loss(self, order: int, kept: list[Gemm], recipe: str | None) -> float:
        begins = [self._begins] if self._begins else []
        key = json.dumps([self.fault.name, self.case.size, self.case.seed, STEPS, order, recipe, kept, *begins])
        return self._ledger.get(key, lambda: self._trained_on(order, kept, recipe))

    def _trained_on(self, order: int, kept: list[Gemm], recipe: str | None) -> float:
        fallback: dict[str, list[str]] = {}
        for layer, gemm in kept:
            fallback.setdefault(layer, []).append(gemm)
        scene = resume(self._start, recipe, fallback)
        scene.batches.manual_seed(1000 * (order + 1) + self.case.seed)
        losses = []
        for step in range(STEPS):
            undo = self.fault.plant(scene, self.case) if step == self._begins else None
            losses.append(scene.step())
            if undo is not None:
                undo()
        return fmean(losses[STEPS // 2 :])

    def loss(self, in_bf16: Collection[Gemm] = (), recipe: str | None = "") -> float:
        """The mean over the orders."""
        return fmean(self.losses(in_bf16, recipe))

    @cached_property
    def gap(self) -> Effect:
        """What FP8 costs."""
        return self._effects({"gap": _less(self.losses(), self.losses(recipe=None))})["gap"]

    @cached_property
    def well(self) -> Trial:
        """The same without a fault: what is left of the gap then is what FP8 costs anyway."""
        return self.with_fault(replace(self.fault, name="nothing", code="", plant=lambda scene, case: None))

    def with_fault(self, fault: Fault) -> Trial:
        """The same model with another fault, or the same one under another recipe."""
        return Trial(fault, self.case, self._ledger, len(self._orders))

    def recovered(self, loss: float) -> float:
        """Share of the gap that is won back at a loss."""
        return (self.loss() - loss) / self.gap.mean

    def repaired(self, loss: float) -> float:
        """Share of what the fault costs that is won back: of the gap, less what FP8 costs anyway."""
        return (self.loss() - loss) / (self.loss() - self.well.loss())

    @cached_property
    def alone(self) -> dict[Gemm, Effect]:
        """What each GEMM in BF16 takes off the loss of FP8."""
        return self._effects({gemm: self._alone(gemm) for gemm in self.gemms})

    @cached_property
    def among_bf16(self) -> dict[Gemm, Effect]:
        """What each GEMM in FP8 adds to the loss of BF16."""
        return self._effects({gemm: self._among_bf16(gemm) for gemm in self.gemms})

    def _alone(self, gemm: Gemm) -> list[float]:
        return _less(self.losses(), self.losses([gemm]))

    def _among_bf16(self, gemm: Gemm) -> list[float]:
        return _less(self.losses([other for other in self.gemms if other != gemm]), self.losses(recipe=None))

    @cached_property
    def _over_many(self) -> Trial:
        return type(self)(self.fault, self.case, self._ledger, MANY)

    def surely(self, gemm: Gemm) -> tuple[Effect, Effect]:
        """What a GEMM does alone and among BF16, over many orders where it comes near to what matters."""
        alone, among = self.alone[gemm], self.among_bf16[gemm]
        if all(effect.mean <= NEAR * effect.noise for effect in (alone, among)):
            return alone, among
        many = self._over_many
        return _effect(many._alone(gemm)), _effect(many._among_bf16(gemm))

    def effect(self, gemm: Gemm) -> Effect:
        """The larger effect."""
        return max(self.alone[gemm], self.among_bf16[gemm], key=lambda effect: effect.mean)

    @staticmethod
    def _effects(differences: Mapping[Key, list[float]]) -> dict[Key, Effect]:
        spread = {key: stdev(values) for key, values in differences.items()}
        usual = median(spread.values())
        return {key: Effect(fmean(values), max(spread[key], usual)) for key, values in differences.items()}


def _effect(values: list[float]) -> Effect:
    return Effect(fmean(values), stdev(values))


def _less(these: list[float], those: list[float]) -> list[float]:
    return [a - b for a, b in zip(these, those, strict=True)]
