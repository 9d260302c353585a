"""Whether what is recommended works: ``python -m tests.benchmarks.efficacy [--quick] [--only NAME] [--plot FILE]``.

From one checkpoint a faulted model trains on in FP8, in BF16, with the recommended plan, with the first and the last
layer in BF16, with each single GEMM in BF16 and with all but a single GEMM in BF16; then with every set of the GEMMs
that matter, smallest first, until one recovers ``ENOUGH`` of the loss between FP8 and BF16. Losses are means over the
last half of the steps, on the same batches. For faults where BF16 is not the answer, the recommended action is taken.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev

import torch

from examples.faults.gallery import CASES, GALLERY, Case, Fault, record
from examples.faults.lab import SIZES, Checkpoint, resume, trained
from fp8dbg.analysis.recommend import Recommendation
from fp8dbg.analysis.run import open_run
from fp8dbg.numerics.recipes import GEMMS
from fp8dbg.numerics.simulated import SimulatedLinear

STEPS = 40
ENOUGH = 0.95
JITTERED = 4
"""Healthy runs from weights that differ in their last BF16 bit: how far chance moves the loss."""

TIMES_NOISE = 3.0
LARGEST = 4
"""GEMMs in a set of the exhaustive search, at most."""

CANDIDATES = 6
"""GEMMs that the search puts sets together of: those that matter most."""

Gemm = tuple[str, str]


class Trial:
    """One fault in one model: what the loss becomes with any GEMMs in BF16.

    Args:
        fault, case: what is planted in which model.
    """

    def __init__(self, fault: Fault, case: Case) -> None:
        self.fault, self.case = fault, case
        self._start = trained(SIZES[case.size], case.seed)
        self._losses: dict[tuple[str | None, frozenset[Gemm]], float] = {}

    def loss(self, in_bf16: Collection[Gemm] = (), recipe: str | None = "") -> float:
        """Mean loss of the last half of the steps; ``recipe`` "": the fault's own, None: no FP8 at all."""
        label, kept = self.fault.recipe if recipe == "" else recipe, frozenset(in_bf16)
        if (label, kept) not in self._losses:
            fallback: dict[str, list[str]] = {}
            for layer, gemm in sorted(kept):
                fallback.setdefault(layer, []).append(gemm)
            self._losses[label, kept] = _trained_on(self._start, self.fault, self.case, label, fallback)
        return self._losses[label, kept]

    @cached_property
    def gemms(self) -> list[Gemm]:
        """Every GEMM of the model."""
        model = resume(self._start, self.fault.recipe).model
        return [(n, gemm) for n, m in model.named_modules() if isinstance(m, SimulatedLinear) for gemm in GEMMS]

    @cached_property
    def noise(self) -> float:
        """Standard deviation of FP8's loss without a fault over starts that differ by a rounding of BF16."""
        starts = [_jittered(self._start, seed) for seed in range(JITTERED)]
        return stdev(_trained_on(start, None, self.case, self.fault.recipe, {}) for start in starts)

    @property
    def gap(self) -> float:
        """What FP8 costs."""
        return self.loss() - self.loss(recipe=None)

    def recovered(self, in_bf16: Collection[Gemm], recipe: str | None = "") -> float:
        """Share of the gap that these GEMMs in BF16, or another recipe, win back."""
        return (self.loss() - self.loss(in_bf16, recipe)) / self.gap

    def alone(self, gemm: Gemm) -> float:
        """What one GEMM in BF16 takes off the loss of FP8."""
        return self.loss() - self.loss([gemm])

    def among_bf16(self, gemm: Gemm) -> float:
        """What one GEMM in FP8 adds to the loss of BF16: nothing hides it there."""
        return self.loss([g for g in self.gemms if g != gemm]) - self.loss(recipe=None)

    def matters(self, gemm: Gemm) -> bool:
        """Whether either is more than chance."""
        return max(self.alone(gemm), self.among_bf16(gemm)) > TIMES_NOISE * self.noise

    def smallest(self) -> frozenset[Gemm] | None:
        """The smallest set that recovers ``ENOUGH``; of several as small the best; None: none of ``LARGEST`` does."""
        effects = {gemm: max(self.alone(gemm), self.among_bf16(gemm)) for gemm in self.gemms if self.matters(gemm)}
        candidates = sorted(effects, key=lambda gemm: -effects[gemm])[:CANDIDATES]
        for size in range(1, LARGEST + 1):
            sets = [frozenset(chosen) for chosen in itertools.combinations(candidates, size)]
            best = max(sets, key=self.recovered, default=None)
            if best is not None and self.recovered(best) >= ENOUGH:
                return best
        return None


