"""When a step ends, and what its row says: optimizers, losses, what is logged, and sessions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8dbg
from fp8dbg.errors import UsageError
from fp8dbg.runs.folder import open_folder
from tests.nets import Case, Net, attached, build, loss_of, table, train_step


def _steps(run_dir: Path, columns: str = "step, loss") -> list[dict[str, Any]]:
    return table(run_dir, f"select {columns} from steps order by step")


def _linear() -> tuple[nn.Linear, torch.optim.Optimizer]:
    layer = nn.Linear(4, 2)
    return layer, torch.optim.SGD(layer.parameters(), lr=0.125)


def _backward(layer: nn.Module) -> Any:
    loss: Any = layer(torch.ones(3, 4)).square().mean()
    loss.backward()
    return loss


def test_a_step_has_its_loss_learning_rate_and_times(tmp_path: Path) -> None:
    """The loss is the mean of the backward roots; times are seconds, fp8dbg's own apart."""
    with attached(tmp_path, Case(microbatches=2), every=2) as (_, step):
        losses = [step() for _ in range(3)]
    rows = _steps(tmp_path / "run", "*")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["loss"] for row in rows] == pytest.approx([loss / 2 for loss in losses], rel=1e-6)
    assert [row["sampled"] for row in rows] == [True, False, True]
    assert [row["reason"] for row in rows] == ["every", None, "every"]
    assert {row["learning_rate"] for row in rows} == {1e-2}
    assert all(0 < row["overhead_seconds"] < row["seconds"] for row in rows)


def test_what_is_logged_wins_before_and_after_the_optimizers_step(tmp_path: Path) -> None:
    """Before, it is this step's; after, it is still the step's that has just ended."""
    layer, optimizer = _linear()
    with fp8dbg.attach(layer, tmp_path) as run:
        _backward(layer)
        run.log(loss=1.5, grad_norm=torch.tensor(0.5))
        optimizer.step()
        _backward(layer)
        optimizer.step()
        run.log(loss=2.5, learning_rate=3e-4)
        run.log(grad_norm=7)
        _backward(layer)
        optimizer.step()
    rows = _steps(tmp_path, "loss, grad_norm, learning_rate")
    assert rows[0] == {"loss": 1.5, "grad_norm": 0.5, "learning_rate": 0.125}
    assert rows[1] == {"loss": 2.5, "grad_norm": 7.0, "learning_rate": 3e-4}
    assert rows[2]["grad_norm"] is None


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_null_with_an_event(loss: float, tmp_path: Path) -> None:
    """And the steps after it are measured in full."""
    layer, optimizer = _linear()
    with fp8dbg.attach(layer, tmp_path, every=0) as run:
        for step in range(6):
            _backward(layer)
            run.log(loss=loss if step == 1 else 1.0)
            optimizer.step()
    rows = _steps(tmp_path, "loss, reason")
    assert [row["loss"] for row in rows] == [1.0, None, 1.0, 1.0, 1.0, 1.0]
    assert [row["reason"] for row in rows] == [None, f"loss is {loss}", "trigger", "trigger", "trigger", None]
    assert table(tmp_path, "select step, kind from events") == [{"step": 1, "kind": "trigger"}]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("every", [0, 2])
def test_a_loss_of_nan_is_told_once(every: int, late: bool, tmp_path: Path) -> None:
    """By root and by log, before the optimizer's step or after it: one event, one row, and the row's reason says so."""
    layer, optimizer = _linear()
    with fp8dbg.attach(layer, tmp_path, optimizer, every=every) as run:
        for step in range(6):
            loss = layer(torch.ones(3, 4)).square().mean() + (math.nan if step == 4 else 0.0)
            loss.backward()
            if late:
                optimizer.step()
            run.log(loss=loss)
            if not late:
                optimizer.step()
    rows = table(tmp_path, "select step, loss, reason from steps where loss is null")
    why = "every; loss is nan" if every else "loss is nan"
    assert rows == [{"step": 4, "loss": None, "reason": why}]
    assert table(tmp_path, "select count(*) as n from steps") == [{"n": 6}]
    assert table(tmp_path, "select step, kind from events") == [{"step": 4, "kind": "trigger"}]


