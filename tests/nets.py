"""Small models and training loops for the tests of recording: every way of training that must not be disturbed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8dbg
from fp8dbg.recording.session import Session
from fp8dbg.runs.folder import open_folder

WIDTH, HIDDEN, CLASSES = 16, 32, 8


class Block(nn.Module):
    """Two linear layers with dropout and a residual."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.activation, self.dropout = nn.ReLU(inplace), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., width]."""
        out: Tensor = x + self.down(self.dropout(self.activation(self.up(x))))
        return out


class Net(nn.Module):
    """Blocks and a head. ``wrap`` calls a block on x, for checkpointing; ``inplace`` activations overwrite outputs."""

    def __init__(self, wrap: Callable[[nn.Module, Tensor], Tensor] | None = None, inplace: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(inplace) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, tokens, width] -> [batch, tokens, classes]."""
        for block in self.blocks:
            x = block(x) if self.wrap is None else self.wrap(block, x)
        out: Tensor = self.head(x)
        return out


class TwoResults(nn.Linear):
    """A linear layer that returns a tuple, as Megatron's do."""

    def forward(self, x: Tensor) -> Any:
        """The product, and the bias that was not added."""
        return nn.functional.linear(x, self.weight), self.bias


class TupleNet(Net):
    """A net whose head returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.head = TwoResults(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """As Net's."""
        for block in self.blocks:
            x = block(x)
        y, bias = self.head(x)
        out: Tensor = y + bias
        return out


def shared() -> Net:
    """A net that runs one block twice."""
    net = Net()
    net.blocks[1] = net.blocks[0]
    return net


def _reentrant(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, x, use_reentrant=True)
    return out


def _non_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, x, use_reentrant=False)
    return out


def _save_gemms(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del ctx, args, kwargs
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(block: nn.Module, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, _save_gemms)
    out: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return out


@dataclass
class Case:
    """One way to train.

    Args:
        net: makes the model.
        bf16: whether under BF16 autocast.
        recipe: what it simulates, if anything.
        microbatches: backward passes a step.
        optimizers: how many share the parameters.
        validate: whether an evaluation and a no_grad pass in training mode come between the steps.
        gradients: whether the input wants a gradient (reentrant checkpointing trains nothing without).
    """

    net: Callable[[], nn.Module] = Net
    bf16: bool = True
    recipe: str | None = None
    microbatches: int = 1
    optimizers: int = 1
    validate: bool = False
    gradients: bool = False


CASES: dict[str, Case] = {
    "float32": Case(bf16=False),
    "in-place activation": Case(lambda: Net(inplace=True)),
    "autocast": Case(),
    "accumulation": Case(microbatches=3),
    "reentrant checkpointing": Case(lambda: Net(wrap=_reentrant), gradients=True),
    "non-reentrant checkpointing": Case(lambda: Net(wrap=_non_reentrant)),
    "selective checkpointing": Case(lambda: Net(wrap=_selective)),
    "accumulation, reentrant": Case(lambda: Net(wrap=_reentrant), microbatches=2, gradients=True),
    "simulated delayed": Case(recipe="delayed:history=4", microbatches=2),
    "simulated mxfp8": Case(recipe="mxfp8"),
    "simulated, reentrant": Case(lambda: Net(wrap=_reentrant), recipe="delayed:history=4", gradients=True),
    "simulated, non-reentrant": Case(lambda: Net(wrap=_non_reentrant), recipe="delayed:history=4"),
    "two optimizers": Case(optimizers=2),
    "shared module": Case(shared, microbatches=2),
    "tuples": Case(TupleNet),
    "evaluation between": Case(validate=True),
}


@dataclass
class Outcome:
    """All that training leaves: it must be the same, bit for bit, with and without us."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    random_state: Tensor = field(default_factory=lambda: torch.empty(0))

    def assert_same(self, other: Outcome) -> None:
        """Bit for bit."""
        assert self.losses == other.losses
        assert self.weights.keys() == other.weights.keys()
        for name, weight in self.weights.items():
            assert torch.equal(weight, other.weights[name]), name
        assert torch.equal(self.random_state, other.random_state)


def build(case: Case) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """The model and its optimizers, from seed 0."""
    torch.manual_seed(0)
    model = case.net()
    if case.recipe:
        fp8dbg.simulate(model, case.recipe)
    parameters = list(model.parameters())
    parts = [parameters[i :: case.optimizers] for i in range(case.optimizers)]
    kinds = (torch.optim.AdamW, torch.optim.SGD)
    return model, [kind(part, lr=1e-2) for kind, part in zip(kinds, parts, strict=False)]


def loss_of(case: Case, model: nn.Module) -> Any:
    """The loss of a random batch of 2 x 5 tokens: a Tensor, whose ``backward`` torch leaves without types."""
    x = torch.randn(2, 5, WIDTH, requires_grad=case.gradients)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.bf16):
        logits = model(x)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), torch.randint(CLASSES, (10,))) / case.microbatches


def train_step(case: Case, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> float:
    """One step; its loss, summed over the microbatches."""
    total = 0.0
    for _ in range(case.microbatches):
        loss = loss_of(case, model)
        loss.backward()
        total += loss.item()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if case.validate:
        _validate(case, model)
    return total


def _validate(case: Case, model: nn.Module) -> None:
    model.eval()
    loss_of(case, model)
    with torch.no_grad():
        loss_of(case, model)
    model.train()
    with torch.no_grad():
        loss_of(case, model)


def outcome(losses: list[float], model: nn.Module) -> Outcome:
    """What is left now."""
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Outcome(losses, weights, torch.get_rng_state())


def train(case: Case, steps: int = 4, run_dir: Path | None = None, **options: Any) -> Outcome:
    """Train, attached if ``run_dir`` is given."""
    model, optimizers = build(case)
    attached: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if run_dir is not None:
        attached = fp8dbg.attach(model, run_dir, **options)
    with attached:
        losses = [train_step(case, model, optimizers) for _ in range(steps)]
    return outcome(losses, model)


@contextlib.contextmanager
def attached(tmp_path: Path, case: Case | None = None, **options: Any) -> Iterator[tuple[Session, Callable[[], float]]]:
    """A session on a case's model, and the function that trains a step."""
    case = case or Case()
    model, optimizers = build(case)
    with fp8dbg.attach(model, tmp_path / "run", **options) as session:
        yield session, lambda: train_step(case, model, optimizers)


def table(run_dir: Path, query: str) -> list[dict[str, Any]]:
    """Rows of a query over a run folder."""
    folder = open_folder(run_dir)
    try:
        assert not folder.problems
        frame = folder.sql(query).df()
        found: list[dict[str, Any]] = frame.astype(object).where(frame.notna(), None).to_dict("records")
        return found
    finally:
        folder.close()
