"""What `compare` and `check` say of real trainings: ``python -m tests.benchmarks.compare [FOLDER]``.

Trains 25 healthy and 20 faulted models of ten layers in simulated FP8 under five recipes, each from a seed of its own
(some five minutes on one core), and two that learn nothing. Prints for twenty healthy pairs (same recipe, other seed)
and twenty faulted ones what `compare` says, and whether `check` passes. FOLDER keeps the run folders for the next time.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fp8dbg.analysis.check import check
from fp8dbg.analysis.compare import SAME, NotLearnedError, compare
from fp8dbg.analysis.run import open_run
from tests.comparable import EVERY, FAULTED, RECIPES, Fault, faulted_seed, healthy_seed, train


def trained(root: Path, recipe: str, seed: int, fault: Fault | None = None, learning_rate: float = 4e-3) -> Path:
    """The run folder of that training; trained only if it is not there."""
    path = root / f"{recipe.split(':')[0]}-{seed}-{fault.kind if fault else 'healthy'}-{learning_rate}"
    if not (path / "done").exists():
        train(path, recipe, seed=seed, fault=fault, learning_rate=learning_rate)
        (path / "done").touch()
    return path


def healthy_pairs(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Twenty: four of each recipe, neighbours of five seeds."""
    for recipe in RECIPES:
        runs = [trained(root, recipe, healthy_seed(recipe, i)) for i in range(5)]
        for i in range(4):
            yield recipe, runs[i], runs[i + 1]


def faulted_pairs(root: Path) -> Iterator[tuple[str, Fault, Path, Path]]:
    """Twenty: a healthy run of the recipe, and one of another seed with the fault."""
    for index, (recipe, fault) in enumerate(FAULTED):
        healthy = trained(root, recipe, healthy_seed(recipe, 0))
        yield recipe, fault, healthy, trained(root, recipe, faulted_seed(index), fault)


def verdict(a: Path, b: Path) -> tuple[str, int | None, str]:
    """Verdict, onset and headline."""
    with open_run(a) as one, open_run(b) as other:
        found = compare(one, other)
    return found.verdict, found.since, found.headline


def passes(path: Path) -> tuple[bool, str]:
    """Whether `check` passes a run by its defaults, and the gates that fail."""
    with open_run(path) as run:
        result = check(run)
    return result.passed, ", ".join(gate.rule for gate in result.gates if not gate.passed)


def on_time(fault: Fault, said: str, since: int | None) -> bool:
    """Whether the verdict is the right one, and its onset within two sampled steps of the fault."""
    if since is None:
        return False
    wanted = "different from the start" if fault.at == 0 else "drifting"
    return said == wanted and -EVERY < since - fault.at <= 2 * EVERY


def main(folder: str | None = None) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(folder or place)
        same, right, failed = [], [], []
        checked: dict[Path, tuple[bool, str]] = {}
        print(f"{'recipe':18} {'planted':18} compare says")
        for recipe, a, b in healthy_pairs(root):
            said, since, headline = verdict(a, b)
            same.append(said == SAME)
            checked |= {path: passes(path) for path in (a, b) if path not in checked}
            print(f"{recipe:18} {'-':18} {headline}", flush=True)
        for recipe, fault, a, b in faulted_pairs(root):
            said, since, headline = verdict(a, b)
            right.append(on_time(fault, said, since))
            failed.append(passes(b))
            print(f"{recipe:18} {fault.kind + ' at ' + str(fault.at):18} {headline}", flush=True)
            print(f"{'':37} check fails: {failed[-1][1] or 'NOTHING'}", flush=True)
        flat = [trained(root, RECIPES[0], seed, learning_rate=0.0) for seed in (2000, 2001)]
        try:
            refused = verdict(*flat)[2]
        except NotLearnedError as error:
            refused = f"refused: {error}"
        print(f"flat against flat: {refused}")
        print(f"healthy pairs the same within noise: {sum(same)} of {len(same)}")
        print(f"faulted pairs told apart, onset within two sampled steps: {sum(right)} of {len(right)}")
        print(f"healthy runs that pass check: {sum(ok for ok, _ in checked.values())} of {len(checked)}")
        print(f"faulted runs that fail check: {sum(not ok for ok, _ in failed)} of {len(failed)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