def test_only_numbers_can_be_logged(tmp_path: Path) -> None:
    """A mistake in the call is the caller's to see."""
    layer, _ = _linear()
    with fp8dbg.attach(layer, tmp_path) as run:
        with pytest.raises(UsageError, match="loss has 3 elements"):
            run.log(loss=torch.ones(3))
        with pytest.raises(UsageError, match="grad_norm='low' is no number"):
            run.log(grad_norm="low")


@pytest.mark.parametrize("given", [False, True])
def test_a_step_with_several_optimizers_is_one_step(given: bool, tmp_path: Path) -> None:
    """Found or given, the step ends when the last has stepped; the first step, too, which has yet to find them."""
    case = Case(optimizers=2)
    model, optimizers = build(case)
    with fp8dbg.attach(model, tmp_path, optimizer=optimizers if given else None):
        for _ in range(3):
            train_step(case, model, optimizers)
    assert [row["step"] for row in _steps(tmp_path)] == [0, 1, 2]
    assert table(tmp_path, "select distinct step from amax order by step") == [{"step": s} for s in range(3)]


def test_an_optimizer_that_steps_less_often_does_not_hold_the_step(tmp_path: Path) -> None:
    """The next forward, or the other's next step, ends it."""
    case = Case(optimizers=2)
    model, (often, seldom) = build(case)
    with fp8dbg.attach(model, tmp_path, optimizer=[often, seldom]):
        for step in range(4):
            loss_of(case, model).backward()
            often.step()
            if step % 2:
                seldom.step()
    assert table(tmp_path, "select step, count(*) as n from amax group by step order by step") == [
        {"step": step, "n": 15} for step in range(4)
    ]


def test_optimizers_of_other_models_are_not_counted(tmp_path: Path) -> None:
    """Nor are their backward passes."""
    layer, optimizer = _linear()
    other, others = _linear()
    with fp8dbg.attach(layer, tmp_path):
        for _ in range(2):
            _backward(other)
            others.step()
            loss = _backward(layer)
            optimizer.step()
    rows = _steps(tmp_path)
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[-1]["loss"] == loss.item()


def test_wrapped_optimizers_are_looked_into_and_others_refused(tmp_path: Path) -> None:
    """Accelerate and Lightning hand out wrappers."""

    class Wrapper:
        def __init__(self, optimizer: object) -> None:
            self.optimizer = optimizer

    layer, optimizer = _linear()
    with fp8dbg.attach(layer, tmp_path, optimizer=Wrapper(optimizer)):
        _backward(layer)
        optimizer.step()
    assert len(_steps(tmp_path)) == 1
    with pytest.raises(UsageError, match="got dict, which is no torch optimizer"):
        fp8dbg.attach(layer, tmp_path, optimizer={})


