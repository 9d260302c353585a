"""What fp8dbg says of runs whose fault is known: ``python -m tests.benchmarks.faults [--quick] [--only NAME]``.

One line for each planted fault: in how many models the first finding is the right verdict on the right layer and
tensor, its onset within one sampled step of the truth, and the recommended action the right one; beside it how often
the usual guesses name the layer: the first and the last layer, and the tensor with the largest mean squared error.
Then healthy runs of every recipe, none of which may have a finding to act on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.faults.gallery import CASES, EVERY, GALLERY, HEALTHY, Case, Fault, record, record_healthy
from fp8dbg.analysis.run import Run, open_run

FEWEST = 0.95
"""Share of the faulted runs in which the right verdict must be first."""


@dataclass(frozen=True)
class Score:
    """What was right about one run."""

    verdict: bool
    place: bool
    onset: bool
    action: bool
    ends: bool
    worst_mse: bool
    said: str


def scored(fault: Fault, case: Case, folder: Path) -> Score:
    """Record a fault and judge the judgement."""
    with open_run(record(folder / f"{fault.name}-{case.size}-{case.seed}", fault, case)) as run:
        return score(run, fault, case)


def score(run: Run, fault: Fault, case: Case) -> Score:
    """Judge what fp8dbg says of a recorded fault."""
    findings = run.findings()
    layers = fault.named(case)
    guess = _worst_mse(run)
    ends = (next(iter(run.evidence.layer_order), None), next(reversed(run.evidence.layer_order), None))
    said = "; ".join(f"{f.severity} {f.code} {f.where} step {f.first_step}" for f in findings[:3]) or "nothing"
    first = findings[0] if findings else None
    action = _action(run)
    return Score(
        verdict=first is not None and first.code == fault.code,
        place=first is not None and first.layer in layers and first.tensor in fault.tensors,
        onset=first is not None and abs((first.first_step or 0) - fault.onset) <= EVERY,
        action=action == fault.action,
        ends=any(layer in ends for layer in layers if layer),
        worst_mse=guess is not None and guess[0] in layers and guess[1] in fault.tensors,
        said=f"{said} -> {action}",
    )


def _action(run: Run) -> str:
    found = run.recommendation()
    return "bf16" if found.plan else found.instead[0].kind if found.instead else "none"


def _worst_mse(run: Run) -> tuple[str, str] | None:
    query = "select layer, tensor from tensors where mse is not null order by step desc, mse desc limit 1"
    return next(iter(run.sql(query).fetchall()), None)


def healthy_findings(folder: Path, cases: Iterable[Case]) -> Iterator[tuple[str, list[str]]]:
    """For each healthy run its name, and its findings to act on or to watch."""
    for case in cases:
        for recipe, in_force in HEALTHY:
            name = f"{'' if in_force else 'BF16 beside '}{recipe}, {case.size} {case.seed}"
            path = folder / f"{case.size}-{case.seed}-{in_force}-{recipe}"
            with open_run(record_healthy(path, recipe, in_force, case)) as run:
                yield name, [f"{f.severity} {f.code} {f.where}: {f.summary}" for f in run.findings()]


def main() -> None:
    """Print both tables; exit 1 where less is right than is promised."""
    warnings.filterwarnings("ignore", message="Mismatch dtype")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one model instead of all")
    parser.add_argument("--only", choices=[*GALLERY, "healthy"], action="append", help="these rows alone")
    given = parser.parse_args()
    wanted, cases = given.only or [*GALLERY, "healthy"], CASES[:1] if given.quick else CASES
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        faults = [name for name in wanted if name in GALLERY]
        right = not faults or _print_faults(faults, cases, Path(folder))
        well = "healthy" not in wanted or _print_healthy(Path(folder), cases)
    print(f"{time.perf_counter() - began:.0f} s")
    sys.exit(0 if right and well else 1)


def _print_faults(names: list[str], cases: Iterable[Case], folder: Path) -> bool:
    columns = ("verdict", "place", "onset", "action", "ends", "worst_mse")
    print(f"{'planted':22}{'runs':>6}" + "".join(f"{name:>11}" for name in columns), flush=True)
    total: list[Score] = []
    for name in names:
        scores = [scored(GALLERY[name], case, folder) for case in cases]
        counts = "".join(f"{sum(getattr(s, column) for s in scores):>11}" for column in columns)
        print(f"{name:22}{len(scores):>6}{counts}", flush=True)
        for case, one in zip(cases, scores, strict=True):
            if not (one.verdict and one.place and one.onset and one.action):
                print(f"    {case.size} {case.seed}: planted {GALLERY[name].says(case)}; said {one.said}", flush=True)
        total += scores
    shares = {column: sum(getattr(s, column) for s in total) / len(total) for column in columns}
    print(f"{'share':22}{len(total):>6}" + "".join(f"{100 * share:>10.1f}%" for share in shares.values()))
    return sum(s.verdict and s.place for s in total) >= FEWEST * len(total)


def _print_healthy(folder: Path, cases: Iterable[Case]) -> bool:
    runs, acute, watched = 0, 0, 0
    for name, found in healthy_findings(folder, cases):
        runs += 1
        acute += any(text.startswith("act") for text in found)
        watched += any(text.startswith("watch") for text in found)
        for text in found:
            print(f"    {name}: {text}", flush=True)
    print(f"healthy runs: {runs}; with a finding to act on: {acute}, to watch: {watched}")
    return acute == 0


if __name__ == "__main__":
    main()
