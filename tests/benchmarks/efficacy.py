"""Whether what is recommended works: ``python -m tests.benchmarks.efficacy [--only NAME] [--case SIZE:SEED] ...``.

From one checkpoint a faulted model trains on in FP8, in BF16, with the recommended plan, and with the first and the
last layer in BF16; then with every set of GEMMs in BF16 that is smaller than the plan, smallest first, until one
repairs ``ENOUGH``. Recovered is the share of the loss between FP8 and BF16 that is won back; repaired is the share of
what the fault costs. FP8 without a fault (well) costs something, too: no plan for a fault wins that back, and where the
fault costs little it counts. For faults where BF16 is not the answer, the recommended action is taken.

Last, what was predicted of every single GEMM beside what it does (tests/benchmarks/trials.py says what an effect is,
and when it is beyond chance). ``--plans`` leaves that out, and with it all sets but those that a promise is about,
smaller than the plan by two GEMMs, of GEMMs that read a faulty tensor.

Losses are means over the last half of the steps and over several orders of the data. ``--keep FILE`` goes on where an
earlier call ended, ``--plot FILE`` draws predicted against measured: an HTML page, or a picture by its suffix.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from examples.faults.gallery import CASES, GALLERY, Case, Fault, record
from examples.faults.lab import SIZES
from fp8dbg.analysis.instead import Action
from fp8dbg.analysis.recommend import Recommendation
from fp8dbg.analysis.run import open_run
from tests.benchmarks.predicted import Prediction, plot, predictions, print_predictions
from tests.benchmarks.trials import Gemm, Ledger, Trial

ENOUGH = 0.95
"""Share of what a fault costs that a plan must win back, and of the GEMMs that matter that must be in it."""

LARGEST = 3
"""GEMMs in a set of the exhaustive search, at most: beyond, there are too many."""

CANDIDATES = 8
"""GEMMs that sets of several are put together of: those with the largest effects."""

FALLBACKS = [name for name, fault in GALLERY.items() if fault.action == "bf16"]
OTHERS = ["amax_jump", "jump_everywhere", "stale_scale", "infinite_amax", "scale_never_updated", "narrow_gradients"]
"""Faults of the recipe or of its state that can begin with the trial; those of the program are repaired in it."""


def recommended(fault: Fault, case: Case) -> Recommendation:
    """What fp8dbg recommends for a recorded run with the fault.

    Where a fault leaves nothing of the layers behind it to be seen, it says to record again with the plan applied: so
    that is done. What was predicted of GEMMs that are in BF16 by then is what the first run said.
    """
    with tempfile.TemporaryDirectory() as folder:
        with open_run(record(Path(folder) / "run", fault, case)) as run:
            found = run.recommendation()
        if not (found.plan and found.unseen):
            return found
        with open_run(record(Path(folder) / "again", fault, case, fallback=found.plan.as_fallback())) as run:
            again = run.recommendation()
    told = {(point.layer, point.gemm): point.harm for point in found.curve}
    curve = [p if p.harm is not None else replace(p, harm=told.get((p.layer, p.gemm))) for p in again.curve]
    return replace(again, curve=tuple(curve))


def planned(found: Recommendation) -> frozenset[Gemm]:
    """The GEMMs of a plan."""
    return frozenset((entry.layer, gemm) for entry in found.plan.entries for gemm in entry.gemms)


def smallest(trial: Trial, largest: int, readers: Sequence[Gemm] = ()) -> int | None:
    """GEMMs in the smallest set of at most ``largest`` that repairs ``ENOUGH``; None: none of them does.

    Of all GEMMs, or of ``readers`` alone if any are given.
    """
    for size in range(1, min(largest, LARGEST) + 1):
        among = readers or (trial.gemms if size == 1 else _candidates(trial))
        if any(trial.repaired(trial.loss(chosen)) >= ENOUGH for chosen in itertools.combinations(among, size)):
            return size
    return None


def _candidates(trial: Trial) -> list[Gemm]:
    return sorted(trial.gemms, key=lambda gemm: -trial.effect(gemm).mean)[:CANDIDATES]


def main() -> None:
    """Print the tables; exit 1 where less works than is promised."""
    warnings.filterwarnings("ignore", message="Mismatch dtype")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*FALLBACKS, *OTHERS], action="append", help="these faults alone")
    parser.add_argument("--case", type=_case, action="append", help="these models alone, as small:0")
    parser.add_argument("--plans", action="store_true", help="leave out what single GEMMs do")
    parser.add_argument("--keep", type=Path, help="file of losses: read where it exists, and added to")
    parser.add_argument("--plot", type=Path, help="draw predicted against measured")
    given = parser.parse_args()
    began, ledger = time.perf_counter(), Ledger(given.keep)
    pairs = list(itertools.product(given.only or [*FALLBACKS, *OTHERS], given.case or CASES))
    trials = [Trial(GALLERY[name], case, ledger) for name, case in pairs]
    good, found = _print_plans([t for t in trials if t.fault.action == "bf16"], singles=not given.plans)
    good &= _print_others([t for t in trials if t.fault.action != "bf16"])
    if found:
        good &= print_predictions(found) >= ENOUGH
    if found and given.plot:
        plot(found, given.plot)
    print(f"{time.perf_counter() - began:.0f} s")
    sys.exit(0 if good else 1)


def _case(text: str) -> Case:
    size, _, seed = text.partition(":")
    if size not in SIZES or not seed.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not SIZE:SEED with a size among {', '.join(SIZES)}")
    return Case(size, int(seed))


def _print_plans(trials: Iterable[Trial], singles: bool) -> tuple[bool, list[Prediction]]:
    columns = ("FP8", "well", "BF16", "noise", "plan", "recovers", "repairs", "ends", "smallest")
    print(f"{'planted':30}" + "".join(f"{name:>9}" for name in columns))
    found: list[Prediction] = []
    good = True
    for trial in trials:
        advice = recommended(trial.fault, trial.case)
        plan, ends = planned(advice), (trial.gemms[0][0], trial.gemms[-1][0])
        reach = len(plan) - (1 if singles else 2)
        fewest = smallest(trial, reach, () if singles else [(p.layer, p.gemm) for p in advice.curve])
        loss = trial.loss(plan)
        at_ends = trial.loss([g for g in trial.gemms if g[0] in ends])
        shares = (trial.recovered(loss), trial.repaired(loss), trial.repaired(at_ends))
        print(
            f"{_losses(trial)}{len(plan):>9}{''.join(f'{100 * share:>8.1f}%' for share in shares)}"
            f"{fewest or f'> {max(reach, 0)}':>9}",
            flush=True,
        )
        good &= trial.repaired(loss) >= ENOUGH and (fewest is None or len(plan) <= fewest + 1)
        found += predictions(trial, advice, plan) if singles else []
    return good, found


def _losses(trial: Trial) -> str:
    losses = (trial.loss(), trial.well.loss(), trial.loss(recipe=None))
    name = f"{trial.fault.name} {trial.case.size} {trial.case.seed}"
    return f"{name:30}" + "".join(f"{loss:9.4f}" for loss in losses) + f"{trial.gap.noise:9.4f}"


def _print_others(trials: Iterable[Trial]) -> bool:
    """What the recommended action recovers, where FP8 changes the loss by more than chance; whether that is enough.

    A jump that FP8 clips makes the loss lower, not higher: it is the bad batch that costs, in BF16 all of it. What is
    won back then is that FP8 does what BF16 does, and there is nothing to repair.
    """
    good = True
    for trial in trials:
        advice = recommended(trial.fault, trial.case)
        action = advice.instead[0] if advice.instead else None
        said = "nothing" if action is None else action.kind + (f" ({action.recipe})" if action.recipe else "")
        shares = {}
        if action and trial.gap.differs:
            loss = _taken(trial, action).loss()
            shares["recovers"] = trial.recovered(loss)
            if trial.gap.matters:
                shares["repairs"] = trial.repaired(loss)
        won = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items()) or "within chance"
        print(f"{_losses(trial)}  {said}: {won}; GEMMs in BF16: {len(planned(advice))}", flush=True)
        good &= not advice.plan and action is not None and max(shares.values(), default=1.0) >= ENOUGH
    return good


def _taken(trial: Trial, action: Action) -> Trial:
    """The trial with the action: under the recipe that it names, else with the state repaired, so without the fault."""
    return trial.with_fault(replace(trial.fault, recipe=action.recipe)) if action.recipe else trial.well


if __name__ == "__main__":
    main()