def test_steps_can_be_counted_by_hand(tmp_path: Path) -> None:
    """For a loop without a torch optimizer; one that is there as well does not count twice."""
    for name, uses_optimizer in (("without", False), ("with", True)):
        layer, optimizer = _linear()
        with fp8dbg.attach(layer, tmp_path / name) as run:
            for _ in range(3):
                _backward(layer)
                if uses_optimizer:
                    optimizer.step()
                run.step()
        assert [row["step"] for row in _steps(tmp_path / name)] == [0, 1, 2]
        query = "select step, microbatch from amax where tensor = 'input' order by step"
        assert table(tmp_path / name, query) == [{"step": s, "microbatch": 0} for s in range(3)]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_loop_whose_steps_nobody_counts_is_told(
    by_hand: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights change again and again and no torch optimizer steps; not so where ``run.step`` is called."""
    layer = nn.Linear(4, 2)
    with fp8dbg.attach(layer, tmp_path, every=0) as run:
        for _ in range(70):
            _backward(layer)
            with torch.no_grad():
                for p in layer.parameters():
                    p.sub_(torch.ones_like(p), alpha=0.01)
            layer.zero_grad()
            if by_hand:
                run.step()
    told = [row["detail"] for row in table(tmp_path, "select detail from events where kind = 'gap'")]
    assert ["Call run.step() at the end of each step" in detail for detail in told] == ([] if by_hand else [True])
    assert ("Call run.step()" in caplog.text) != by_hand


def test_lbfgs_makes_one_step_of_many_passes(tmp_path: Path) -> None:
    """Its closure runs forward and backward several times within a step."""
    layer = nn.Linear(4, 2)
    optimizer: Any = torch.optim.LBFGS(layer.parameters(), max_iter=3)
    passes = 0

    def closure() -> Any:
        nonlocal passes
        passes += 1
        optimizer.zero_grad()
        return _backward(layer)

    with fp8dbg.attach(layer, tmp_path):
        optimizer.step(closure)
    found = table(tmp_path, "select step, count(*) as n from amax where tensor = 'input' group by step")
    assert found == [{"step": 0, "n": passes}]


def test_a_resumed_training_goes_on_counting(tmp_path: Path) -> None:
    """Attached again to the same folder, from the step it was told."""
    layer, optimizer = _linear()
    for first in (0, 2):
        with fp8dbg.attach(layer, tmp_path, first_step=first):
            for _ in range(2):
                _backward(layer)
                optimizer.step()
    assert [row["step"] for row in _steps(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("before", [None, "delayed"])
@pytest.mark.parametrize("idle", [0, 3])
def test_fp8_after_a_restart_begins_anew_or_has_lost_its_state(before: str | None, idle: int, tmp_path: Path) -> None:
    """Where the session before was BF16 a scale of 1 is the first, for as long as no gradient has set it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    for first, recipe in ((0, before), (50, "delayed")):
        if recipe is not None:
            fp8dbg.simulate(model, recipe)
            for name, buffer in model.named_buffers():
                buffer.fill_(1.0 if name.endswith("scales") else 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with fp8dbg.attach(model, tmp_path, optimizer, every=5, first_step=first):
            for step in range(50):
                share = 0.0 if first and step < idle else 1.0
                loss = share * model(torch.randn(32, 64)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    with fp8dbg.open_run(tmp_path) as run:
        begun = [row["step"] for row in run.rows("select step from events where kind = 'fp8'")]
        lost = [f for f in run.findings() if f.code == "frozen_scale"]
    assert begun == ([] if before else [50, 50])
    assert bool(lost) == bool(before)


@pytest.mark.parametrize(("first", "said"), [(0, True), (1, True), (2, False)])
def test_recording_a_step_again_is_said(
    first: int, said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning when it begins, an event in the folder, a problem for the reader; nothing where counting goes on."""
    for start in (0, first):
        layer, optimizer = _linear()
        with fp8dbg.attach(layer, tmp_path, optimizer, first_step=start):
            for _ in range(2):
                _backward(layer)
                optimizer.step()
    text = f"holds steps up to 1 and this session counts from {first}"
    assert (text in caplog.text) is said
    with open_folder(tmp_path) as folder:
        assert bool(folder.problems) is said
        assert len(folder.rows(f"select * from events where kind = 'config' and detail like '%{text}%'")) == said
        assert [row["step"] for row in folder.rows("select step from steps order by 1")] == list(range(first + 2))


def test_a_closed_session_records_nothing_and_closes_once(tmp_path: Path) -> None:
    """Its methods stay harmless."""
    layer, optimizer = _linear()
    run = fp8dbg.attach(layer, tmp_path)
    _backward(layer)
    optimizer.step()
    run.close()
    run.close()
    run.log(loss=9.0)
    run.step()
    _backward(layer)
    optimizer.step()
    assert len(_steps(tmp_path)) == 1
    assert not layer._forward_hooks


def test_a_step_that_was_not_finished_is_written_as_far_as_it_came(tmp_path: Path) -> None:
    """A loop that breaks off after a backward has rows of that backward."""
    layer, optimizer = _linear()
    with fp8dbg.attach(layer, tmp_path):
        _backward(layer)
        optimizer.step()
        last = _backward(layer)
    assert _steps(tmp_path)[-1] == {"step": 1, "loss": last.item()}
    assert table(tmp_path, "select count(*) as n from amax where step = 1") == [{"n": 3}]


def test_sessions_on_different_models_do_not_mix(tmp_path: Path) -> None:
    """Each sees its own model's calls, steps and losses, whichever was attached last."""
    layers = {name: _linear() for name in ("a", "b")}
    sessions = [fp8dbg.attach(layer, tmp_path / name) for name, (layer, _) in layers.items()]
    losses: dict[str, list[float]] = {"a": [], "b": []}
    for name in "abbab":
        layer, optimizer = layers[name]
        losses[name].append(_backward(layer).item())
        optimizer.step()
    for session in sessions:
        session.close()
    for name, expected in losses.items():
        assert [row["loss"] for row in _steps(tmp_path / name)] == expected


def test_torch_is_as_it_was_after_the_last_session(tmp_path: Path) -> None:
    """The backward function is restored, unless somebody wrapped it in the meantime: then ours falls silent."""
    original = torch.autograd.backward
    layer, optimizer = _linear()
    with fp8dbg.attach(layer, tmp_path / "a"), fp8dbg.attach(nn.Linear(4, 2), tmp_path / "b"):
        assert torch.autograd.backward is not original
    assert torch.autograd.backward is original
    run = fp8dbg.attach(layer, tmp_path / "c")
    ours = torch.autograd.backward
    try:
        torch.autograd.backward = lambda *args, **kwargs: ours(*args, **kwargs)
        run.close()
        with fp8dbg.attach(layer, tmp_path / "d"):
            _backward(layer)
            optimizer.step()
    finally:
        torch.autograd.backward = original
    assert table(tmp_path / "d", "select microbatch from amax where tensor = 'input'") == [{"microbatch": 0}]


def test_a_model_that_is_never_called_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three steps without a call: one line of log, one event, and run.json says that no layer was seen."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp8dbg.attach(model, tmp_path):
        for _ in range(4):
            optimizer.step()
    assert "No call of any of the 5 layers" in caplog.text
    assert [row["kind"] for row in table(tmp_path, "select kind from events")] == ["gap"]
    from fp8dbg.runs.folder import open_folder

    coverage = open_folder(tmp_path).meta["coverage"]
    assert (coverage["layers"], coverage["seen"]) == (5, 0)


def test_a_layer_that_was_replaced_is_reported(tmp_path: Path) -> None:
    """As by a conversion after attach: nobody watches what took its place. The others are recorded."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp8dbg.attach(model, tmp_path):
        model[0] = nn.Linear(4, 4)
        for _ in range(4):
            _backward(model)
            optimizer.step()
    (event,) = table(tmp_path, "select step, kind, detail from events")
    assert (event["step"], event["kind"]) == (2, "gap")
    assert event["detail"].startswith("0 is no longer a part of the model: replaced after")
    assert table(tmp_path, "select distinct layer from amax") == [{"layer": "1"}]


def _never_called(tmp_path: Path, layers: int, replaced: int) -> str:
    """What is told of a model that nobody calls, the first of whose layers were replaced after attach."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp8dbg.attach(model, tmp_path):
        for index in range(replaced):
            model[index] = nn.Linear(4, 4)
        for _ in range(4):
            optimizer.step()
    (event,) = table(tmp_path, "select detail from events")
    return str(event["detail"])


def test_that_nothing_is_recorded_is_told_beside_what_was_replaced(tmp_path: Path) -> None:
    """First what matters more, then the layer that nobody will ever call."""
    told = _never_called(tmp_path, layers=3, replaced=1)
    assert told.startswith(
        "No call of any of the 3 layers was seen in 3 steps: nothing is recorded. 0 is no longer a part of the model: "
        "replaced after fp8dbg was attached"
    )


@pytest.mark.parametrize(("replaced", "said"), [(2, ", nor is 1 further layer: "), (3, ", nor are 2 further layers: ")])
def test_further_layers_that_were_replaced_are_counted(replaced: int, said: str, tmp_path: Path) -> None:
    """One, and several."""
    assert f"0 is no longer a part of the model{said}replaced" in _never_called(tmp_path, layers=4, replaced=replaced)


def test_a_single_layer_that_is_never_called_is_named(tmp_path: Path) -> None:
    """Not as any of the 1 layers."""
    assert "No call of 0 was seen in 3 steps: nothing is recorded. Attach" in _never_called(tmp_path, 1, replaced=0)


def test_a_model_without_layers_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is nothing to record, and one sentence says so."""
    fp8dbg.attach(nn.ReLU(), tmp_path).close()
    assert "no layer that could be recorded" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": -1}, "every=-1 is no cadence"),
        ({"rows": 0}, "rows=0 does not fit"),
        ({"recipe": "fp9"}, "No recipe is called 'fp9'"),
        ({"what_if": ["fp9"]}, "No recipe is called 'fp9'"),
        ({"windows": [(5, 1)]}, "no window"),
        ({"dump": "head"}, "names no tensor"),
        ({"histogram": "bins"}, "no kind of histogram"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_hooked(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """One sentence; the model and the disk are untouched."""
    model = Net()
    with pytest.raises(UsageError, match=said):
        fp8dbg.attach(model, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    assert not model.head._forward_hooks
