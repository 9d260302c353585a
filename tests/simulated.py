"""Small simulated models for tests, and what of them is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from fp8dbg.numerics.simulated import SimulatedLinear

SHORT = "delayed:history=3"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Layers this small gain nothing from a second thread, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def small(seed: int = 0, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64, bias=bias), nn.GELU(), nn.Linear(64, 32, bias=bias))


def layers(model: nn.Module) -> list[SimulatedLinear]:
    return [m for m in model.modules() if isinstance(m, SimulatedLinear)]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step(model: nn.Module, x: Tensor, forward: Callable[[nn.Module, Tensor], Tensor] = lambda m, x: m(x)) -> Tensor:
    """One forward and backward under autocast; returns the output."""
    with torch.autocast("cpu", torch.bfloat16):
        y = forward(model, x)
    y.float().square().sum().backward()  # type: ignore[no-untyped-call]
    return y.detach()
