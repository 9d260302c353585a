"""Small real trainings in simulated FP8 whose pairs `compare` and `check` must judge: healthy ones and faulted ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8dbg
from fp8dbg.demo.faults import plant_outliers
from fp8dbg.demo.model import SwiGLU
from fp8dbg.demo.text import VOCABULARY, batch, read_text
from fp8dbg.recording.session import Session

RECIPES = ("delayed:history=16", "current", "rowwise", "block", "mxfp8")
STEPS, EVERY = 100, 5


class Block(nn.Module):
    """A SwiGLU behind a norm, added to the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(width), SwiGLU(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same shape."""
        y: Tensor = self.mlp(self.norm(x))
        return x + y


class Small(nn.Module):
    """Predicts the next code from the last two: three blocks, ten linear layers, 60,000 parameters."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        """Logits [batch, length, VOCABULARY]."""
        x = self.embedding(codes)
        x = x + x.roll(1, dims=1)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True)
class Fault:
    """What goes wrong and when; ``at`` 0 is from the start."""

    kind: str
    at: int


Act = Callable[[nn.Module, torch.optim.Optimizer], None]


def _mlp(model: nn.Module, block: int = 1) -> SwiGLU:
    mlp = model.get_submodule(f"blocks.{block}.mlp")
    assert isinstance(mlp, SwiGLU)
    return mlp


def _outlier(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    plant_outliers(_mlp(model), optimizer, (3, 70))


def _dead(model: nn.Module, _: torch.optim.Optimizer) -> None:
    _mlp(model).gate.register_forward_hook(lambda _module, _inputs, output: output * 0)


def _loud(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.get_submodule("blocks.2.norm").register_forward_hook(lambda _module, _inputs, output: output * 16)


def _hot(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 20


def _cold(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.02


def _shrunk(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Gradients from the head back are a hundred thousand times smaller, as under a lost loss scale."""

    def shrink(_module: nn.Module, grads: Sequence[Tensor] | Tensor, _out: object) -> tuple[Tensor]:
        return (grads[0] * 1e-5,)

    model.get_submodule("norm").register_full_backward_hook(shrink)


def _nan(model: nn.Module, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        _mlp(model).up.weight[0, 0] = float("nan")


ACTS: dict[str, Act] = {
    "outlier": _outlier,
    "dead": _dead,
    "loud": _loud,
    "hot": _hot,
    "cold": _cold,
    "shrunk": _shrunk,
    "nan": _nan,
}
"""What each kind of fault does to model and optimizer before a step; "garbled" is in the data."""


@cache
def _text() -> Tensor:
    return read_text(400_000)


def learn(run: Session, model: nn.Module, optimizer: torch.optim.Optimizer, codes: Tensor, following: Tensor) -> None:
    """One step on one batch of text, under autocast to BF16; its loss is logged."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(codes)
    loss = F.cross_entropy(logits.float().flatten(0, 1), following.flatten())
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    run.log(loss=loss.item())
    optimizer.step()
    optimizer.zero_grad()


def train(
    path: Path,
    recipe: str = "delayed:history=16",
    *,
    seed: int = 0,
    fault: Fault | None = None,
    steps: int = STEPS,
    learning_rate: float = 4e-3,
) -> Path:
    """Train, recorded in ``path``; ``recipe`` "bf16" simulates nothing; returns the path."""
    torch.manual_seed(seed)
    model: nn.Module = Small()
    if recipe != "bf16":
        fp8dbg.simulate(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    batches = torch.Generator().manual_seed(seed)
    with fp8dbg.attach(model, path, optimizer=optimizer, every=EVERY) as run:
        for step in range(steps):
            if fault and step == fault.at and fault.kind in ACTS:
                ACTS[fault.kind](model, optimizer)
            codes, following = batch(_text(), 8, 64, batches)
            if fault and step >= fault.at and fault.kind == "garbled":
                following = torch.randint(VOCABULARY, following.shape, generator=batches)
            learn(run, model, optimizer, codes, following)
    return path


def healthy_seed(recipe: str, index: int) -> int:
    """Seeds of which no two runs of the benchmark share one."""
    return 100 * RECIPES.index(recipe) + index


KINDS = ("outlier", "dead", "loud", "hot", "shrunk", "nan", "garbled")
FROM_START = ("cold", "garbled", "dead", "loud")

FAULTED = [
    *((RECIPES[i % len(RECIPES)], Fault(KINDS[i % len(KINDS)], 33 + 3 * i)) for i in range(16)),
    *((RECIPES[i], Fault(kind, 0)) for i, kind in enumerate(FROM_START)),
]
"""Twenty faulted runs: the recipe of each and its fault."""


def faulted_seed(index: int) -> int:
    """The seed of a faulted run."""
    return 1000 + index
