"""Activation checkpointing whose second pass is not its first: seen on sampled steps, and only where it is so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8dbg.analysis.run import open_run
from fp8dbg.recording.repeats import Repeats
from tests.nets import CASES, Case, Net, table, train


def _drawn_anew(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    return out


def _drawn_anew_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, x, use_reentrant=True, preserve_rng_state=False)
    return out


DRAWN_ANEW = {
    "non-reentrant": Case(lambda: Net(wrap=_drawn_anew), microbatches=2),
    "reentrant": Case(lambda: Net(wrap=_drawn_anew_reentrant), microbatches=2, gradients=True),
    "simulated": Case(lambda: Net(wrap=_drawn_anew), recipe="delayed:history=4"),
}


@pytest.mark.parametrize("name", DRAWN_ANEW)
def test_dropout_drawn_anew_is_found(name: str, tmp_path: Path) -> None:
    """Layers behind the dropout say so on the sampled steps, those before it do not; the verdict names the first."""
    bare = train(DRAWN_ANEW[name], steps=5)
    bare.assert_same(train(DRAWN_ANEW[name], steps=5, run_dir=tmp_path, every=2))
    rows = table(tmp_path, "select distinct step, layer from events where kind = 'recompute' order by step, layer")
    told = {(row["step"], row["layer"]) for row in rows}
    assert {(step, "blocks.0.down") for step in (0, 2, 4)} <= told
    assert not {layer for _, layer in told} & {"blocks.0.up", "head"}
    assert not {step for step, _ in told} & {1, 3}
    (finding,) = [f for f in open_run(tmp_path).findings() if f.code == "recompute_mismatch"]
    assert (finding.severity, finding.layer, finding.first_step) == ("act", "blocks.0.down", 0)


@pytest.mark.parametrize("name", [name for name in CASES if "reentrant" in name or "selective" in name])
def test_a_true_repetition_is_silent(name: str, tmp_path: Path) -> None:
    """Whatever the kind of checkpointing: with the random state restored nothing differs."""
    train(CASES[name], steps=3, run_dir=tmp_path, every=1)
    assert table(tmp_path, "select * from events where kind = 'recompute'") == []


def test_passes_are_matched_by_what_they_read() -> None:
    """Microbatches may come back in any order; one that has come back is not matched again."""
    repeats, inputs = Repeats(), [torch.randn(40, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    for x in inputs:
        repeats.first(7, x)
    assert [repeats.again(7, inputs[i]) for i in (1, 0)] == [0.0, 0.0]
    assert (repeats.again(7, inputs[1]) or 0.0) > 0.1
    assert repeats.again(7, inputs[1]) is None


def test_a_new_step_forgets_the_last_ones_passes() -> None:
    """A recompute is compared within its step."""
    repeats = Repeats()
    repeats.first(1, torch.ones(3))
    assert repeats.again(2, torch.zeros(3)) is None


@pytest.mark.parametrize(
    ("first", "again", "difference"),
    [
        (torch.tensor([4.0, 1.0]), torch.tensor([4.0, 3.0]), 0.5),
        (torch.tensor([4.0, 1.0]), torch.tensor([2.0, 1.0]), 0.5),
        (torch.zeros(2), torch.zeros(2), 0.0),
        (torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0]), 0.0),
        (torch.ones(3), torch.ones(4), 1.0),
        (torch.empty(0), torch.empty(0), 0.0),
        (torch.ones(4, 6).t(), torch.ones(6, 4), 0.0),
    ],
)
def test_difference(first: Tensor, again: Tensor, difference: float) -> None:
    """Relative to the larger amax; NaN equals NaN, shapes do not, strides do not matter."""
    repeats = Repeats()
    repeats.first(0, first)
    assert repeats.again(0, again) == difference