def _trained_on(
    start: Checkpoint, fault: Fault | None, case: Case, recipe: str | None, fallback: dict[str, list[str]]
) -> float:
    scene = resume(start, recipe, fallback)
    undo = fault.plant(scene, case) if fault else None
    losses = []
    for _ in range(STEPS):
        losses.append(scene.step())
        undo = undo() if undo else None
    return fmean(losses[STEPS // 2 :])


def _jittered(start: Checkpoint, seed: int) -> Checkpoint:
    random = torch.Generator().manual_seed(seed)
    weights = {n: w * (1 + torch.randn(w.shape, generator=random) * 2.0**-9) for n, w in start.weights.items()}
    return Checkpoint(start.size, start.seed, weights, start.optimizer)


def recommended(fault: Fault, case: Case) -> Recommendation:
    """What fp8dbg recommends for a recorded run with the fault."""
    with tempfile.TemporaryDirectory() as folder, open_run(record(Path(folder) / "run", fault, case)) as run:
        return run.recommendation()


@dataclass(frozen=True)
class Prediction:
    """One GEMM of one trial: what was predicted of it, and what was measured."""

    name: str
    gemm: Gemm
    in_plan: bool
    predicted: float
    alone: float
    among_bf16: float
    matters: bool


def planned(found: Recommendation) -> frozenset[Gemm]:
    """The GEMMs of a plan."""
    return frozenset((entry.layer, gemm) for entry in found.plan.entries for gemm in entry.gemms)


def predictions(trial: Trial, found: Recommendation) -> Iterator[Prediction]:
    """Every GEMM that was predicted to harm, or does."""
    harm = {(point.layer, point.gemm): point.harm or 0.0 for point in found.curve}
    for gemm in trial.gemms:
        alone, among, matters = trial.alone(gemm), trial.among_bf16(gemm), trial.matters(gemm)
        if gemm in harm or matters:
            in_plan = gemm in planned(found)
            yield Prediction(trial.fault.name, gemm, in_plan, harm.get(gemm, 0.0), alone, among, matters)


def main() -> None:
    """Print the tables; exit 1 where less works than is promised."""
    warnings.filterwarnings("ignore", message="Mismatch dtype")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one model instead of all")
    parser.add_argument("--only", choices=list(GALLERY), action="append", help="these faults alone")
    parser.add_argument("--plot", type=Path, help="write predicted against measured as a page")
    given = parser.parse_args()
    began = time.perf_counter()
    faults = [GALLERY[name] for name in given.only or (*FALLBACKS, *OTHERS)]
    cases = CASES[:1] if given.quick else CASES
    good, found = _print_plans([f for f in faults if f.action == "bf16"], cases)
    _print_others([f for f in faults if f.action != "bf16"], cases)
    good &= _print_predictions(found)
    if given.plot:
        _plot(found, given.plot)
    print(f"{time.perf_counter() - began:.0f} s")
    sys.exit(0 if good else 1)


FALLBACKS = [name for name, fault in GALLERY.items() if fault.action == "bf16"]
OTHERS = ["stale_scale", "narrow_gradients"]
"""Faults with a loss to win back by another recipe; the others cost less than chance, or are repaired by hand."""


def _print_plans(faults: Iterable[Fault], cases: Iterable[Case]) -> tuple[bool, list[Prediction]]:
    print(f"{'planted':30}{'FP8':>8}{'BF16':>8}{'noise':>8}{'plan':>6}{'recovers':>10}{'ends':>8}{'smallest':>10}")
    found: list[Prediction] = []
    good = True
    for fault, case in itertools.product(faults, cases):
        trial, advice = Trial(fault, case), recommended(fault, case)
        plan, smallest = planned(advice), trial.smallest()
        layers = [trial.gemms[0][0], trial.gemms[-1][0]]
        ends = trial.recovered([g for g in trial.gemms if g[0] in layers])
        size = "-" if smallest is None else str(len(smallest))
        print(
            f"{f'{fault.name} {case.size} {case.seed}':30}{trial.loss():8.3f}{trial.loss(recipe=None):8.3f}"
            f"{trial.noise:8.4f}{len(plan):>6}{100 * trial.recovered(plan):>9.1f}%{100 * ends:>7.1f}%{size:>10}",
            flush=True,
        )
        good &= trial.recovered(plan) >= ENOUGH and (smallest is None or len(plan) <= len(smallest) + 1)
        found += predictions(trial, advice)
    return good, found


def _print_others(faults: Iterable[Fault], cases: Iterable[Case]) -> None:
    for fault, case in itertools.product(faults, cases):
        trial, advice = Trial(fault, case), recommended(fault, case)
        action = next((a for a in advice.instead if a.recipe), None)
        if action is None:
            print(f"{fault.name} {case.size} {case.seed}: no recipe is recommended", flush=True)
            continue
        share = f"{100 * trial.recovered((), action.recipe):.1f} %" if trial.gap > TIMES_NOISE * trial.noise else "-"
        print(
            f"{f'{fault.name} {case.size} {case.seed}':30}{trial.loss():8.3f}{trial.loss(recipe=None):8.3f}"
            f"{trial.noise:8.4f}  {action.kind} ({action.recipe}): recovers {share}; plan: {len(advice.plan.entries)}",
            flush=True,
        )


def _print_predictions(found: list[Prediction]) -> bool:
    print(f"\n{'GEMM':58}{'plan':>5}{'predicted':>11}{'alone':>9}{'in BF16':>9}{'matters':>9}")
    for one in found:
        marks = f"{'yes' if one.in_plan else '':>5}{one.predicted:>11.4f}{one.alone:>9.4f}{one.among_bf16:>9.4f}"
        print(f"{f'{one.name}: {one.gemm[0]} {one.gemm[1]}':58}{marks}{'yes' if one.matters else '':>9}")
    matter = [one for one in found if one.matters]
    recall = sum(one.in_plan for one in matter) / len(matter) if matter else 1.0
    print(
        f"of {len(matter)} GEMMs whose effect is over {TIMES_NOISE:g} times chance, {100 * recall:.1f} % are in a plan"
    )
    return recall >= ENOUGH


def _plot(found: list[Prediction], path: Path) -> None:
    import plotly.graph_objects as go

    figure = go.Figure()
    for matters, name in ((True, "beyond chance"), (False, "within chance")):
        part = [one for one in found if one.matters == matters]
        figure.add_scatter(
            x=[one.predicted for one in part],
            y=[max(one.alone, one.among_bf16) for one in part],
            text=[f"{one.name}: {one.gemm[0]} {one.gemm[1]}" for one in part],
            mode="markers",
            name=name,
        )
    figure.update_layout(xaxis_title="predicted harm (loss)", yaxis_title="measured effect (loss)")
    figure.write_html(path)


if __name__ == "__main__":
    main()
