"""A small language model, trained on real text, to plant faults in: its checkpoints, and training on from one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8dbg
from fp8dbg.demo.model import Transformer
from fp8dbg.demo.text import VOCABULARY, batch, read_text, split
from fp8dbg.demo.training import loss_of

RECIPE = "delayed:history=16"

LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Size:
    """How large the model and its batches are."""

    width: int = 32
    depth: int = 2
    heads: int = 2
    hidden: int = 96
    rows: int = 4
    length: int = 64


SIZES = {"small": Size(), "wide": Size(width=48, hidden=160), "deep": Size(depth=3)}


class Language(Transformer):
    """The demo's transformer with a projection behind the embedding, so that embedding channels feed a GEMM."""

    def __init__(self, size: Size) -> None:
        super().__init__(size.width, size.depth, size.heads, size.hidden)
        project = nn.Linear(size.width, size.width, bias=False)
        nn.init.eye_(project.weight)
        self.embed = nn.Sequential(nn.Embedding(VOCABULARY, size.width), project)  # type: ignore[assignment]


@dataclass(frozen=True)
class Checkpoint:
    """What training goes on from: the model's size, the seed of its batches, the weights and the optimizer's state."""

    size: Size
    seed: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]


@dataclass
class Scene:
    """A model in training, for a fault to be planted in.

    Attributes:
        model: in simulated FP8, or in BF16.
        optimizer: what trains it.
        size: of the model and its batches.
        batches: draws the batches.
        held: after each step put back what the fault keeps as it is.
        token_weights: weights of the tokens in the loss, [tokens]; None: all the same.
        change: what is done to the codes of the next batch and those that follow them.
        not_reduced: layers whose amax is not reduced over the ranks.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    size: Size
    batches: torch.Generator
    held: list[Callable[[], object]] = field(default_factory=list)
    token_weights: Tensor | None = None
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    not_reduced: set[str] = field(default_factory=set)

    def loss(self) -> Tensor:
        """The loss of the next batch, in nats per code."""
        codes, following = batch(_text()[0], self.size.rows, self.size.length, self.batches)
        codes, following = self.change(codes, following) if self.change else (codes, following)
        if self.token_weights is None:
            return loss_of(self.model, codes, following)
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(codes)
        each = F.cross_entropy(logits.float().flatten(0, 1), following.flatten(), reduction="none")
        return (each * self.token_weights).mean()

    def step(self) -> float:
        """One training step; its loss."""
        loss = self.backward()
        self.update()
        return loss

    def backward(self) -> float:
        """The gradients of the next batch; its loss."""
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return loss.item()

    def update(self) -> None:
        """The optimizer's part of a step; gradients that are not finite are dropped, and momentum alone moves."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if not norm.isfinite():
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for restore in self.held:
            restore()

    @torch.no_grad()
    def held_out(self, batches: int = 24) -> float:
        """Loss on text that is not trained on, in nats per code; the same windows each time."""
        self.model.eval()
        generator = torch.Generator().manual_seed(1)
        windows = [batch(_text()[1], self.size.rows, self.size.length, generator) for _ in range(batches)]
        total = sum(loss_of(self.model, *each).item() for each in windows) / batches
        self.model.train()
        return total

    def hold(self, parameter: nn.Parameter, dim: int, index: Iterable[int]) -> None:
        """Keep slices of a parameter as they are from now on, and out of the gradient norm.

        Training knows nothing of a planted factor: a step of the usual size would overwrite what was divided by it.
        """
        chosen = torch.tensor(list(index))
        kept = parameter.detach().index_select(dim, chosen)
        grad_of: Any = parameter  # torch leaves register_hook without types
        grad_of.register_hook(lambda grad: grad.index_fill(dim, chosen, 0.0))
        self.held.append(lambda: parameter.data.index_copy_(dim, chosen, kept))

    def checkpoint(self, seed: int) -> Checkpoint:
        """Where training stands, to go on from."""
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return Checkpoint(self.size, seed, weights, copy.deepcopy(self.optimizer.state_dict()))


@cache
def trained(size: Size, seed: int, steps: int = 300) -> Checkpoint:
    """A model trained in BF16 on the standard library's source; made once for all faults planted in it."""
    torch.manual_seed(seed)
    scene = _scene(Language(size), size, seed)
    for _ in range(steps):
        scene.step()
    return scene.checkpoint(seed)


def resume(start: Checkpoint, recipe: str | None = RECIPE, fallback: Any = None) -> Scene:
    """A model that goes on from a checkpoint, in simulated FP8; ``recipe`` None: in BF16."""
    model = Language(start.size)
    model.load_state_dict(start.weights)
    if recipe is not None:
        fp8dbg.simulate(model, recipe, fallback)
    scene = _scene(model, start.size, start.seed + 1000)
    scene.optimizer.load_state_dict(copy.deepcopy(start.optimizer))
    return scene


def _scene(model: nn.Module, size: Size, seed: int) -> Scene:
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    return Scene(model, optimizer, size, torch.Generator().manual_seed(seed))


@cache
def _text() -> tuple[Tensor, Tensor]:
    return split(read_text())
