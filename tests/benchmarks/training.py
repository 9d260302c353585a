"""What attaching costs a training step, as ratios measured in one run: ``python -m tests.benchmarks.training``.

A 4-layer decoder of d = 512 on 2,048 tokens in BF16 autocast. The variants take turns, step by step, each on a model
of its own, so that whatever else the machine does hits all alike; the medians are compared. Times are the process's
own CPU time (all threads) beside the wall's: on a shared machine the first is the one to trust.

glibc hands memory back to the kernel and fetches it again as the models' tensors happen to lie: 20,000 to 70,000 page
faults a step, up to a tenth of it, and another number in every process. Here it keeps what it has, for all variants.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8dbg
from fp8dbg.numerics.census import amax_of

LAYERS, WIDTH, HIDDEN, HEADS, VOCABULARY = 4, 512, 2048, 8, 1024
BATCH, LENGTH = 8, 256


class Block(nn.Module):
    """Attention and SwiGLU, every projection a linear layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, length, width], and so the result."""
        y = self.norm1(x)
        q, k, v = (p(y).view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        out: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out


class Decoder(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, length] -> logits [batch, length, vocabulary]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def trainer() -> tuple[Decoder, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer, and the function that trains one step on random tokens."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss: Any = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


@contextlib.contextmanager
def naive_hooks(model: nn.Module) -> Iterator[None]:
    """What one would write first: a chain of torch operations and one ``.item()`` per figure, for three operands.

    Per operand: amax, mean, rms, zeros, underflow, saturation, mean squared error, cosine under E4M3 current scaling.
    """
    figures: list[float] = []

    def look(x: Tensor) -> None:
        x = x.detach().float()
        scale = 448.0 / x.abs().max().item()
        y = (x * scale).to(torch.float8_e4m3fn).float() / scale
        figures[:] = [x.mean().item(), x.square().mean().sqrt().item(), (x == 0).sum().item()]
        figures.extend([((y == 0) & (x != 0)).sum().item(), (x.abs() * scale > 464).sum().item()])
        figures.extend([(y - x).square().mean().item(), functional.cosine_similarity(x, y, dim=-1).mean().item()])

    def hook(module: Any, args: tuple[Tensor], output: Any) -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            look(args[0])
            look(module.weight)
        output.register_hook(look)

    handles = [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, nn.Linear)]
    yield
    for handle in handles:
        handle.remove()


Variant = tuple[str, Callable[[nn.Module, Any, Path], contextlib.AbstractContextManager[Any]]]

VARIANTS: list[Variant] = [
    ("bare", lambda model, optimizer, path: contextlib.nullcontext()),
    ("attached, not sampling", lambda m, o, path: fp8dbg.attach(m, path, o, every=0)),
    ("every=1, shadow GEMMs", lambda m, o, path: fp8dbg.attach(m, path, o, every=1)),
    ("naive hooks", lambda model, optimizer, path: naive_hooks(model)),
]


def rows(rounds: int = 12, warm_up: int = 2) -> list[dict[str, Any]]:
    """One row per variant: median seconds of a step, CPU and wall, and what they are over the bare step in per cent.

    The row ``every=100`` follows from two others: 99 unsampled steps and a sampled one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return compared(trainer, VARIANTS, rounds, warm_up)


def compared(
    trainer: Callable[[], tuple[Any, Any, Callable[[], None]]], variants: list[Variant], rounds: int, warm_up: int
) -> list[dict[str, Any]]:
    """``rows`` for another trainer: a model, its optimizer and the function that trains a step; first the bare variant,
    then the one that never samples, then the one that always does."""
    cpu: dict[str, list[float]] = {name: [] for name, _ in variants}
    wall: dict[str, list[float]] = {name: [] for name, _ in variants}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        steps = {}
        for name, variant in variants:
            model, optimizer, steps[name] = trainer()
            stack.enter_context(variant(model, optimizer, Path(folder) / name))
        for turn in range(rounds + warm_up):
            names = list(steps) if turn % 2 else list(reversed(steps))
            for name in names:
                began = time.process_time(), time.perf_counter()
                steps[name]()
                if turn >= warm_up:
                    cpu[name].append(time.process_time() - began[0])
                    wall[name].append(time.perf_counter() - began[1])
    return _table(cpu, wall)


def _table(cpu: dict[str, list[float]], wall: dict[str, list[float]]) -> list[dict[str, Any]]:
    found = []
    for name in cpu:
        row: dict[str, Any] = {"variant": name}
        for kind, times in (("cpu", cpu), ("wall", wall)):
            row[f"{kind}_seconds"] = statistics.median(times[name])
            over = [mine / bare - 1 for mine, bare in zip(times[name], times["bare"], strict=True)]
            row[f"{kind}_over_bare_percent"] = 100 * statistics.median(over)
        found.append(row)
    idle, full = found[1], found[2]
    amortised: dict[str, Any] = {"variant": "every=100, amortised"}
    for key in idle:
        if key != "variant":
            amortised[key] = (99 * idle[key] + full[key]) / 100
    return [*found[:2], amortised, *found[2:]]


def hook_microseconds() -> dict[str, float]:
    """What an unsampled call of a layer costs in Python, the amax aside: in its forward, and at its gradient.

    On tensors of 32 elements, each used once, the least of many repeats; the time of as many amaxes is taken off. The
    forward's holds some 2 microseconds of torch's own, for a hook on an autograd node.
    """
    layer, grad = nn.Linear(8, 8), torch.ones(4, 8)

    def inputs() -> list[Tensor]:
        return [torch.randn(4, 8, requires_grad=True) for _ in range(_CALLS)]

    amax = _least(lambda: (inputs(), amax_of))
    with tempfile.TemporaryDirectory() as folder, fp8dbg.attach(layer, folder, every=0) as run:
        (watch,) = run.recorder.watches
        forward = _least(lambda: ([(x, layer(x)) for x in inputs()], lambda xy: watch.called((xy[0],), {}, xy[1])))
        made = _least(lambda: ([watch.forward(x, None) for x in inputs()], lambda call: call.gradient((grad,))))
    return {"forward": forward - amax, "gradient": made - amax}


_CALLS, _REPEATS = 100, 40


def _least(prepare: Callable[[], tuple[list[Any], Callable[[Any], Any]]]) -> float:
    """Microseconds that the function takes for one of the things, both made afresh for each repeat."""
    best = float("inf")
    for _ in range(_REPEATS):
        things, work = prepare()
        began = time.perf_counter()
        for thing in things:
            work(thing)
        best = min(best, (time.perf_counter() - began) / _CALLS * 1e6)
    return best


KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""glibc's settings with which memory that is freed stays in the process."""


def print_table(found: list[dict[str, Any]], title: str = "") -> None:
    """The rows of ``rows``."""
    print(f"{title:26}{'CPU':>10}{'over':>9}{'wall':>10}{'over':>9}")
    for row in found:
        print(
            f"{row['variant']:26}{row['cpu_seconds']:9.3f}s{row['cpu_over_bare_percent']:8.2f}%"
            f"{row['wall_seconds']:9.3f}s{row['wall_over_bare_percent']:8.2f}%"
        )


def main() -> None:
    """Print the table."""
    if not KEEPING.items() <= os.environ.items():  # glibc reads them when a process starts
        os.execve(sys.executable, [sys.executable, "-m", "tests.benchmarks.training"], os.environ | KEEPING)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; overhead over the bare step")
    print_table(rows())
    costs = hook_microseconds()
    print(f"an unsampled hook, its amax aside: forward {costs['forward']:.1f} us, gradient {costs['gradient']:.1f} us")


if __name__ == "__main__":
    main()
