"""Hosts that are not as they were read: a version is warned of, a missing attribute becomes an event, training goes on.

Transformer Engine's are with its other tests.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dbg
from fp8dbg.hooks import megatron, torchao_float8
from tests.hosts.conftest import need
from tests.hosts.runs import rows


def train(model: nn.Module) -> list[Tensor]:
    """The weights after two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.randn(16, 32, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def plain() -> nn.Sequential:
    """Two linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def model_of(host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> nn.Sequential:
    """Two layers of the host's; Megatron's, which need a process group to be built, are played by plain ones."""
    if host is megatron:
        monkeypatch.setattr(megatron, "claims", lambda module: type(module) is nn.Linear)
        monkeypatch.setattr(megatron, "version_of", lambda *_: (0, 16))
        return plain()
    need("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(plain(), config=Float8LinearConfig(emulate=True))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("host", "name"), [(torchao_float8, "torchao"), (megatron, "Megatron-Core")])
def test_an_unknown_version_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: ModuleType, name: str
) -> None:
    """With its number and what still works; its layers are recorded all the same, as that host's."""
    model = model_of(host, monkeypatch)
    monkeypatch.setattr(host, "version_of", lambda *_: (9, 1))
    with pytest.warns(UserWarning, match=rf"{name} 9\.1 is not one"), fp8dbg.attach(model, tmp_path, every=1):
        train(model)
    assert rows(tmp_path, "select distinct host, layer from tensors order by layer") == [
        {"host": host.HOST, "layer": "0"},
        {"host": host.HOST, "layer": "1"},
    ]
    (event,) = rows(tmp_path, "select kind, detail from events where detail like '%9.1%'")
    assert event["kind"] == "gap"


class Bare(nn.Module):
    """A layer of a later version: nothing is where it was."""


@pytest.mark.parametrize("host", [torchao_float8, megatron])
def test_a_missing_attribute_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: ModuleType) -> None:
    """Training is bit for bit what it was, the other layer is recorded, and an event names the one that is not."""
    expected = train(model_of(host, monkeypatch))
    model = model_of(host, monkeypatch)
    with fp8dbg.attach(model, tmp_path, every=1) as run:
        layer: Any = run.recorder.watches[0].layer
        layer.module = Bare().train()
        watched = train(model)
    assert all(map(torch.equal, expected, watched))
    seen = {row["tensor"] for row in rows(tmp_path, "select distinct tensor from amax where layer = '1'")}
    assert seen == {"input", "weight", "grad_output"}
    assert not rows(tmp_path, "select * from amax where layer = '0' and tensor = 'weight'")
    if host is torchao_float8:
        assert {row["layer"] for row in rows(tmp_path, "select layer from events where kind = 'error'")} == {"0"}


def test_a_layer_that_cannot_be_read_is_not_taken_for_another_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Float8Linear is an nn.Linear, too: recorded as one in BF16 its figures would be inventions."""
    model = model_of(torchao_float8, monkeypatch)
    original = torchao_float8.Float8Layer

    def refusing(name: str, module: nn.Module, path: str) -> Any:
        if name == "0":
            raise AttributeError("config")
        return original(name, module, path)

    monkeypatch.setattr(torchao_float8, "Float8Layer", refusing)
    with fp8dbg.attach(model, tmp_path, every=1):
        train(model)
    assert rows(
        tmp_path, "select distinct layer, host from amax natural join (select distinct layer, host from tensors)"
    ) == [{"layer": "1", "host": "torchao_float8"}]
    assert [row["layer"] for row in rows(tmp_path, "select layer from events where kind = 'error'")] == ["0"]
