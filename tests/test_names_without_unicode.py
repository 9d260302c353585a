"""Layers named with a lone surrogate, which no UTF-8 file holds: one legible name everywhere, and nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8dbg
from fp8dbg.errors import UnknownNameError
from fp8dbg.recording.control import Control
from fp8dbg.runs.plan import Plan
from tests.command_line import in_a_process
from tests.nets import table

RAW, LEGIBLE = "a\udc80b", "a\\udc80b"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module(RAW, nn.Linear(16, 16))
    net.add_module("plain", nn.Linear(16, 4))
    return net


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps; from the fourth on the layer's input has an outlier that drowns the rest of it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 1e-9)
    with fp8dbg.attach(net, folder, optimizer, every=1, layers=[RAW], dump=[f"{RAW}:input"]):
        for step in range(12):
            x = torch.randn(8, 16)
            x[0, 0] = 1e6 if step > 2 else 1.0
            net(x).square().mean().backward()
            optimizer.step()
    return folder


def test_every_table_dump_and_run_json_says_the_same_name(recorded: Path) -> None:
    """What was asked for by the layer's own name is recorded under its legible one."""
    for name in ("amax", "tensors", "gemms"):
        assert table(recorded, f"select distinct layer from {name}") == [{"layer": LEGIBLE}]
    with fp8dbg.open_run(recorded) as run:
        assert [(entry["layer"], entry["module"]) for entry in run.meta["layers"]] == [(LEGIBLE, LEGIBLE)]
        assert {dump.layer for dump in run.dumps()} == {LEGIBLE}
        assert len(run.dumps(LEGIBLE, "input")) == 12
        assert run.problems == []


def test_the_plan_for_it_can_be_followed(recorded: Path) -> None:
    """By simulate and apply_fallback, by either name; another name is refused in a sentence that can be printed."""
    with fp8dbg.open_run(recorded) as run:
        plan = run.plan()
    assert [entry.layer for entry in plan.entries] == [LEGIBLE]
    raw = Plan.from_json(json.dumps({"entries": [{"layer": RAW, "gemms": ["fprop"]}]}))
    for one in (plan, raw):
        for net in (fp8dbg.simulate(model(), fallback=one.as_fallback()), fp8dbg.simulate(model())):
            fp8dbg.apply_fallback(net, one)
            assert "fprop" in net[0].fp8_fallback  # type: ignore[operator]  # a simulated layer
    assert "fprop" in fp8dbg.simulate(model(), fallback=[f"{RAW}:fprop"])[0].fp8_fallback  # type: ignore[operator]
    with pytest.raises(UnknownNameError) as refused:
        fp8dbg.simulate(model(), fallback=["nope"])
    assert LEGIBLE in str(refused.value).encode().decode()


def test_a_live_run_is_told_of_it_by_either_name(recorded: Path) -> None:
    """control.toml is UTF-8."""
    control = Control(recorded)
    for name in (RAW, LEGIBLE):
        control.change({"layers": [name], "dump": [f"{name}:input"]})
        assert control.said() == {"layers": [LEGIBLE], "dump": [f"{LEGIBLE}:input"]}
    control.reset()


@pytest.mark.parametrize(
    "arguments",
    [
        ("report",),
        ("tensors", "--layer", LEGIBLE),
        ("recommend", "--for", "pytorch"),
        ("recommend", "--for", "megatron"),
        ("whatif", "--recipe", "current"),
        ("query", "select distinct layer from tensors", "--csv"),
        ("watch", "--json"),
    ],
    ids=" ".join,
)
def test_every_verb_answers(recorded: Path, arguments: tuple[str, ...]) -> None:
    """With the legible name, in UTF-8."""
    done = in_a_process(arguments[0], recorded, *arguments[1:])
    assert done.code == 0, done.err
    assert LEGIBLE in done.out or json.dumps(LEGIBLE)[1:-1] in done.out
    if arguments[0] == "report":
        assert LEGIBLE in (recorded / "report.html").read_text(encoding="utf-8")
