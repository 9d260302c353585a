"""How ``fp8dbg run`` finds, inside a program, the models that it trains; and that it leaves the rest alone."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from fp8dbg.analysis.run import open_run
from fp8dbg.analysis.summary import summarise
from fp8dbg.numerics.simulated import simulate
from fp8dbg.recording.launched import MOST_LOOKS, Attacher, Search, arm
from fp8dbg.runs.fingerprint import read_run_json
from tests.nets import table


@pytest.fixture
def found() -> Iterator[list[nn.Module]]:
    """The models found while a search is on; after it torch is as it was before."""
    models: list[nn.Module] = []
    with searching(models.append):
        yield models


@contextlib.contextmanager
def searching(report: Any) -> Iterator[Search]:
    """A search that is on."""
    before = Optimizer.__init__
    search = Search(report)
    search.start()
    try:
        yield search
    finally:
        search.stop()
        assert Optimizer.__init__ is before


def layer() -> nn.Linear:
    """The smallest model."""
    return nn.Linear(4, 4)


def x() -> torch.Tensor:
    """Its input."""
    return torch.ones(2, 4)


def pins(model: nn.Module) -> int:
    """How many hooks are on a model."""
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def test_a_model_is_found_at_its_first_call_in_training(found: list[nn.Module]) -> None:
    """Not when its optimizer is made, not by an evaluation; then once, and no hook stays."""
    model = nn.Sequential(layer(), layer())
    SGD(model.parameters(), 0.1)
    with torch.no_grad():
        model(x())
    model.eval()(x())
    assert found == []
    model.train()(x())
    model(x())
    assert found == [model]
    assert pins(model) == 0


def test_a_model_that_no_optimizer_holds_is_left_alone(found: list[nn.Module]) -> None:
    """A frozen teacher, a network inside a loss: nobody trains them."""
    teacher, student = layer(), layer()
    SGD(student.parameters(), 0.1)
    teacher(x())
    assert found == []
    assert pins(teacher) == 0


def test_what_is_found_is_the_outermost_module_even_if_only_its_parts_are_called(found: list[nn.Module]) -> None:
    """As in Lightning, whose module is not called itself: names begin where the user's do."""
    model = nn.ModuleDict({"encoder": layer(), "decoder": layer()})
    SGD(model["decoder"].parameters(), 0.1)
    model["decoder"](model["encoder"](x()))
    assert found == [model]


def test_two_models_are_found_each_with_its_optimizer(found: list[nn.Module]) -> None:
    """A GAN, in the order of their first calls; a second optimizer of a known model finds nothing more."""
    generator, critic = layer(), layer()
    SGD(generator.parameters(), 0.1), SGD(critic.parameters(), 0.1)
    critic(generator(x()))
    SGD(critic.parameters(), 0.2)
    critic(x())
    assert found == [generator, critic]


def test_one_optimizer_of_two_models_finds_both(found: list[nn.Module]) -> None:
    """An encoder and a decoder that are nowhere put together."""
    encoder, decoder = layer(), layer()
    SGD([*encoder.parameters(), *decoder.parameters()], 0.1)
    decoder(encoder(x()))
    assert found == [encoder, decoder]


def test_a_copy_made_before_the_first_call_finds_nothing(found: list[nn.Module]) -> None:
    """An average of weights begins as a deep copy; the copy's call is not the model's."""
    model = layer()
    SGD(model.parameters(), 0.1)
    copy.deepcopy(model)(x())
    assert found == []
    model(x())
    assert found == [model]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_found_before_it_is_compiled(found: list[nn.Module], in_place: bool) -> None:
    """By either way of compiling; the result is that of the model."""
    torch._dynamo.reset()
    model = nn.Sequential(layer(), layer())
    expected = model(x())
    SGD(model.parameters(), 0.1)
    if in_place:
        model.compile(backend="eager")
    compiled = model if in_place else torch.compile(model, backend="eager")
    assert torch.equal(compiled(x()), expected)
    assert found == [model]
    torch._dynamo.reset()


def test_a_full_graph_is_not_insisted_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch.compile(fullgraph=True) would raise at our hooks: it is run without, and the model is recorded."""
    monkeypatch.setattr(torch, "compile", torch.compile)
    torch._dynamo.reset()
    search = arm(json.dumps(_options(tmp_path / "run")), lambda word: None)
    try:
        model = nn.Sequential(layer())
        optimizer = SGD(model.parameters(), 0.1)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(2):
            compiled(x()).sum().backward()
            optimizer.step()
    finally:
        search.stop()
        torch._dynamo.reset()
    assert table(tmp_path / "run", "select count(*) as n from amax where tensor = 'input'") == [{"n": 2}]
    assert not table(tmp_path / "run", "select * from events")


def test_programs_that_make_optimizers_without_end_are_not_slowed_down(caplog: pytest.LogCaptureFixture) -> None:
    """The search ends, with a word; training goes on."""
    models: list[nn.Module] = []
    with searching(models.append), caplog.at_level(logging.WARNING, "fp8dbg"):
        for _ in range(MOST_LOOKS + 2):
            model = layer()
            SGD(model.parameters(), 0.1)
            model(x())
    assert len(models) == MOST_LOOKS
    assert "later ones are not recorded" in caplog.text


def test_a_failure_of_ours_is_one_line_and_reaches_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The call that would have attached returns what it would have returned."""

    def fail(model: nn.Module) -> None:
        raise RuntimeError("not\ntoday")

    model = layer()
    expected = model(x())
    with searching(fail), caplog.at_level(logging.WARNING, "fp8dbg"):
        SGD(model.parameters(), 0.1)
        assert torch.equal(model(x()), expected)
    assert caplog.messages == ["fp8dbg: this model is not recorded (RuntimeError: not today)"]


