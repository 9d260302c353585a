"""Linears of te.ops, recorded while their fuser trains them on a CPU, against the casts that were really made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8dbg
from fp8dbg.hooks import nvidia_te_fuser as fuser
from fp8dbg.hooks import nvidia_te_ops
from tests.hosts import te_cpu, te_nets
from tests.hosts.runs import Figures, figures, owner_of, rows
from tests.hosts.te_cpu.enums import torch_dtype
from tests.hosts.te_cpu.quantizers import Cast
from tests.hosts.test_fallback_text import Entry, Plan

LAYERS = ("0", "1.1", "1.3", "2")
FUSED = {("1.1", "input"), ("1.3", "input"), ("1.1", "grad_output")}
"""What the norm, GELU, and the fused gradients of GELU and of the bias before it, cast themselves."""

Seen = dict[tuple[str, str], list[tuple[bool, Figures]]]
"""Layer and operand -> figures of each cast, and whether it was made while a forward was run again."""


@pytest.fixture
def ops(te: Any) -> Any:
    """``transformer_engine.pytorch.ops``."""
    return pytest.importorskip("transformer_engine.pytorch.ops")


def need_recipe(recipe: str | None) -> None:
    """Skip what the fuser of this version refuses."""
    if recipe == "block" and te_cpu.te_version() < (2, 9):
        pytest.skip("te.ops knows no block scaling before Transformer Engine 2.9")


def net(ops: Any, seed: int = 0) -> nn.Sequential:
    """A linear with a bias; a norm, a linear, GELU and a linear without bias in one fuser; a BasicLinear."""
    torch.manual_seed(seed)
    bf16: dict[str, Any] = {"dtype": torch.bfloat16}
    mlp = ops.Sequential(
        ops.LayerNorm(128, **bf16), ops.Linear(128, 256, **bf16), ops.GELU(), ops.Linear(256, 128, bias=False, **bf16)
    )
    return nn.Sequential(ops.Linear(128, 128, **bf16), mlp, ops.BasicLinear(128, 128, **bf16))


def train(
    te: Any, model: nn.Module, recipe: str | None, forward: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """As ``te_nets.train_spread``; in BF16 if there is no recipe."""
    fp8_recipe = te_nets.recipe(recipe) if recipe is not None else None
    return te_nets.train_spread(model, lambda: te_nets.autocast(te, fp8_recipe, fp8_recipe is not None), forward)


@contextmanager
def spying(model: nn.Module) -> Iterator[Seen]:
    """The casts made, by layer and operand."""
    seen: Seen = {}

    def observer(cast: Cast) -> None:
        key = owner_of(model, cast)
        again = key[1] != "grad_output" and torch._C._current_graph_task_id() != -1
        made = Figures.of(cast.dense, cast.data, torch_dtype(cast.quantizer.dtype), cast.scale)
        seen.setdefault(key, []).append((again, made))

    te_cpu.OBSERVERS.append(observer)
    try:
        yield seen
    finally:
        te_cpu.OBSERVERS.remove(observer)


def as_recorded(seen: Seen, again: bool = False) -> dict[tuple[str, str], list[Figures]]:
    """The casts of one of the two passes; a weight is recorded once a step and cast in each microbatch."""
    kept = {
        key: [f for redone, f in made if redone == (again and key[1] != "grad_output")] for key, made in seen.items()
    }
    return {key: made[::2] if key[1] == "weight" else made for key, made in kept.items()}


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_figures_are_those_of_the_bytes(te: Any, ops: Any, tmp_path: Path, recipe: str) -> None:
    """Every amax, scale, underflow, saturation and at_max equals the intercepted cast's, bit for bit."""
    model = net(ops)
    with fp8dbg.attach(model, tmp_path, every=1), spying(model) as seen:
        train(te, model, recipe)
    assert len(seen) == 4 * 3
    assert figures(tmp_path) == as_recorded(seen)


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_block_figures_are_those_of_the_bytes(te: Any, ops: Any, tmp_path: Path, recipe: str) -> None:
    """Underflow, at_max and amax equal those of the bytes along rows."""
    need_recipe(recipe)
    model = net(ops)
    with fp8dbg.attach(model, tmp_path, every=1), spying(model) as seen:
        train(te, model, recipe)
    recorded = figures(tmp_path)
    for key, casts in as_recorded(seen).items():
        found = [(f.amax, f.underflow, f.at_max) for f in recorded[key]]
        assert found == [(f.amax, f.underflow, f.at_max) for f in casts], key


