"""Arguments of the wrong kind: each function that takes one refuses it in a sentence, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8dbg
from fp8dbg.errors import Fp8dbgError, UsageError
from fp8dbg.recording.control import Control
from fp8dbg.recording.steps import numbers
from fp8dbg.runs.folder import open_folder
from fp8dbg.runs.plan import Plan, PlanEntry


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


def _train(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "option",
    [
        {"recipe": None},
        {"recipe": "dealyed"},
        {"recipe": "delayed:history=1e30"},
        {"recipe": "delayed:margin=-99999"},
        {"what_if": None},
        {"what_if": "dealyed"},
        {"layers": None},
        {"layers": [3]},
        {"dump": "0:inptu"},
        {"every": 1.5},
        {"rows": "many"},
        {"rows": 1.5},
        {"first_step": -1},
        {"first_step": 10**30},
        {"max_bytes": "1 GB"},
        {"also": "LayerNorm"},
        {"also": int},
        {"optimizer": "sgd"},
    ],
)
def test_attach_refuses_an_option_before_it_makes_a_folder(option: dict[str, Any], tmp_path: Path) -> None:
    """The folder is not made, the model carries no hook."""
    model = _net()
    with pytest.raises(UsageError, match=r"\."):
        fp8dbg.attach(model, tmp_path / "run", **option)
    assert not (tmp_path / "run").exists()
    assert not model[0]._forward_hooks


@pytest.mark.parametrize("model", [None, nn.Linear, [nn.Linear(2, 2)], nn.Parameter(torch.ones(2))])
def test_what_is_no_model_is_refused(model: Any, tmp_path: Path) -> None:
    """By attach, simulate and apply_fallback alike."""
    calls: list[Callable[[], object]] = [
        lambda: fp8dbg.attach(model, tmp_path / "run"),
        lambda: fp8dbg.simulate(model),
        lambda: fp8dbg.apply_fallback(model, Plan()),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=r"not a torch\.nn\.Module"):
            call()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", ["", "a\0b", "\udcff", 3, None, b"run", "x" * 5000])
def test_what_is_no_path_is_refused(path: Any) -> None:
    """By attach and open_run alike."""
    with pytest.raises(Fp8dbgError, match=r"\."):
        fp8dbg.open_run(path)
    with pytest.raises(Fp8dbgError, match=r"\."):
        fp8dbg.attach(_net(), path)


@pytest.mark.parametrize("fallback", [3, [3], {"0": 3}, {3: ["fprop"]}, {"0": {"fprop": 3}}, ["nope"], {"0": ["x"]}])
def test_simulate_refuses_a_fallback_and_changes_nothing(fallback: Any) -> None:
    """No layer is simulated afterwards."""
    model = _net()
    with pytest.raises(UsageError):
        fp8dbg.simulate(model, fallback=fallback)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]


@pytest.mark.parametrize(
    "options", [{"scale": "x"}, {"scale": torch.ones(3)}, {"axis": 5}, {"format": "e9m9"}, {"recipe": 3}]
)
def test_measure_refuses_an_option(options: dict[str, Any]) -> None:
    """Unknown names and values that are none."""
    with pytest.raises(UsageError):
        fp8dbg.measure(torch.ones(4, 4), **options)


def test_measure_refuses_tensors_that_are_not_dense() -> None:
    """Sparse ones by their layout's name, nested ones as such."""
    with pytest.raises(UsageError, match="sparse_coo"):
        fp8dbg.measure(torch.eye(3).to_sparse())
    with pytest.raises(UsageError, match="nested"):
        fp8dbg.measure(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


@pytest.mark.parametrize(
    "plan",
    [
        None,
        {"0": ["fprop"]},
        "plan.json",
        Plan((PlanEntry("0", ("xprop",)),)),
        Plan((PlanEntry("0", ("fprop",), "x"),)),
    ],
)
def test_apply_fallback_refuses_what_is_no_plan(plan: Any) -> None:
    """Unknown GEMMs and recipes too, also where the layer would ignore them; the layer keeps its recipes."""
    model = fp8dbg.simulate(_net())
    layer: Any = model[0]
    before = dict(layer.fp8_recipes)
    with pytest.raises(UsageError):
        fp8dbg.apply_fallback(model, plan)
    assert dict(layer.fp8_recipes) == before


@pytest.mark.parametrize(
    "text", [3, None, '{"entries": [{"layer": "a", "gemms": [[]]}]}', '{"entries": [{"layer": "a", "recipe": {}}]}']
)
def test_a_plan_of_the_wrong_shape_is_refused(text: Any) -> None:
    """Whatever JSON it is."""
    with pytest.raises(UsageError):
        Plan.from_json(text)


@pytest.mark.parametrize("loss", [torch.tensor(1j), torch.empty(1, device="meta"), 10**400, 1j, "x", [1.0]])
def test_what_is_no_loss_is_refused(loss: Any) -> None:
    """As a usage error, whatever float() makes of it."""
    with pytest.raises(UsageError, match="loss"):
        numbers([("loss", loss)])


@pytest.mark.filterwarnings("error")
def test_a_loss_that_requires_grad_is_logged_without_a_warning() -> None:
    """Under -W error a warning of torch's would break the training."""
    assert numbers([("loss", torch.ones((), requires_grad=True) * 2)]) == {"loss": 2.0}


def test_a_glob_that_fits_no_layer_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the layers there are; what the others fit is recorded."""
    model = _net()
    with fp8dbg.attach(model, tmp_path / "run", layers=["nope*", "0"], dump="nix:input"):
        _train(model)
    assert "'nope*'" in caplog.text
    with open_folder(tmp_path / "run") as run:
        details = [row["detail"] for row in run.rows("select detail from events where kind = 'gap'")]
        assert ["'nope*'" in details[0], "'nix'" in details[1], len(details)] == [True, True, 2]
        assert run.rows("select distinct layer from amax") == [{"layer": "0"}]


def test_an_optimizer_of_another_model_is_said(tmp_path: Path) -> None:
    """Its steps never come: the one that steps the model is named, once."""
    model, other = _net(), torch.optim.SGD(_net().parameters(), lr=0.01)
    with fp8dbg.attach(model, tmp_path / "run", optimizer=other):
        _train(model, steps=3)
    with open_folder(tmp_path / "run") as run:
        details = [row["detail"] for row in run.rows("select detail from events where kind = 'gap'")]
    assert len(details) == 1
    assert details[0].startswith("Steps are not counted: SGD")


def test_control_refuses_layers_that_the_run_does_not_record(tmp_path: Path) -> None:
    """And a folder that is missing or of a newer schema, as every reader does."""
    run = tmp_path / "run"
    fp8dbg.attach(_net(), run).close()
    for values in ({"layers": ["nope"]}, {"dump": ["nope:input"]}, {"dump": ["0:inptu"]}):
        with pytest.raises(UsageError, match="Valid names"):
            Control(run).change(values)
    assert not (run / "control.toml").exists()
    with pytest.raises(Fp8dbgError, match="There is no folder"):
        Control(tmp_path / "missing")
    text = (run / "run.json").read_text(encoding="utf-8")
    (run / "run.json").write_text(text.replace('"options"', '"options": null, "x"'), encoding="utf-8")
    assert Control(run).in_force()[0]["set_by"] == "default"
    (run / "run.json").write_text(text.replace('"schema_version": 1', '"schema_version": 99'), encoding="utf-8")
    with pytest.raises(Fp8dbgError, match="schema 99"):
        Control(run)
