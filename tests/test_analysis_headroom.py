from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8dbg import attach, simulate
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.headroom import WORTH, margin_for, room_for
from fp8dbg.analysis.run import Run, open_run
from fp8dbg.numerics.formats import FORMATS
from tests.synthetic import amax_jump, loss_spike, write_run

NONE: Mapping[int, int] = {}

JUMP, STEPS = 55, 80
"""The step of the bad batch, between two sampled ones, and how many steps are trained."""


def row(recipe: str, tensor: str = "input") -> dict[str, Any]:
    return {"recipe": recipe, "tensor": tensor, "format": "e5m2" if tensor == "grad_output" else "e4m3"}


@pytest.mark.parametrize(
    ("recipe", "times", "margin"),
    [
        ("delayed:history=16", 49, 6),
        ("delayed:history=16", 4, 2),
        ("delayed:history=16", 1.1, 1),
        ("delayed:history=16,margin=1", 24.5, 6),
        ("delayed:margin=2", 2, 3),
        ("current", 49, None),
        ("a host's own", 49, None),
    ],
)
def test_margin_is_the_one_in_force_and_the_jump_in_binades(recipe: str, times: float, margin: int | None) -> None:
    """On top of what is in force, rounded up; a power of two fits exactly."""
    assert margin_for(row(recipe), math.log2(448 * times)) == margin


@pytest.mark.parametrize(
    ("tensor", "largest", "margin"),
    [
        ("input", 464, None),
        ("input", 464.001, 1),
        ("input", 448 * 2.06, 1),
        ("input", 464 * 4, 2),
        ("input", 464.001 * 4, 3),
        ("input", 448 * 8.25, 3),
        ("input", 448 * 8.5, 4),
        ("grad_output", 61439, None),
        ("grad_output", 61440, 1),
        ("grad_output", 61439 * 4, 2),
        ("grad_output", 61440 * 4, 3),
    ],
)
def test_margin_is_none_too_many(tensor: str, largest: float, margin: int | None) -> None:
    """What still rounds to the maximum fits: up to E4M3's tie at 464, and below E5M2's at 61440."""
    assert margin_for(row("delayed", tensor), math.log2(largest)) == margin


@pytest.mark.parametrize(("tensor", "largest"), [("input", 448.0), ("grad_output", 57344.0)])
def test_margin_is_the_smallest_that_a_trial_finds(tensor: str, largest: float) -> None:
    """amaxes of two steps, as BF16 holds them: the scale of the first under each margin, and the cast of the second."""
    fmt = FORMATS[row("delayed", tensor)["format"]]
    amaxes = torch.exp(2 * torch.randn(500, 2, generator=torch.Generator().manual_seed(0))).bfloat16().float().numpy()
    for before, now in amaxes:
        landed = [np.float32(largest * 2.0**-margin) / before * now for margin in range(20)]
        smallest = next(margin for margin, x in enumerate(landed) if not fmt.saturates(x))
        assert (margin_for(row("delayed", tensor), math.log2(landed[0])) or 0) == smallest


@pytest.mark.parametrize(
    ("recipe", "tensor", "needed", "once", "starts", "ends"),
    [
        ("delayed", "input", 2, True, "Look at the batch of step 9; a margin of 2, or current", "would have held it."),
        ("delayed", "input", 2, False, "A margin of 2, or current scaling", "look at the batch of step 9."),
        (
            "delayed:margin=1",
            "input",
            3,
            True,
            "Look at the batch of step 9; a margin of 3 rather than 1, or",
            "held it.",
        ),
        (
            "delayed",
            "input",
            4,
            True,
            "Look at the batch of step 9; no margin worth its price",
            "current scaling for this layer would.",
        ),
        (
            "delayed",
            "weight",
            2,
            True,
            "Look at what rescaled the weight at step 9; a margin of 2",
            "would have held it.",
        ),
        ("unscaled", "input", None, True, "Look at the batch of step 9; current scaling", "would clip nothing."),
        ("current", "input", None, True, "Find what set this scale: current scaling", "nothing clips."),
    ],
)
def test_advice_fits_the_recipe_in_force(
    recipe: str, tensor: str, needed: int | None, once: bool, starts: str, ends: str
) -> None:
    """Whole sentences: what comes first, and nothing that is set already."""
    said = room_for(row(recipe, tensor), 9, needed, once)
    assert said.startswith(starts)
    assert said.endswith(ends)