@pytest.mark.parametrize("recipe", [*te_nets.RECIPES, None])
def test_training_is_bit_identical_and_each_call_is_one_row(
    te: Any, ops: Any, tmp_path: Path, recipe: str | None
) -> None:
    """Same losses and weights with and without fp8dbg; one amax row per layer, visible operand and microbatch."""
    need_recipe(recipe)
    bare = train(te, net(ops), recipe)
    model = net(ops)
    with fp8dbg.attach(model, tmp_path, every=1):
        watched = train(te, model, recipe)
    assert all(map(torch.equal, bare, watched))
    counts = rows(tmp_path, "select layer, tensor, count(*) as n from amax group by all")
    assert {row["n"] for row in counts} == {3 * 2}
    every = {(layer, role) for layer in LAYERS for role in ("input", "weight", "grad_output")}
    assert {(row["layer"], row["tensor"]) for row in counts} == every
    told = rows(tmp_path, "select kind, layer, detail from events")
    assert {row["kind"] for row in told} <= {"gap"}
    assert all("computed once more on measured steps" in row["detail"] for row in told)
    named = {(row["layer"], row["detail"].split()[1]) for row in told}
    assert named <= (FUSED if recipe is not None else set())
    assert recipe is None or len(named) == len(told) >= 2  # not every norm casts to blocks itself


def test_what_is_computed_again_is_so_on_measured_steps_alone(te: Any, ops: Any, tmp_path: Path) -> None:
    """With every=2, what operations cast themselves has amaxes on steps 0 and 2, all else on 0 to 2; same training."""
    bare = train(te, net(ops), "delayed")
    model = net(ops)
    with fp8dbg.attach(model, tmp_path, every=2):
        watched = train(te, model, "delayed")
    assert all(map(torch.equal, bare, watched))
    found = rows(tmp_path, "select layer, tensor, list_sort(list(distinct step)) as steps from amax group by all")
    assert len(found) == 4 * 3
    for row in found:
        assert row["steps"] == ([0, 2] if (row["layer"], row["tensor"]) in FUSED else [0, 1, 2]), row


