"""What another recipe would have done, against fp8dbg.measure on the very tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8dbg
from fp8dbg.analysis.run import Run, open_run
from fp8dbg.analysis.whatif import Answer, whatif
from fp8dbg.errors import NothingRecordedError, UnknownNameError, UsageError
from fp8dbg.numerics.recipes import DelayedState, recipe_named
from fp8dbg.runs.folder import RunWriter
from tests import nets
from tests.synthetic import write_run

STEPS = 6
ROLES = ("input", "weight", "grad_output")


class Kept(nn.Linear):
    """A layer that keeps what its GEMMs read."""

    def __init__(self) -> None:
        super().__init__(48, 64, bias=False)
        self.read: list[dict[str, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, 48] in BF16."""
        y = super().forward(x)
        self.read.append({"input": x.detach().clone(), "weight": self.weight.detach().clone()})
        y.register_hook(self.keep_gradient)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return y

    def keep_gradient(self, gradient: torch.Tensor) -> None:
        """The output's gradient has come."""
        self.read[-1]["grad_output"] = gradient.detach().clone()


def train(path: Path, **options: Any) -> list[dict[str, torch.Tensor]]:
    """Amaxes that wander, one of them tenfold; returns the operands of each step."""
    torch.manual_seed(0)
    layer = Kept().bfloat16()
    optimizer = torch.optim.SGD(layer.parameters(), 1e-2)
    with fp8dbg.attach(layer, path, optimizer=optimizer, **({"every": 1} | options)):
        for step in range(STEPS):
            x = (torch.randn(32, 48) * (40.0 if step == 3 else 1.0 + 0.1 * step)).exp2().clamp(max=3e4).bfloat16()
            layer(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return layer.read


def answers(run: Run, recipe: str, **options: Any) -> dict[str, Answer]:
    """By tensor."""
    return {a.tensor: a for a in whatif(run, recipe, **options).answers}


def pooled(read: list[dict[str, torch.Tensor]], role: str, recipe: str, scales: list[float | None]) -> dict[str, float]:
    """The figures by ``fp8dbg.measure``, over all steps but the first."""
    found: list[Any] = [fp8dbg.measure(t[role], None, recipe, s, role) for t, s in zip(read, scales, strict=True)][1:]
    x2 = sum(m.rms**2 * m.numel for m in found)
    return {
        "underflow_ratio": sum(m.underflow for m in found) / sum(m.numel - m.zeros for m in found),
        "saturated_ratio": sum(m.saturated for m in found) / sum(m.numel for m in found),
        "rel_l2": (sum(m.mse * m.numel for m in found) / x2) ** 0.5,
    }


@pytest.mark.parametrize("recipe", ["current", "tensorwise:power_of_2=true", "unscaled", "current:hybrid=false"])
def test_per_tensor_recipes_are_exact_where_codes_were_kept(recipe: str, tmp_path: Path) -> None:
    """The very figures of measure, for every operand."""
    read = train(tmp_path / "run", histogram="codes")
    for role, got in answers(open_run(tmp_path / "run"), recipe).items():
        assert got.basis == "exact"
        for figure, value in pooled(read, role, recipe, [None] * STEPS).items():
            assert got.then[figure] == pytest.approx((value, value), rel=1e-12), (role, figure)


@pytest.mark.parametrize("recipe", ["delayed:history=2", "delayed:history=1,algorithm=most_recent,margin=1"])
def test_delayed_scaling_is_replayed_exactly(recipe: str, tmp_path: Path) -> None:
    """Scales as DelayedState has them, and the figures of measure under them; clipped steps counted on every step."""
    read = train(tmp_path / "run", histogram="codes")
    found = answers(open_run(tmp_path / "run"), recipe)
    for role in ROLES:
        state, scales, clipped = DelayedState(recipe_named(recipe), role), [], 0
        for operands in read:
            amax = float(operands[role].abs().max())
            clipped += bool(fp8dbg.measure(operands[role], None, recipe, state.scale, role).saturated)
            scales.append(state.scale)
            state.update(amax)
        assert found[role].basis == "replay"
        assert (found[role].clipped.steps, found[role].clipped.then) == (STEPS, clipped)
        for figure, value in pooled(read, role, recipe, [*scales]).items():
            assert found[role].then[figure] == pytest.approx((value, value), rel=1e-12), (role, figure)


@pytest.mark.parametrize("recipe", ["current", "delayed:history=2", "mxfp8", "block", "rowwise"])
def test_bounds_from_binades_enclose(recipe: str, tmp_path: Path) -> None:
    """What measure gives lies between them; they are said to be bounds."""
    read = train(tmp_path / "run", recipe="current_pow2")
    found = answers(open_run(tmp_path / "run"), recipe)
    for role in ROLES:
        state, scales = DelayedState(recipe_named("delayed:history=2"), role), []
        for operands in read:
            scales.append(state.scale if recipe.startswith("delayed") else None)
            state.update(float(operands[role].abs().max()))
        assert found[role].basis == "bounds"
        for figure, value in pooled(read, role, recipe, scales).items():
            between = found[role].then[figure]
            assert between is not None
            assert between[0] <= value * (1 + 1e-12), (role, figure)
            assert value <= between[1] * (1 + 1e-12), (role, figure)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "delayed:history=2"])
