"""The gallery: every fault with what is known of it, and the runs that show it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fp8dbg
from examples.faults import planted
from examples.faults.lab import RECIPE, SIZES, Scene, resume, trained

STEPS, EVERY, ONSET = 60, 4, 34
"""Training goes on for so many steps from the checkpoint, is sampled on every fourth, and goes wrong after half."""


@dataclass(frozen=True)
class Case:
    """Which model a fault is planted in: a name of ``SIZES``, and the seed of its weights and batches."""

    size: str = "small"
    seed: int = 0

    @property
    def block(self) -> int:
        """The block that gets the fault."""
        return self.seed % SIZES[self.size].depth


@dataclass(frozen=True)
class Fault:
    """A planted fault and the right answer; "{block}" in a layer's name is the case's.

    Attributes:
        name: what it is called.
        plant: plants it; for a fault of one batch returns what ends it.
        code: the verdict.
        layers: the layers of which any may be named first: one, or those that a jump reaches at once.
        tensors: the same for the tensor; None where the verdict is about none.
        action: "bf16", the kind of the action instead, or "none".
        recipe: what the run computes in.
        onset: the step that it begins on.
    """

    name: str
    plant: Callable[[Scene, Case], planted.Undo | None]
    code: str
    layers: tuple[str | None, ...]
    tensors: tuple[str | None, ...]
    action: str
    recipe: str = RECIPE
    onset: int = ONSET

    def named(self, case: Case) -> list[str | None]:
        """The layers, of one case."""
        return [None if layer is None else layer.format(block=case.block) for layer in self.layers]

    def says(self, case: Case) -> str:
        """The right answer in a line."""
        where = " or ".join(str(layer) for layer in self.named(case))
        return f"{self.code}, {where}, {' or '.join(map(str, self.tensors))}, step {self.onset}: {self.action}"


MLP, ATTENTION = "layers.{block}.mlp", "layers.{block}.attention"


def _in(layer: str, case: Case) -> str:
    return layer.format(block=case.block)


_FAULTS = (
    Fault(
        "swiglu_outlier",
        lambda scene, case: planted.swiglu_outlier(scene, case.block),
        "outlier", (f"{MLP}.up",), ("weight",), "bf16",
    ),
    Fault(
        "query_key_outlier",
        lambda scene, case: planted.query_key_outlier(scene, case.block),
        "outlier", (f"{ATTENTION}.qkv",), ("weight",), "bf16",
    ),
    Fault(
        "value_outlier",
        lambda scene, case: planted.value_outlier(scene, case.block),
        "outlier", (f"{ATTENTION}.qkv",), ("weight",), "bf16",
    ),
    Fault(
        "embedding_outlier",
        lambda scene, case: planted.embedding_outlier(scene),
        "outlier", ("embed.1",), ("input",), "bf16",
    ),
    Fault(
        "head_outlier",
        lambda scene, case: planted.head_outlier(scene),
        "outlier", ("head",), ("input",), "bf16",
    ),
    Fault(
        "hidden_outlier",
        lambda scene, case: planted.hidden_outlier(scene),
        "outlier", ("embed.1",), ("input",), "bf16",
    ),
    # a jump of one layer is acted on where a sampled step saw what it clipped; of all layers wherever it falls
    Fault(
        "amax_jump",
        lambda scene, case: planted.amax_jump(scene, (_in("layers.{block}.attention_norm", case),)),
        "saturation", (f"{ATTENTION}.qkv",), ("input",), "give the scale room", onset=36,
    ),
    Fault(
        "jump_everywhere",
        lambda scene, case: planted.amax_jump(scene, planted.norms(scene)),
        "saturation", ("layers.0.attention.qkv",), ("input",), "give the scale room",
    ),
    Fault(
        "stale_scale",
        lambda scene, case: planted.lone_spike(scene, _in("layers.{block}.attention_norm", case)),
        "stale_scale", (f"{ATTENTION}.qkv",), ("input",), "shorten the amax history",
        recipe="delayed:history=64",
    ),
    Fault(
        "infinite_amax",
        lambda scene, case: planted.infinite_gradient(scene, "embed.1"),
        "frozen_scale", ("embed.1",), ("grad_output",), "repair the scale state",
        recipe="delayed", onset=0,
    ),
    Fault(
        "scale_never_updated",
        lambda scene, case: planted.scale_never_updated(scene, _in(f"{MLP}.gate", case)),
        "frozen_scale", (f"{MLP}.gate",), ("grad_output",), "repair the scale state", onset=0,
    ),
    Fault(
        "state_lost",
        lambda scene, case: planted.state_lost(scene, _in(f"{MLP}.gate", case)),
        "frozen_scale", (f"{MLP}.gate",), ("input", "weight", "grad_output"), "repair the scale state",
    ),
    Fault(
        "narrow_gradients",
        lambda scene, case: planted.spread_gradients(scene),
        "wrong_format", ("head",), ("grad_output",), "use E5M2 for gradients",
        recipe="delayed:history=16,hybrid=false",
    ),
    Fault(
        "nan_weight_gradient",
        lambda scene, case: planted.nan_weight_gradient(scene, _in(f"{MLP}.gate", case)),
        "non_finite", (f"{MLP}.gate",), ("grad_weight",), "repair the program",
    ),
    Fault(
        "dead_layer",
        lambda scene, case: planted.dead_layer(scene, _in(f"{MLP}.down", case)),
        "dead_tensor", (f"{MLP}.down",), ("weight",), "repair the program",
    ),
    Fault(
        "stale_weight",
        lambda scene, case: planted.stale_weight(scene, _in(f"{MLP}.up", case)),
        "gain_error", (f"{MLP}.up",), ("weight",), "repair the program",
    ),
    Fault(
        "few_bits",
        lambda scene, case: planted.few_bits(scene, _in(f"{MLP}.down", case)),
        "accumulation", (f"{MLP}.down",), (None,), "repair the program",
    ),
    Fault(
        "data_spike",
        lambda scene, case: planted.random_text(scene),
        "not_fp8", (None,), (None,), "none",
    ),
    # while the window holds an older maximum the ranks' scales are the same: it must not be longer than the sampling
    Fault(
        "amax_not_reduced",
        lambda scene, case: planted.amax_not_reduced(scene, _in(f"{MLP}.down", case)),
        "rank_disagreement", (f"{MLP}.down",), ("input",), "repair the program",
        recipe=f"delayed:history={EVERY}",
    ),
)  # fmt: skip

GALLERY = {fault.name: fault for fault in _FAULTS}
"""Every fault by its name."""

CASES = (Case("small", 0), Case("wide", 1), Case("deep", 2))
"""Models that each fault is planted in."""

IN_FORCE = (
    "delayed", RECIPE, "delayed:history=1,algorithm=most_recent", "delayed:history=16,margin=1", "current",
    "current_pow2", "tensorwise", "rowwise", "rowwise_with_gw_hp", "block", "mxfp8", "nvfp4", "int8",
)  # fmt: skip
COMPARED = ("delayed", "current", "mxfp8")
HEALTHY = tuple((recipe, True) for recipe in IN_FORCE) + tuple((recipe, False) for recipe in COMPARED)
"""Recipes of healthy runs, and whether they are in force or only compared with a BF16 run."""


def record(path: Path, fault: Fault, case: Case, steps: int = STEPS, fallback: Any = None) -> Path:
    """Train on from the case's checkpoint, recorded, with the fault planted on its step; returns the run folder.

    Args:
        path: the run folder.
        fault, case: what is planted in which model.
        steps: to train on.
        fallback: what stays in BF16, as ``simulate`` takes it.
    """
    if fault.code == "rank_disagreement":
        return _record_two_ranks(path, fault, case, steps)
    scene = resume(trained(SIZES[case.size], case.seed), fault.recipe, fallback)
    with fp8dbg.attach(scene.model, path, optimizer=scene.optimizer, every=EVERY) as run:
        for step in range(steps):
            undo = fault.plant(scene, case) if step == fault.onset else None
            run.log(loss=scene.step())
            if undo is not None:
                undo()
    return path


def record_healthy(path: Path, recipe: str, in_force: bool, case: Case, steps: int = STEPS) -> Path:
    """The same with nothing wrong; ``in_force`` False: in BF16, compared with the recipe."""
    scene = resume(trained(SIZES[case.size], case.seed), recipe if in_force else None)
    with fp8dbg.attach(scene.model, path, optimizer=scene.optimizer, every=EVERY, recipe=recipe) as run:
        for _ in range(steps):
            run.log(loss=scene.step())
    return path


def _record_two_ranks(path: Path, fault: Fault, case: Case, steps: int) -> Path:
    """Two replicas in step: gradients averaged, the amax of inputs and weights reduced to the larger."""
    start = trained(SIZES[case.size], case.seed)
    scenes = [resume(start, fault.recipe) for _ in range(2)]
    scenes[1].batches.manual_seed(case.seed + 2000)
    with ExitStack() as stack:
        runs = []
        for rank, scene in enumerate(scenes):
            with _as_rank(rank):
                attached = fp8dbg.attach(scene.model, path, optimizer=scene.optimizer, every=EVERY)
            runs.append(stack.enter_context(attached))
        for step in range(steps):
            if step == fault.onset:
                fault.plant(scenes[1], case)
            losses = [scene.backward() for scene in scenes]
            _reduce(scenes)
            for run, scene, loss in zip(runs, scenes, losses, strict=True):
                run.log(loss=loss)
                scene.update()
    return path


@torch.no_grad()
def _reduce(scenes: list[Scene]) -> None:
    for one, other in zip(*(scene.model.parameters() for scene in scenes), strict=True):
        if one.grad is not None and other.grad is not None:
            mean = (one.grad + other.grad) / 2
            one.grad.copy_(mean)
            other.grad.copy_(mean)
    left_out = scenes[0].not_reduced | scenes[1].not_reduced
    for (name, one), other in zip(scenes[0].model.named_buffers(), scenes[1].model.buffers(), strict=True):
        layer, _, buffer = name.rpartition(".")
        if buffer == "fp8_amax_history" and layer not in left_out:
            newest = torch.maximum(one[:2, 0], other[:2, 0])  # input and weight; the gradient's is used up by now
            one[:2, 0], other[:2, 0] = newest, newest


@contextmanager
def _as_rank(rank: int) -> Iterator[None]:
    before = os.environ.get("RANK")
    os.environ["RANK"] = str(rank)
    try:
        yield
    finally:
        if before is None:
            del os.environ["RANK"]
        else:
            os.environ["RANK"] = before
