"""torch.compile: attached before, everything is recorded; attached after, the run says why nothing may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fp8dbg
from tests.nets import Case, Net, Outcome, build, outcome, table, train, train_step


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def _train_compiled(run_dir: Path | None, way: str) -> tuple[Outcome, int]:
    """Three compiled steps, attached before compiling if ``run_dir`` is given; and how many graphs there were."""
    case = Case(Net)
    model, optimizers = build(case)
    run = fp8dbg.attach(model, run_dir, every=2) if run_dir else None
    backend = CompileCounterWithBackend("aot_eager")
    if way == "module":
        model.compile(backend=backend)
        compiled: Any = model
    else:
        compiled = torch.compile(model, backend=backend)
    losses = [train_step(case, compiled, optimizers) for _ in range(3)]
    if run is not None:
        run.close()
    return outcome(losses, model), backend.frame_count


@pytest.mark.parametrize("way", ["function", "module"])
def test_attached_before_compiling_everything_is_recorded(way: str, tmp_path: Path) -> None:
    """Each layer's hook breaks the graph; training is what the compiled model's is, bit for bit.

    The backward GEMMs run inside compiled code: their results are not seen, and the run says so.
    """
    bare, whole = _train_compiled(None, way)
    torch._dynamo.reset()
    attached, broken = _train_compiled(tmp_path, way)
    bare.assert_same(attached)
    assert whole == 1
    assert 5 <= broken <= 12
    assert table(tmp_path, "select step, count(*) as n from amax group by step order by step") == [
        {"step": step, "n": 15} for step in range(3)
    ]
    assert table(tmp_path, "select count(distinct layer) as n from gemms") == [{"n": 5}]
    events = table(tmp_path, "select kind, layer, detail from events")
    assert [row["kind"] for row in events] == ["gap"] * 5
    assert all("Grad_input and grad_weight are not seen" in row["detail"] for row in events)
    train(Case(), steps=1, run_dir=tmp_path / "plain", every=1)
    seen = "step = 0 and tensor not in ('grad_input', 'grad_weight')"
    rows = f"select layer, tensor, count(*) as n from tensors where {seen} group by all order by all"
    assert table(tmp_path, rows) == table(tmp_path / "plain", rows)


def test_attached_after_compiling_one_sentence_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Code that was compiled before calls no hooks; silence would look like a healthy run."""
    case = Case()
    model, optimizers = build(case)
    compiled: Any = torch.compile(model, backend="eager")
    train_step(case, compiled, optimizers)
    with fp8dbg.attach(compiled, tmp_path):
        for _ in range(4):
            train_step(case, compiled, optimizers)
    assert "compiled before fp8dbg was attached" in caplog.text
    (event,) = table(tmp_path, "select kind, detail from events")
    assert event["kind"] == "gap"
    assert "nor of 4 further layers: nothing is recorded. The model was compiled before" in event["detail"]
    assert "Attach first" in event["detail"]


class _Wide(torch.nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.up(x)
        return y


@pytest.mark.parametrize(("features", "recorded"), [(24, True), (16, False)])
def test_code_of_another_model_counts_only_where_it_serves_this_one(
    features: int, recorded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one class and shape they share it, and nothing is recorded; of another shape this one is compiled anew."""
    other: Any = torch.compile(_Wide(16), backend="eager")
    other(torch.ones(4, 8)).sum().backward()
    model = _Wide(features)
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fp8dbg.attach(compiled, tmp_path, optimizer):
        for _ in range(4):
            compiled(torch.ones(4, 8)).sum().backward()
            optimizer.step()
    assert ("No call of up was seen in 3 steps: nothing is recorded. The model was compiled before" in caplog.text) is (
        not recorded
    )
    assert len(table(tmp_path, "select step from amax where tensor = 'weight'")) == (4 if recorded else 0)
    assert len(table(tmp_path, "select detail from events")) == (0 if recorded else 1)


def test_names_of_a_compiled_model_are_those_of_the_model(tmp_path: Path) -> None:
    """Attached to torch.compile's wrapper before it first ran: the hooks fire, the wrapper's name does not show."""
    case = Case()
    model, optimizers = build(case)
    compiled: Any = torch.compile(model, backend="eager")
    with fp8dbg.attach(compiled, tmp_path):
        train_step(case, compiled, optimizers)
    layers = [row["layer"] for row in table(tmp_path, "select distinct layer from amax order by layer")]
    assert layers == ["blocks.0.down", "blocks.0.up", "blocks.1.down", "blocks.1.up", "head"]
