"""Megatron-Bridge's own callback manager fires fp8dbg's callback as its training loop does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fp8dbg.hooks import megatron_bridge
from tests.hosts.conftest import need
from tests.hosts.runs import rows

NAME = "megatron.bridge.training.callbacks"


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its module of callbacks alone: what the package imports besides (mamba-ssm, ...) needs a GPU to build."""
    need("megatron")
    spec: Any = importlib.util.find_spec("megatron")
    files = [Path(place) / "bridge/training/callbacks.py" for place in spec.submodule_search_locations]
    file = next((path for path in files if path.exists()), None)
    if file is None:
        pytest.skip("megatron-bridge not installed: pip install --no-deps megatron-bridge==0.3.1")
    made: Any = importlib.util.spec_from_file_location(NAME, file)
    module = importlib.util.module_from_spec(made)
    monkeypatch.setitem(sys.modules, NAME, module)
    made.loader.exec_module(module)
    megatron_bridge._callback_class.cache_clear()
    yield module
    megatron_bridge._callback_class.cache_clear()


class MegatronOptimizer:
    """Steps as Megatron's does: no torch optimizer that holds the model's own parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())

    def step(self) -> None:
        """Plain gradient descent."""
        for p in self.parameters:
            if p.grad is not None:
                p.data -= 0.1 * p.grad
                p.grad = None


def pretrain(bridge: Any, callbacks: list[Any], chunks: int = 1) -> list[torch.Tensor]:
    """Three steps of two microbatches as Megatron-Bridge's loop does them, resumed at 10; the weights at the end."""
    torch.manual_seed(0)
    model = [nn.Sequential(nn.Linear(16, 16)) for _ in range(chunks)]
    manager = bridge.normalize_callbacks(callbacks)
    state = SimpleNamespace(train_state=SimpleNamespace(step=10))
    optimizer = MegatronOptimizer(nn.ModuleList(model))

    def fire(event: str, **facts: Any) -> None:
        if bridge.should_fire(manager, event):
            manager.fire(event, bridge.CallbackContext(state=state, model=model, optimizer=optimizer, **facts))

    fire("on_train_start")
    for step in range(3):
        fire("on_train_step_start")
        for microbatch in range(2):
            x: Any = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + microbatch))
            for chunk in model:
                x = chunk(x)
            x.square().mean().backward()
        optimizer.step()
        state.train_state.step += 1
        loss = {"lm loss": torch.tensor(float(step))}
        fire("on_train_step_end", loss_dict=loss, grad_norm=0.5 + step, skipped_iter=False)
    fire("on_train_end")
    return [p.detach().clone() for chunk in model for p in chunk.parameters()]


@pytest.mark.parametrize("chunks", [1, 2])
def test_bridge_gives_loss_norm_and_step(bridge: Any, tmp_path: Path, chunks: int) -> None:
    """Bit-identical training; steps numbered as the training's, microbatches apart, every chunk's layer."""
    bare = pretrain(bridge, [], chunks)
    watched = pretrain(bridge, [megatron_bridge.callback(tmp_path, every=1)], chunks)
    assert all(map(torch.equal, bare, watched))
    steps = rows(tmp_path, "select step, loss, grad_norm from steps order by step")
    assert [tuple(row.values()) for row in steps] == [(10, 0.0, 0.5), (11, 1.0, 1.5), (12, 2.0, 2.5)]
    counts = rows(tmp_path, "select layer, tensor, count(*) as n from amax group by all")
    assert {row["n"] for row in counts} == {6}
    assert {row["layer"] for row in counts} == ({"0"} if chunks == 1 else {"0.0", "1.0"})
    assert rows(tmp_path, "select * from events") == []
