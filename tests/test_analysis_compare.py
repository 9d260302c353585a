"""Run against run: same, different from the start, drifting since when; on synthetic runs and on real trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8dbg.analysis.compare import DRIFTING, FROM_START, SAME, Comparison, NotLearnedError, compare
from fp8dbg.analysis.run import open_run
from fp8dbg.analysis.sides import open_side, sides_of
from fp8dbg.errors import NothingRecordedError, UnknownNameError, UsageError
from tests.comparable import EVERY, Fault, train
from tests.synthetic import dead_layer, non_finite, outlier, write_run
from tests.synthetic_tables import Plant

PAIR: dict[str, Any] = {"blocks": 2, "steps": 120, "every": 5}


def against(tmp_path: Path, a: dict[str, Any] | None = None, b: dict[str, Any] | None = None) -> Comparison:
    """Two synthetic runs of different seeds, compared."""
    paths = [
        write_run(tmp_path / name, **PAIR | {"seed": seed} | (options or {}))
        for name, seed, options in (("a", 0, a), ("b", 7, b))
    ]
    return compare(open_run(paths[0]), open_run(paths[1]))


def test_another_seed_is_the_same(tmp_path: Path) -> None:
    """No figure differs; the headline says how much was compared."""
    found = against(tmp_path)
    assert found.verdict == SAME
    assert found.since is None
    assert found.headline.startswith("Same within noise: 10 layers on 24 sampled steps")
    assert found.figures.found == []


@pytest.mark.parametrize(
    ("plant", "layer", "name", "figure", "since"),
    [
        (outlier("layers.1.up", step=50), "layers.1.up", "weight", "saturated", 50),  # the scale lags a step
        (dead_layer("layers.1.down", step=60), "layers.1.down", "weight", "zeros", 60),
        (non_finite("layers.1.gate", "grad_weight", 70), "layers.1.gate", "grad_weight", "non_finite", 70),
    ],
)
def test_a_fault_is_dated_and_placed(
    plant: list[Plant], layer: str, name: str, figure: str, since: int, tmp_path: Path
) -> None:
    """The first layer and tensor in order of execution, and the very sampled step."""
    found = against(tmp_path, b={"plant": plant})
    assert (found.verdict, found.since) == (DRIFTING, since)
    assert found.first is not None
    assert (found.first.layer, found.first.name, found.first.figure) == (layer, name, figure)


def test_a_fault_of_the_first_step_is_there_from_the_start(tmp_path: Path) -> None:
    """Nothing drifted: it never was the same."""
    found = against(tmp_path, b={"plant": outlier("layers.1.up", step=0)})
    assert found.verdict == FROM_START


def test_a_fault_in_every_layer_cannot_hide_in_its_own_noise(tmp_path: Path) -> None:
    """Noise is taken from all layers, and capped: all outputs 16 times larger from the middle on still differ."""
    plant = [{"layer": "*", "tensor": "output", "from_step": 10, "rms": 16.0}]
    found = against(tmp_path, b={"plant": plant})
    assert (found.verdict, found.since) == (DRIFTING, 10)


def test_casts_are_compared_only_where_they_are_alike(tmp_path: Path) -> None:
    """Another recipe is no difference by itself; a note says that its casts are not judged."""
    found = against(tmp_path, b={"recipe": "block", "gradients": "e4m3"})
    assert found.verdict == SAME
    assert "cast 30 tensors differently" in found.notes[0]
    assert ("recipe", "delayed", "block") in [(c.key, c.a, c.b) for c in found.fingerprint]


def test_a_fallback_is_in_the_fingerprint(tmp_path: Path) -> None:
    """What the second run keeps in BF16 and the first does not."""
    found = against(tmp_path, b={"kept": ("layers.1.up",)})
    (change,) = [c for c in found.fingerprint if c.key == "kept in BF16"]
    assert (change.a, change.b) == ([], ["layers.1.up: fprop, dgrad, wgrad"])


def test_flat_against_flat_is_refused(tmp_path: Path) -> None:
    """That runs agree which learned nothing is no evidence."""
    flat = {"plant": [{"table": "steps", "loss": 5.0}]}
    with pytest.raises(NotLearnedError, match="no evidence") as refused:
        against(tmp_path, flat, flat)
    assert refused.value.exit_code == 2


def test_runs_without_a_loss_are_refused(tmp_path: Path) -> None:
    """Either may have learned nothing."""
    silent = {"plant": [{"table": "steps", "loss": None}]}
    with pytest.raises(NotLearnedError, match="has a loss"):
        against(tmp_path, silent, silent)


def test_trainer_against_rollout(tmp_path: Path) -> None:
    """The rollout has no loss, no gradients and fewer layers: what both have is compared, the rest is named."""
    gone = [{"layer": "*", "tensor": "grad_*", "drop": True}, {"layer": "layers.0.*", "tensor": "*", "drop": True}]
    rollout = [*gone, {"layer": "*", "gemm": "?grad", "drop": True}, {"table": "steps", "loss": None}]
    found = against(tmp_path, b={"plant": rollout})
    assert found.verdict == SAME
    assert len(found.figures.layers) == 5
    assert any("Only A has layers.0.attn.proj" in note for note in found.notes)
    assert any("only figures are compared" in note for note in found.notes)


def test_ranks_of_one_run(tmp_path: Path) -> None:
    """RUN:1 is rank 1's share; a fault of that rank alone is found in it."""
    plant = [dict(p, rank=1) for p in outlier("layers.1.up", step=50)]
    path = write_run(tmp_path / "run", ranks=2, plant=plant, **PAIR)
    names = sides_of(path, None, "0,1")
    assert names == (f"{path}:0", f"{path}:1")
    found = compare(open_side(names[0]), open_side(names[1]), names)
    assert (found.verdict, found.since) == (DRIFTING, 50)
    with pytest.raises(UnknownNameError, match="Valid names: 0, 1"):
        open_side(f"{path}:2")


@pytest.mark.parametrize(("b", "ranks"), [(None, None), ("b", "0,1"), (None, "0"), (None, "1,1"), (None, "a,b")])
def test_two_sides_must_be_named(b: str | None, ranks: str | None) -> None:
    """Either a second run or two different ranks."""
    with pytest.raises(UsageError):
        sides_of("a", b, ranks)


def test_nothing_in_common_is_said(tmp_path: Path) -> None:
    """Steps that never meet; exit code 3."""
    with pytest.raises(NothingRecordedError, match="no sampled step in common"):
        against(tmp_path, {"every": 10, "plant": [_at_start("tensor"), _at_start("gemm")]}, {"steps": 10})


def _at_start(kind: str) -> Plant:
    """Leaves the rows of the first steps out."""
    return {"layer": "*", kind: "*", "to_step": 10, "drop": True}


@pytest.mark.slow
def test_real_trainings(tmp_path: Path) -> None:
    """Two seeds are the same within noise; a fault at step 33 is told apart, its onset within two sampled steps.

    ``python -m tests.benchmarks.compare`` does it with twenty pairs of each kind, under five recipes.
    """
    healthy, other = (train(tmp_path / f"seed{seed}", seed=seed, steps=60) for seed in (1, 2))
    faulted = train(tmp_path / "faulted", seed=3, fault=Fault("outlier", 33), steps=60)
    assert compare(open_run(healthy), open_run(other)).verdict == SAME
    found = compare(open_run(healthy), open_run(faulted))
    assert found.verdict == DRIFTING
    assert found.since is not None
    assert 0 <= found.since - 33 <= 2 * EVERY