def found(folder: Path, recipe: str) -> dict[str, Finding]:
    """The findings on a small simulated model that is given one batch 45 times too large."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    model, teacher = simulate(net, recipe), torch.randn(128, 10)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with attach(model, folder, optimizer=optimizer, every=10) as run:
        for step in range(STEPS):
            batch = torch.randn(64, 128)
            loss = torch.nn.functional.cross_entropy(
                model(batch * (45 if step == JUMP else 1)), (batch @ teacher).argmax(1)
            )
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no type for it
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss.item())
    return {finding.code: finding for finding in open_run(folder).findings()}


def trained(folder: Path, peaks: dict[int, float], few: Mapping[int, int] = NONE) -> Run:
    """Fifty steps of one layer whose input is the same but for those on which it, or a few of its values, peak."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8, bias=False)).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    batch = torch.randn(256, 16)
    batch /= batch.abs().max()
    with attach(model, folder, optimizer=optimizer, recipe="delayed:history=16", every=1) as run:
        for step in range(50):
            x = batch * peaks.get(step, 1.0)
            if step in few:
                x = batch.clone()
                x.view(-1)[: few[step]] = peaks[step]
            model(x.bfloat16()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=1.0)
    return open_run(folder)


@pytest.mark.parametrize(
    ("peaks", "few", "margin"),
    [
        ({30: 2.06}, NONE, 1),
        ({30: 8.25}, NONE, 3),
        ({20: 4.0, 40: 6.0}, NONE, 3),
        ({30: 3.0, 31: 60.0}, {31: 32}, 5),
    ],
)
def test_margin_advised_holds_every_step_of_the_finding(
    peaks: dict[int, float], few: Mapping[int, int], margin: int, tmp_path: Path
) -> None:
    """The sentence, the recipe and a replay of the recorded amaxes under each margin agree."""
    run = trained(tmp_path / "run", peaks, few)
    (finding,) = run.findings()
    assert (finding.code, finding.tensor) == ("saturation", "input")
    (action,) = run.recommendation().instead
    if margin <= WORTH:
        assert f"margin of {margin}, or current scaling" in finding.remedy
        assert action.recipe == f"delayed:history=16,margin={margin}"
    else:
        assert f"(it takes {margin}: {2**margin} times less room" in finding.remedy
        assert action.recipe == "current"
    amaxes = run.sql("select amax from amax where tensor = 'input' order by step").df()["amax"].to_numpy(np.float32)
    clips = [
        any(
            np.float32(448 * 2.0**-m) / amaxes[max(0, step - 16) : step].max() * amaxes[step] > 464
            for step in range(1, 50)
        )
        for m in range(margin + 1)
    ]
    assert clips == [True] * margin + [False]


def test_lone_element_on_a_sampled_step_is_not_called_unsampled(tmp_path: Path) -> None:
    """One value of 4,096 goes 9 times beyond on a step whose figures say that it alone clipped."""
    assert trained(tmp_path / "run", {30: 9.0}, {30: 1}).findings() == []


def test_margin_in_force_is_not_advised_again(tmp_path: Path) -> None:
    """Under a margin of 1 a batch 45 times too large needs 6, which is not worth it; the spike is not called clean."""
    findings = found(tmp_path / "run", "delayed:history=16,margin=1")
    remedy = findings["saturation"].remedy
    assert remedy.startswith(f"Look at the batch of step {JUMP}; no margin worth its price")
    assert "it takes 6 rather than 1" in remedy
    assert "not_fp8" not in findings


def test_history_in_force_is_not_advised_again(tmp_path: Path) -> None:
    """Under a margin of 6 the batch fits and the scale is stale after it: the history is 16 already."""
    stale = found(tmp_path / "run", "delayed:history=16,margin=6")["stale_scale"]
    assert stale.remedy == (
        "Use the most recent amax (the history of 16 is short already) or reset the history; lower the margin of 6, "
        "which costs small values a factor of 64; BF16 is not needed."
    )


def test_spike_beside_a_scale_that_clipped_is_not_called_clean(tmp_path: Path) -> None:
    """One tensor that clipped between sampled steps, a finding to watch only, on the step of the loss spike."""
    folder = write_run(tmp_path / "run", plant=[*amax_jump(155, layer="layers.2.down"), *loss_spike(155)])
    assert [f.code for f in open_run(folder).findings()] == ["saturation"]
    far = write_run(tmp_path / "far", plant=[*amax_jump(55, layer="layers.2.down"), *loss_spike(155)])
    assert {f.code for f in open_run(far).findings()} >= {"saturation", "not_fp8"}
