"""Layers whose rows end before the run does, in runs that were really recorded: which are told, and which are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dbg
from fp8dbg.analysis.run import open_run
from fp8dbg.recording import sampling
from fp8dbg.runs.writer import RunWriter

Use = Callable[[int], bool]


class Net(nn.Module):
    """Two layers, of which the second is called when told."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = self.a(x)
        return x + self.b(x) if use else x


def told(
    path: Path, steps: int, use: Use, before: Callable[[int], None] = lambda step: None, **options: Any
) -> list[str]:
    """What is said to be missing of a run in which b is called on some of the steps."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with fp8dbg.attach(model, path, optimizer, **options):
        for step in range(steps):
            before(step)
            model(torch.randn(4, 8), use(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [finding.summary for finding in open_run(path).findings() if finding.code == "coverage"]


WINDOW: dict[str, Any] = {"every": 100, "windows": [(0, 49)]}


@pytest.mark.parametrize(
    ("steps", "use", "options"),
    [
        pytest.param(100, lambda step: step == 50, {"every": 10}, id="on one sampled step only, as a rare expert"),
        pytest.param(100, lambda step: step <= 30, {"every": 10}, id="on four sampled steps only"),
        pytest.param(301, lambda step: step < 300, WINDOW, id="all but the last of steps far apart"),
        pytest.param(301, lambda step: step < 200, WINDOW, id="all but the last two of steps far apart"),
        pytest.param(401, lambda step: step % 2 == 0 and step < 50, WINDOW, id="every second step of a window"),
        pytest.param(160, lambda step: step % 40 < 30 and step < 120, {"every": 10}, id="three of four steps"),
    ],
)
def test_a_layer_that_is_called_now_and_then_has_not_ended(
    steps: int, use: Use, options: dict[str, Any], tmp_path: Path
) -> None:
    """Too few steps with it, too few without it, or too many without it before."""
    assert told(tmp_path, steps, use, **options) == []


@pytest.mark.parametrize(
    ("steps", "use", "options", "last"),
    [
        pytest.param(100, lambda step: step <= 40, {"every": 10}, 40, id="five sampled steps"),
        pytest.param(301, lambda step: step < 50, WINDOW, 49, id="a window, and three steps far apart after it"),
        pytest.param(150, lambda step: step != 30 and step < 60, {"every": 10}, 50, id="five of six steps"),
    ],
)
def test_a_layer_that_is_called_no_more_is_told(
    steps: int, use: Use, options: dict[str, Any], last: int, tmp_path: Path
) -> None:
    """With the last step on which it was seen."""
    assert told(tmp_path, steps, use, **options) == [f"Not everything was seen: no figures of b after step {last}."]


def controls(path: Path, said: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Writes control.toml before some of the steps; each is read at the end of the step, for the next."""
    monkeypatch.setattr(sampling, "LOOK_SECONDS", 0.0)

    def before(step: int) -> None:
        if step in said:
            (path / "control.toml").write_text(said[step])

    return before


@pytest.mark.parametrize(
    "text", ["layers = ['a', 'x[0-9]']\nevery = 5", "layers = 'a*'", 'windows = [[0, 5]]\nlayers = ["a"]']
)
def test_a_layer_that_was_taken_out_by_control_is_not_told(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody misses it: it was asked for."""
    before = controls(tmp_path, {55: text}, monkeypatch)
    assert told(tmp_path, 150, lambda step: True, before, every=10) == []


@pytest.mark.parametrize(
    ("said", "last"),
    [
        ({55: "layers = ['b', 'a']"}, 50),
        ({55: "every = 5"}, 50),
        ({55: "layers = ['a']", 75: "layers = ['*']"}, 130),
        ({120: "layers = ['a']"}, 90),
    ],
)
def test_a_layer_that_ended_by_itself_is_told_whatever_control_said(
    said: dict[int, str], last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control kept it, said nothing of layers, took it back, or took it out when it had ended long ago."""
    before = controls(tmp_path, said, monkeypatch)
    summaries = told(tmp_path, 200, lambda step: step <= last, before, every=10)
    assert summaries == [f"Not everything was seen: no figures of b after step {last}."]


def test_layers_that_control_left_out_from_the_start_are_not_missing(tmp_path: Path) -> None:
    """Those that it did not leave out are."""
    layers = [{"layer": name, "module": name} for name in ("a", "b.0", "b.1", "c")]
    with RunWriter(tmp_path, fingerprint={"layers": layers}) as writer:
        writer.event(0, "config", None, "control.toml now says every = 2, layers = ['a', 'c'].")
        writer.append(
            "tensors", [{"step": s, "rank": 0, "layer": "a", "tensor": "input", "numel": 8} for s in range(9)]
        )
    (finding,) = open_run(tmp_path).findings()
    assert finding.summary == "Not everything was seen: no figures of c."


def test_what_another_rank_alone_sampled_is_no_gap(tmp_path: Path) -> None:
    """A trigger on one stage of a pipeline has that stage measure; the other stage's layers have not ended."""
    for rank, (layer, steps) in enumerate([("a", 80), ("b", 60)]):
        with RunWriter(tmp_path, rank=rank, fingerprint={"layers": [{"layer": layer, "module": layer}]}) as writer:
            rows = [
                {"step": s, "rank": rank, "layer": layer, "tensor": "input", "numel": 8} for s in range(0, steps, 5)
            ]
            writer.append("tensors", rows)
    assert open_run(tmp_path).findings() == []