def test_dumps_are_exact_for_anything(recipe: str, tmp_path: Path) -> None:
    """A saved tensor is measured itself."""
    read = train(tmp_path / "run", recipe="current_pow2", dump=("*:input",))
    got = answers(open_run(tmp_path / "run"), recipe)["input"]
    state, scales = DelayedState(recipe_named("delayed:history=2"), "input"), []
    for operands in read:
        scales.append(state.scale if recipe.startswith("delayed") else None)
        state.update(float(operands["input"].abs().max()))
    assert got.basis == "dump"
    for figure, value in pooled(read, "input", recipe, scales).items():
        assert got.then[figure] == pytest.approx((value, value), rel=1e-12), figure


def test_what_was_compared_with_is_exact(tmp_path: Path) -> None:
    """A recipe that attach was given as what_if has its figures in the folder."""
    read = train(tmp_path / "run", what_if=("mxfp8",))
    for role, got in answers(open_run(tmp_path / "run"), "mxfp8").items():
        assert got.basis == "exact"
        assert got.then["rel_l2"] == pytest.approx((pooled(read, role, "mxfp8", [None] * STEPS)["rel_l2"],) * 2)


def test_float32_tensors_have_bounds_where_codes_were_asked_for(tmp_path: Path) -> None:
    """They have no 16-bit codes: the binades are kept instead."""
    nets.train(nets.Case(bf16=False), run_dir=tmp_path, every=1, histogram="codes")
    assert {a.basis for a in whatif(open_run(tmp_path), "unscaled").answers} == {"bounds"}


def test_another_format_alone(tmp_path: Path) -> None:
    """E5M2 for the input: its error, at its own scale."""
    read = train(tmp_path / "run", histogram="codes")
    got = answers(open_run(tmp_path / "run"), "current", format="e5m2")["input"].then["rel_l2"]
    found: list[Any] = [fp8dbg.measure(t["input"], "e5m2", "current") for t in read][1:]
    x2 = sum(m.rms**2 * m.numel for m in found)
    assert got == pytest.approx(((sum(m.mse * m.numel for m in found) / x2) ** 0.5,) * 2)


def rows_only(path: Path, sizes: dict[int, float]) -> Run:
    """A run of one input without any figure of a cast: amaxes by step, under current scaling for amax 1."""
    with RunWriter(path) as writer:
        place = {"microbatch": 0, "rank": 0, "layer": "a", "tensor": "input", "inf": 0, "nan": 0}
        writer.append("amax", [place | {"step": i, "amax": a, "scale": 448.0} for i, a in sizes.items()])
        figures = {"call": 0, "format": "e4m3", "recipe": "current", "numel": 4, "zeros": 0, "dtype": "bfloat16"}
        writer.append("tensors", [place | figures | {"step": max(sizes), "amax": 30.0, "rms": 1.0}])
    return open_run(path)


def test_clipped_steps_are_told_without_figures(tmp_path: Path) -> None:
    """A jump clips one step, whatever the history; a margin of five binades holds it. How to record more is said."""
    run = rows_only(tmp_path / "run", dict(enumerate([1.0] * 5 + [30.0] + [1.0] * 5)))
    found = whatif(run, "delayed:history=4")
    (got,) = found.answers
    assert (got.basis, got.then["rel_l2"]) == (None, None)
    assert (got.clipped.steps, got.clipped.now, got.clipped.then) == (11, 1, 1)
    assert "histogram='codes'" in " ".join(found.notes)
    assert whatif(run, "delayed:history=4,margin=5").answers[0].clipped.then == 0


def test_too_little_evidence_says_what_to_record(tmp_path: Path) -> None:
    """Without histograms nothing is guessed: exit 3, and how to record it."""
    run = open_run(write_run(tmp_path / "run", steps=20, blocks=1))
    with pytest.raises(NothingRecordedError, match=r"what_if=\['nvfp4'\]") as raised:
        whatif(run, "nvfp4")
    assert raised.value.exit_code == 3


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    """No operand was measured."""
    RunWriter(tmp_path / "run").close()
    with pytest.raises(NothingRecordedError, match="measured in full"):
        whatif(open_run(tmp_path / "run"), "current")


def test_names_are_checked(tmp_path: Path) -> None:
    """An unknown layer lists those there are; a format where scales are finer is refused."""
    run = open_run(write_run(tmp_path / "run", steps=20, blocks=1))
    with pytest.raises(UnknownNameError, match=r"layers\.0\.up"):
        whatif(run, "current", layer="nothing.*")
    with pytest.raises(UsageError, match="formats of its own"):
        whatif(run, "mxfp8", format="e5m2")


def test_gaps_in_the_record_are_told(tmp_path: Path) -> None:
    """A replay that begins late or misses steps says so; it cannot know what it has not seen."""
    run = rows_only(tmp_path / "run", {10: 1.0, 11: 1.0, 15: 1.0})
    notes = " ".join(whatif(run, "delayed:history=4").notes)
    assert "a input begins at step 10 and lacks 3 steps since" in notes
    assert "begins" not in " ".join(whatif(run, "current").notes)


def test_the_answer_is_plain_data(tmp_path: Path) -> None:
    """--json prints it."""
    train(tmp_path / "run", histogram="codes")
    data = whatif(open_run(tmp_path / "run"), "current").to_dict()
    assert json.loads(json.dumps(data))["answers"][0]["basis"] == "exact"