def _options(out: Path, **changed: Any) -> dict[str, Any]:
    return {"out": str(out), "every": 1, "recipe": "delayed", "layers": ["*"], "fallback": None, **changed}


def _train(model: nn.Module) -> None:
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(x()).sum().backward()
        optimizer.step()


def test_models_are_recorded_apart_and_a_session_ends_with_its_model(tmp_path: Path) -> None:
    """The second in a folder of its own; a model without linear layers gets none."""
    told: list[str] = []
    with searching(Attacher(_options(tmp_path / "run"), told.append)):
        _train(nn.LayerNorm(4))
        _train(nn.Sequential(layer()))
        kept = nn.Sequential(layer())
        _train(kept)
    assert told == [f"attached {tmp_path / 'run'}", f"attached {tmp_path / 'run-2'}"]
    first, second = (read_run_json(tmp_path / name / "run.json") for name in ("run", "run-2"))
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert (first["finished"], second["finished"]) == (True, False)
    assert [row["step"] for row in table(tmp_path / "run-2", "select step from steps order by step")] == [0, 1]
    del kept


def _plan(place: Path, *entries: dict[str, Any]) -> str:
    (place / "plan.json").write_text(json.dumps({"entries": entries}))
    return str(place / "plan.json")


def test_a_plan_that_does_not_fit_stops_the_program(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before its first step, with the exit code of wrong usage; nothing is recorded, and both are told why."""
    plan = _plan(tmp_path, {"layer": "0"}, {"layer": "elsewhere"})
    words: list[str] = []
    with searching(Attacher(_options(tmp_path / "run", fallback=plan), words.append)), pytest.raises(SystemExit) as end:
        _train(nn.Sequential(layer()))
    assert end.value.code == 2
    assert not (tmp_path / "run").exists()
    said = f"The fallback plan {plan} cannot be applied, so nothing is trained: No layer is called 'elsewhere'."
    assert words[0].startswith(f"failed {said} Valid names: 0.")
    assert said in caplog.text


def test_a_plan_is_for_all_models_that_wait_for_their_first_step(tmp_path: Path) -> None:
    """Each takes what is its own, and no run calls the other's layers a mistake."""
    plan = _plan(tmp_path, {"layer": "0", "gemms": ["fprop"]}, {"layer": "1"})
    first = simulate(nn.Sequential(layer()), "current")
    second = simulate(nn.Sequential(nn.ReLU(), layer()), "current")
    words: list[str] = []
    attacher = Attacher(_options(tmp_path / "run", fallback=plan), words.append, lambda: [first, second])
    with searching(attacher):
        _train(first)
        _train(second)
    taken: list[Any] = [first[0], second[1]]
    assert [one.fp8_fallback for one in taken] == [{"fprop"}, {"fprop", "dgrad", "wgrad"}]
    assert [word for word in words if word.startswith("planned")] == ['planned ["0"]', 'planned ["1"]']
    for run in ("run", "run-2"):
        assert table(tmp_path / run, "select layer from events where kind = 'plan'") == []


def test_a_process_that_is_one_of_several_takes_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model may be a stage of a pipeline: what is in none of them the launcher says, where it sees all of them."""
    plan = _plan(tmp_path, {"layer": "0"}, {"layer": "elsewhere"})
    monkeypatch.setenv("WORLD_SIZE", "4")
    for local, others in (("4", []), ("2", ["elsewhere"])):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        words: list[str] = []
        with searching(Attacher(_options(tmp_path / local, fallback=plan), words.append)):
            _train(nn.Sequential(layer()))
        assert words == ['planned ["0"]', *others, f"attached {tmp_path / local}"]


def test_a_plan_that_is_partly_applied_is_told_by_the_report(tmp_path: Path) -> None:
    """A layer that cannot follow its recipe: to the launcher, and in the coverage. Another model's layer is its own."""
    plan = _plan(tmp_path, {"layer": "0", "recipe": "mxfp8"}, {"layer": "1"})
    other, words = nn.Sequential(nn.ReLU(), layer()), list[str]()
    with searching(Attacher(_options(tmp_path / "run", fallback=plan), words.append, lambda: [other])):
        _train(nn.Sequential(layer()))
    said = "0 is a plain nn.Linear: it stays in high precision. Use fp8dbg.simulate(...)."
    assert words == ['planned ["0"]', f"unplanned {said}", f"attached {tmp_path / 'run'}"]
    with open_run(tmp_path / "run") as run:
        notes = summarise(run).coverage.notes
    assert f"Not as planned: {said}" in notes
    assert not any("names layers" in note for note in notes)


def test_a_plan_goes_on_with_models_that_follow_one_another(tmp_path: Path) -> None:
    """What the first had and was trained with is no mistake in the plan when it is gone; what none has still is."""
    plan, words = _plan(tmp_path, {"layer": "0"}), list[str]()
    with searching(Attacher(_options(tmp_path / "run", fallback=plan), words.append)):
        _train(nn.Sequential(layer()))
        _train(nn.Sequential(nn.ReLU(), layer()))
    assert words == ['planned ["0"]', f"attached {tmp_path / 'run'}", "planned []", f"attached {tmp_path / 'run'}-2"]
    with open_run(tmp_path / "run-2") as run:
        assert not any("names layers" in note for note in summarise(run).coverage.notes)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To the launcher and to the log; training goes on."""
    (tmp_path / "file").write_text("x")
    told: list[str] = []
    with searching(Attacher(_options(tmp_path / "file"), told.append)):
        _train(nn.Sequential(layer()))
    assert told[0].startswith("failed RunFolderError: Cannot record into")
    assert "this model is not recorded" in caplog.text