@pytest.mark.parametrize("activation", ["ReLU", "SwiGLU"])
def test_what_an_activation_casts_is_recorded(te: Any, ops: Any, tmp_path: Path, activation: str) -> None:
    """Without a bias the activation's own backward casts the gradient: its figures, too, are those of the bytes."""
    torch.manual_seed(0)
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "bias": False}
    inner = 128 if activation == "SwiGLU" else 256
    block = ops.Sequential(ops.Linear(128, 256, **bf16), getattr(ops, activation)(), ops.Linear(inner, 128, **bf16))
    seen = trained_once(te, block, "current", tmp_path, te_nets.batch(0).requires_grad_())
    assert len(seen) == 2 * 3
    assert figures(tmp_path) == as_recorded(seen)
    told = rows(tmp_path, "select layer, detail from events")
    assert {(row["layer"], row["detail"].split()[1]) for row in told} == {("0", "grad_output"), ("2", "input")}
    assert all(f"inside {activation}" in row["detail"] for row in told)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_checkpointing_counts_nothing_twice(te: Any, ops: Any, tmp_path: Path, recipe: str, reentrant: bool) -> None:
    """Checkpointing of either kind: one row per call, of the first pass or, where that has no graph, the second."""
    fp8_recipe = te_nets.recipe(recipe)

    def in_fp8(x: Tensor) -> Tensor:
        with te_nets.autocast(te, fp8_recipe):  # te.checkpoint does not know these modules: it would not enter it again
            return model(x)  # type: ignore[no-any-return]

    def forward(x: Tensor) -> Tensor:
        return checkpoint(in_fp8, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    model = net(ops)
    bare = train(te, model, recipe, forward)
    model = net(ops)
    with fp8dbg.attach(model, tmp_path, every=1), spying(model) as seen:
        watched = train(te, model, recipe, forward)
    assert all(map(torch.equal, bare, watched))
    assert figures(tmp_path) == as_recorded(seen, again=reentrant)


def test_real_gemms_are_compared_with_the_shadow(te: Any, ops: Any, tmp_path: Path) -> None:
    """Healthy FP8 errors, nothing unexplained beyond the rounding of a BF16 result; and what is compared."""
    model = net(ops)
    with fp8dbg.attach(model, tmp_path, every=1):
        train(te, model, "current")
    found = rows(tmp_path, "select layer, gemm, rel_l2, error_unexplained as rest from gemms")
    every = {(layer, gemm) for layer in LAYERS for gemm in ("fprop", "dgrad", "wgrad")}
    assert {(row["layer"], row["gemm"]) for row in found} == every
    for row in found:
        assert 0.01 < row["rel_l2"] < 0.12
        assert row["rest"] < 0.004


def test_results_are_those_of_the_parameters(te: Any, ops: Any, tmp_path: Path) -> None:
    """The grad_weight that is recorded of each layer is its own weight's gradient: same size, same amax."""
    model = net(ops)
    with fp8dbg.attach(model, tmp_path, every=1):
        with te_nets.autocast(te, te_nets.recipe("current")):
            y = model(te_nets.batch(0))
        y.float().pow(2).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    weights = {layer: fuser.basic_linear(model.get_submodule(layer)) for layer in LAYERS}
    gradients = {layer: op.weight.grad for layer, op in weights.items() if op is not None}
    expected = {n: (g.numel(), float(g.float().abs().max())) for n, g in gradients.items() if isinstance(g, Tensor)}
    assert len(expected) == 4
    found = rows(tmp_path, "select layer, numel, amax from tensors where tensor = 'grad_weight'")
    assert {row["layer"]: (row["numel"], row["amax"]) for row in found} == expected


def test_evaluation_is_not_recorded_and_a_frozen_layer_is(te: Any, ops: Any, tmp_path: Path) -> None:
    """No row of a pass without gradients; a frozen layer in front of a trained one has input and weight."""
    model = net(ops)
    model[0].requires_grad_(False)
    with fp8dbg.attach(model, tmp_path, every=1), te_nets.autocast(te, te_nets.recipe("current")):
        with torch.no_grad():
            model(te_nets.batch(0))
        model(te_nets.batch(1)).float().sum().backward()
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    found = rows(tmp_path, "select layer, tensor, count(*) as n from amax group by all")
    assert {row["n"] for row in found} == {1}
    assert {row["tensor"] for row in found if row["layer"] == "0"} == {"input", "weight"}


def trained_once(te: Any, block: Any, recipe: str, path: Path, *inputs: Tensor) -> Seen:
    """The casts of one recorded step."""
    with fp8dbg.attach(block, path, every=1), spying(block) as seen:
        with te_nets.autocast(te, te_nets.recipe(recipe)):
            y = block(*inputs)
        y.float().pow(2).sum().backward()
        torch.optim.SGD(block.parameters(), lr=0.1).step()
    return seen


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_norm_reads_its_input_in_its_own_dtype(te: Any, ops: Any, tmp_path: Path, kind: str, recipe: str) -> None:
    """A float32 input of three dimensions is rounded to BF16 before a norm with a gamma around zero is computed."""
    torch.manual_seed(0)
    bf16: dict[str, Any] = {"dtype": torch.bfloat16}
    block = ops.Sequential(getattr(ops, kind)(128, zero_centered_gamma=True, **bf16), ops.Linear(128, 128, **bf16))
    torch.nn.init.normal_(block[0].weight, std=0.3)
    x = torch.randn(4, 16, 128, generator=torch.Generator().manual_seed(0))
    seen = trained_once(te, block, recipe, tmp_path, x.requires_grad_())
    assert figures(tmp_path) == as_recorded(seen)


def test_a_residual_is_added_inside_a_fusion_and_that_is_said(te: Any, ops: Any, tmp_path: Path) -> None:
    """A linear whose GEMM adds to another tensor: its own result is not compared, that of its backward is."""
    torch.manual_seed(0)
    block = ops.Sequential(ops.Linear(128, 128, bias=False, dtype=torch.bfloat16), ops.AddExtraInput(in_place=True))
    x, residual = te_nets.batch(0).requires_grad_(), te_nets.batch(1).requires_grad_() * 2
    seen = trained_once(te, block, "current", tmp_path, x, residual)
    assert figures(tmp_path) == as_recorded(seen)
    found = {row["gemm"]: row["rest"] for row in rows(tmp_path, "select gemm, error_unexplained as rest from gemms")}
    assert found["fprop"] is None
    assert found["dgrad"] < 0.004
    assert found["wgrad"] < 0.004
    told = rows(tmp_path, "select kind, detail from events")
    assert [row["kind"] for row in told] == ["gap"]
    assert "ForwardLinearBiasAdd" in told[0]["detail"]


def test_a_scaled_output_scales_the_backward_gemms_and_that_is_said(te: Any, ops: Any, tmp_path: Path) -> None:
    """A constant factor behind a linear goes into its backward GEMMs: their results are not compared."""
    torch.manual_seed(0)
    block = ops.Sequential(ops.Linear(128, 128, bias=False, dtype=torch.bfloat16), ops.ConstantScale(0.5))
    seen = trained_once(te, block, "current", tmp_path, te_nets.batch(0).requires_grad_())
    assert figures(tmp_path) == as_recorded(seen)
    found = {row["gemm"]: row["rest"] for row in rows(tmp_path, "select gemm, error_unexplained as rest from gemms")}
    assert found["fprop"] < 0.004
    assert (found["dgrad"], found["wgrad"]) == (None, None)
    assert ["BackwardLinearScale" in row["detail"] for row in rows(tmp_path, "select detail from events")] == [True]


def test_an_input_used_twice_has_its_gradients_added_inside_a_fusion(te: Any, ops: Any, tmp_path: Path) -> None:
    """The dgrad GEMM adds to another gradient: wgrad is compared with its real result, dgrad is not."""
    torch.manual_seed(0)
    block = ops.Sequential(ops.MakeExtraOutput(in_place=True), ops.Linear(128, 128, bias=False, dtype=torch.bfloat16))
    with fp8dbg.attach(block, tmp_path, every=1), spying(block) as seen:
        with te_nets.autocast(te, te_nets.recipe("current")):
            y, x = block(te_nets.batch(0).requires_grad_())
        (y.float().pow(2).sum() + x.float().pow(3).sum()).backward()
        torch.optim.SGD(block.parameters(), lr=0.1).step()
    assert figures(tmp_path) == as_recorded(seen)
    found = {row["gemm"]: row["rest"] for row in rows(tmp_path, "select gemm, error_unexplained as rest from gemms")}
    assert found["wgrad"] < 0.004
    assert found["dgrad"] is None


def test_what_one_gemm_hands_another_in_fp8_is_said_to_be_unseen(te: Any, ops: Any, tmp_path: Path) -> None:
    """Two linears in a row under delayed scaling: their GEMMs cast what they hand each other."""
    torch.manual_seed(0)
    block = ops.Sequential(*(ops.Linear(128, 128, bias=False, dtype=torch.bfloat16) for _ in range(2)))
    seen = as_recorded(trained_once(te, block, "delayed", tmp_path, te_nets.batch(0)))
    hidden = {("1", "input"), ("0", "grad_output")}
    assert figures(tmp_path) == {key: made for key, made in seen.items() if key not in hidden}
    told = {(row["layer"], row["detail"].split()[1]) for row in rows(tmp_path, "select layer, detail from events")}
    assert told == {("0", "output"), ("1", "input"), ("0", "grad_output")}


def test_a_grouped_linear_is_said_to_be_unseen(te: Any, ops: Any, tmp_path: Path) -> None:
    """The fuser's experts are not recorded: one event names the layer."""
    if not hasattr(ops, "GroupedLinear"):
        pytest.skip("te.ops has no GroupedLinear in this version")
    model = nn.Sequential(ops.GroupedLinear(2, 64, 64, dtype=torch.bfloat16))
    fp8dbg.attach(model, tmp_path).close()
    told = rows(tmp_path, "select kind, layer, detail from events")
    assert [(row["kind"], row["layer"]) for row in told if "te.ops" in row["detail"]] == [("gap", "0")]


def test_detaching_puts_every_method_back(te: Any, ops: Any, tmp_path: Path) -> None:
    """Transformer Engine's classes hold their own methods again after the last of two sessions, and not before."""

    def methods() -> list[Any]:
        names = ("pre_fuser_forward", "fuser_forward", "fuser_backward")
        base = __import__("transformer_engine.pytorch.ops.op", fromlist=["op"])
        kinds = (base.BasicOperation, ops.BasicLinear, *fuser._kinds_of(base.FusedOperation))
        return [vars(kind).get(name) for kind in kinds for name in names]

    before, models = methods(), [net(ops), net(ops)]
    first = fp8dbg.attach(models[0], tmp_path / "first")
    second = fp8dbg.attach(models[1], tmp_path / "second")
    assert methods() != before
    first.close()
    first.close()
    assert methods() != before
    second.close()
    assert methods() == before
    assert fuser._listeners == {}


@pytest.mark.parametrize(("place", "layers"), [(nvidia_te_ops, {"1.1", "1.3"}), (fuser, set(LAYERS))])
def test_a_fault_of_ours_never_reaches_training(
    te: Any, ops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: ModuleType, layers: set[str]
) -> None:
    """What fails inside the fuser's run is switched off, events name the layers, training is as without."""
    bare = train(te, net(ops), "current")

    def broken(*_: Any) -> None:
        raise RuntimeError("a layout that is not known")

    monkeypatch.setattr(place, "_before_cast" if place is nvidia_te_ops else "_places", broken)
    model = net(ops)
    with fp8dbg.attach(model, tmp_path, every=1):
        assert all(map(torch.equal, bare, train(te, model, "current")))
    told = {row["layer"] for row in rows(tmp_path, "select layer from events where kind = 'error'")}
    assert told == layers


def test_a_plan_for_a_fused_operation_is_said_not_to_fit(te: Any, ops: Any) -> None:
    """The fuser's autocast decides for all it runs: the layer is left as it is, and a sentence says so."""
    said = fp8dbg.apply_fallback(net(ops), Plan((Entry("1.1"),)))
    assert len(said) == 1
    assert said[0].startswith("1.1: one autocast decides")
