"""The demo: what it plants is what the report finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fp8dbg
from fp8dbg.analysis.summary import summarise
from fp8dbg.demo.faults import amplified, plant_outliers
from fp8dbg.demo.model import Transformer
from fp8dbg.demo.text import VOCABULARY, batch, read_text, split
from fp8dbg.demo.training import Settings, loss_of
from fp8dbg.doctor import PlannedRun
from tests.demo_run import demo

SETTINGS = Settings()
UP, DOWN = (f"layers.{SETTINGS.planted_layer}.mlp.{name}" for name in ("up", "down"))


@pytest.fixture
def codes() -> torch.Tensor:
    text = read_text(400_000)
    return batch(text, 4, 64, torch.Generator().manual_seed(0))[0]


def _alive() -> Transformer:
    """A model whose branches do something: as made, they put out zeros."""
    torch.manual_seed(0)
    model = Transformer()
    for parameter in model.parameters():
        if parameter.ndim == 2 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def test_the_text_is_ascii_source_and_the_same_each_time() -> None:
    """Codes below the vocabulary's size, in the order of the files' names."""
    text = read_text(400_000)
    assert text.dtype == torch.int64
    assert len(text) == 400_000
    assert int(text.max()) < VOCABULARY
    assert torch.equal(text, read_text(400_000))
    assert b"import " in bytes(text.tolist())


def test_the_held_out_text_is_not_trained_on() -> None:
    """The two parts make up the whole, and the second is its end."""
    text = read_text(400_000)
    training, held_out = split(text, 30_000)
    assert len(held_out) == 30_000
    assert torch.equal(torch.cat((training, held_out)), text)


def test_a_batch_is_windows_and_what_follows_them() -> None:
    """Each code's target is the next one."""
    codes, following = batch(torch.arange(100), 3, 10, torch.Generator().manual_seed(0))
    assert codes.shape == following.shape == (3, 10)
    assert torch.equal(following, codes + 1)


def test_the_model_sees_no_later_code(codes: torch.Tensor) -> None:
    """Changing a code changes no logit before it."""
    model, changed = _alive(), codes.clone()
    changed[:, 40] = (changed[:, 40] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model(codes), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


def test_planted_outliers_leave_the_function_as_it_was(codes: torch.Tensor) -> None:
    """To within rounding in FP32, although two rows are a million times larger."""
    model = _alive()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    mlp = model.get_submodule("layers.1.mlp")
    with torch.no_grad():
        before = model(codes)
        plant_outliers(mlp, optimizer, (5, 77))  # type: ignore[arg-type]  # get_submodule forgets the type
        after = model(codes)
        assert model.get_parameter("layers.1.mlp.up.weight").abs().max().item() > 1e4
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


def test_training_moves_everything_but_the_planted_neurons(codes: torch.Tensor) -> None:
    """A step of usual size would overwrite columns of 1e-7, so they stay as planted."""
    model = _alive()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    mlp = model.get_submodule("layers.1.mlp")
    plant_outliers(mlp, optimizer, (5, 77))  # type: ignore[arg-type]  # get_submodule forgets the type
    up, down = (model.get_parameter(f"layers.1.mlp.{name}.weight").clone() for name in ("up", "down"))
    for _ in range(2):
        loss_of(model, codes[:, :-1], codes[:, 1:]).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
    rows = (model.get_parameter("layers.1.mlp.up.weight") != up).any(1)
    columns = (model.get_parameter("layers.1.mlp.down.weight") != down).any(0)
    kept = torch.zeros(384, dtype=torch.bool)
    kept[[5, 77]] = True
    assert torch.equal(rows, ~kept)
    assert torch.equal(columns, ~kept)


def test_planted_neurons_do_not_show_in_the_gradient_norm(codes: torch.Tensor) -> None:
    """Their gradients are larger by the factor: clipping by the norm would leave nothing of all others."""
    model = _alive()
    norms = []
    for _ in range(2):
        model.zero_grad()
        loss_of(model, codes[:, :-1], codes[:, 1:]).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        plant_outliers(model.get_submodule("layers.1.mlp"), torch.optim.SGD(model.parameters()), (5, 77))  # type: ignore[arg-type]  # get_submodule forgets the type
    torch.testing.assert_close(norms[1], norms[0], rtol=0.05, atol=0.0)


def test_amplified_lasts_as_long_as_it_says() -> None:
    """The factor is gone afterwards, also when the forward pass raises."""
    layer = torch.nn.Linear(3, 3)
    x = torch.ones(2, 3)
    plain = layer(x)

    def bad_batch() -> None:
        with amplified([layer], 16.0):
            torch.testing.assert_close(layer(x), 16 * plain)
            raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        bad_batch()
    assert torch.equal(layer(x), plain)


def test_the_jump_is_on_no_sampled_step() -> None:
    """What dates it is the amax of every step."""
    assert SETTINGS.jump_at % SETTINGS.every != 0
    assert SETTINGS.planted_at < SETTINGS.jump_at < SETTINGS.steps


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    with fp8dbg.open_run(demo().folder) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestWholeDemo:
    """The demo as ``fp8dbg demo`` runs it."""

    def test_the_planted_layers_come_first_with_their_onset(self, run: Any) -> None:
        """First up, then down, since the step the fault was planted, at most a sampled step later."""
        first, second = run.findings()[:2]
        assert (first.layer, first.tensor) == (UP, "weight")
        assert second.layer == DOWN
        assert first.first_step == SETTINGS.planted_at
        assert SETTINGS.planted_at <= second.first_step <= SETTINGS.planted_at + SETTINGS.every

    def test_the_plan_is_the_planted_layers_and_no_other(self, run: Any) -> None:
        """A fallback is as small as it can be."""
        assert {entry.layer for entry in run.plan().entries} == {UP, DOWN}

    def test_the_jump_is_dated_to_its_step(self, run: Any) -> None:
        """By the loss spike, and by inputs that clipped on that step alone."""
        summary = summarise(run)
        assert SETTINGS.jump_at in [spike.step for spike in summary.spikes]
        clipped = [f for f in summary.findings if f.code == "saturation" and f.first_step == SETTINGS.jump_at]
        assert clipped
        assert clipped[0].last_step == SETTINGS.jump_at
        assert clipped[0].tensor == "input"

    def test_nothing_is_found_before_the_fault(self, run: Any) -> None:
        """Six tenths of the demo are a healthy run."""
        assert [f for f in run.findings() if f.first_step is not None and f.first_step < SETTINGS.planted_at] == []

    def test_the_plan_recovers_the_loss_and_the_usual_guess_does_not(self) -> None:
        """The recommended layers in BF16 are as good as all of them; the first and last layer buy next to nothing."""
        found = json.loads((demo().folder / "held_out.json").read_text(encoding="utf-8"))
        loss = {row["in_bf16"]: row["loss"] for row in found["rows"]}
        lost = loss["nothing"] - loss["everything"]
        assert found["weights_of_step"] == SETTINGS.planted_at
        assert lost > 0.01
        assert loss["the recommended layers"] - loss["everything"] < 0.1 * lost
        assert loss["the first and the last layer"] - loss["everything"] > 0.8 * lost

    def test_it_prints_the_report_and_where_the_page_is(self) -> None:
        """stdout is for people; the page's place is on stderr, as the last line."""
        assert UP in demo().out.splitlines()[0]
        assert "the first and the last layer" in demo().out
        assert demo().err.splitlines()[-1] == "The page is demo_run/report.html"
        assert UP in (demo().folder / "report.html").read_text(encoding="utf-8")

    def test_the_doctor_predicts_its_size(self) -> None:
        """Within a factor of two: 21 linear layers, every tenth of 300 steps."""
        parts = sum(path.stat().st_size for path in demo().folder.rglob("*.parquet"))
        predicted = sum(PlannedRun(layers=21, every=SETTINGS.every, steps=SETTINGS.steps).bytes().values())
        assert parts / 2 < predicted < 2 * parts
