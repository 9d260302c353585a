"""The reference adapter: figures against ones computed on the side, scales in force, fallback plans, discovery."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8dbg
from fp8dbg import hooks
from fp8dbg.analysis.plan import Plan, PlanEntry
from fp8dbg.analysis.run import open_run
from fp8dbg.errors import UnknownNameError
from fp8dbg.hooks import pytorch
from fp8dbg.numerics.measurement import measure_results
from fp8dbg.numerics.recipes import DelayedState, recipe_named
from fp8dbg.numerics.simulated import SimulatedLinear
from fp8dbg.recording.layer import Layer
from tests.nets import Case, Net, build, loss_of, table, train

KEYS = {"step", "microbatch", "call", "rank", "layer", "tensor", "host", "what_if", "scale_source", "histogram"}


class Spied:
    """One linear layer trained for some steps, with every tensor of every step put aside."""

    def __init__(self, run_dir: Path, recipe: str | None = None, steps: int = 4, **options: Any) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 48)
        if recipe:
            fp8dbg.simulate(self.layer, recipe)
        self.tensors: list[dict[str, Tensor]] = []
        self.scales: list[dict[str, float]] = []
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        with fp8dbg.attach(self.layer, run_dir, every=1, **options):
            for step in range(steps):
                self._step(step)
                optimizer.step()
                optimizer.zero_grad()

    def _step(self, step: int) -> None:
        x = (torch.randn(2, 20, 64) * (1 + step)).bfloat16().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layer(x)
        grad = torch.randn(y.shape).bfloat16() * 1e-3
        seen = {"input": x.detach(), "weight": self.layer.weight.detach().bfloat16(), "output": y.detach()}
        seen["grad_output"] = grad
        if isinstance(self.layer, SimulatedLinear):
            self.scales.append({r: float(self.layer.fp8_scale(r)[0] or 0) for r in ("input", "weight", "grad_output")})
        y.backward(grad)
        assert x.grad is not None
        assert self.layer.weight.grad is not None
        self.tensors.append(seen | {"grad_input": x.grad, "grad_weight": self.layer.weight.grad.bfloat16()})


def _figures(run_dir: Path, condition: str) -> dict[tuple[int, str], dict[str, Any]]:
    rows = table(run_dir, f"select * exclude (histogram) from tensors where {condition}")
    return {(row["step"], row["tensor"]): row for row in rows}


def _assert_same_figures(row: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if name not in KEYS | {"shape"}:
            assert row[name] == value, name


def test_a_bf16_layer_is_compared_with_what_the_recipe_would_have_done(tmp_path: Path) -> None:
    """Every figure of every operand is fp8dbg.measure's, under the scale that delayed scaling would have by then."""
    run = Spied(tmp_path, recipe=None)
    found = _figures(tmp_path, "what_if = 'delayed'")
    for role in ("input", "weight", "grad_output"):
        state = DelayedState(recipe_named("delayed"), role)
        for step, tensors in enumerate(run.tensors):
            row = found[step, role]
            _assert_same_figures(
                row, fp8dbg.measure(tensors[role], recipe="delayed", scale=state.scale, role=role).row()
            )
            assert row["scale_source"] == ("initial" if step == 0 else "emulated")
            assert (row["host"], row["recipe"]) == ("pytorch", "delayed")
            state.update(tensors[role].abs().max().item())


def test_results_have_statistics_and_no_recipe(tmp_path: Path) -> None:
    """output, grad_input and grad_weight, as the GEMMs made them."""
    run = Spied(tmp_path)
    found = _figures(tmp_path, "recipe is null")
    assert len(found) == 12
    for (step, role), row in found.items():
        _assert_same_figures(row, measure_results(run.tensors[step][role]).row())
        assert (row["what_if"], row["scale"], row["format"]) == (None, None, None)


def test_the_scales_in_force_of_a_simulated_layer_are_recorded(tmp_path: Path) -> None:
    """Delayed scaling's own, read live, on every step and beside the figures taken under them."""
    run = Spied(tmp_path, recipe="delayed:history=2")
    found = _figures(tmp_path, "recipe is not null")
    amaxes = {(r["step"], r["tensor"]): r for r in table(tmp_path, "select * from amax")}
    for step, scales in enumerate(run.scales):
        for role, scale in scales.items():
            row = found[step, role]
            assert row["scale"] == amaxes[step, role]["scale"] == scale
            assert row["scale_source"] == ("initial" if step == 0 else "live")
            assert (row["host"], row["recipe"], row["what_if"]) == ("simulated", "delayed:history=2", None)
            expected = fp8dbg.measure(run.tensors[step][role], recipe="delayed:history=2", scale=scale, role=role)
            _assert_same_figures(row, expected.row())


@pytest.mark.parametrize("recipe", ["delayed:history=2", "current", "mxfp8", "block", "rowwise", "tensorwise"])
def test_a_simulated_layer_leaves_nothing_unexplained_but_rounding(recipe: str, tmp_path: Path) -> None:
    """The real output equals the emulated one to a BF16 rounding: the casts assumed are the casts made."""
    Spied(tmp_path, recipe=recipe, steps=3, rows=1000)
    rows = table(tmp_path, "select gemm, rel_l2, error_unexplained, rows_measured from gemms where step > 0")
    assert len(rows) == 6
    for row in rows:
        assert 0.005 < row["rel_l2"] < 0.2
        assert row["error_unexplained"] < 0.004
    assert {row["gemm"]: row["rows_measured"] for row in rows} == {"fprop": 40, "dgrad": 40, "wgrad": 64}


def test_a_bias_that_hides_the_product_is_no_error_of_fp8(tmp_path: Path) -> None:
    """What counts is the difference from the BF16 layer's output, whose bias is rounded to BF16 too."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 48)
    nn.init.constant_(layer.bias, 1000.3)  # 1000 in BF16, whose step is 4 there
    with torch.no_grad():
        layer.bias[24:] = 3.003  # 3 in BF16, whose step is 2^-6 there
    fp8dbg.simulate(layer, "current")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    x = torch.randn(40, 64).bfloat16()
    with fp8dbg.attach(layer, tmp_path, optimizer, every=1, rows=40), torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        y.backward(torch.ones_like(y))
        optimizer.step()
    weight, bias = layer.weight.detach().bfloat16(), layer.bias.detach().bfloat16()
    exact = x.double() @ weight.double().t()
    difference = y.detach().double() - (exact + bias.double()).bfloat16().double()
    (row,) = table(tmp_path, "select * from gemms where gemm = 'fprop'")
    assert row["mse"] == pytest.approx(float(difference.square().mean()), rel=1e-3)
    assert row["rel_l2"] == pytest.approx(float(difference.norm() / exact.norm()), rel=1e-3)
    assert row["impact"] == pytest.approx(float(difference.sum()), abs=1e-3)
    assert row["error_unexplained"] < 0.01


def test_gemms_are_those_of_the_layer(tmp_path: Path) -> None:
    """Sizes, blame, and what the error does to the loss: to first order, the sum of gradient times error."""
    run = Spied(tmp_path, steps=2, rows=1000)
    rows = {r["gemm"]: r for r in table(tmp_path, "select * from gemms where step = 1")}
    assert {g: (r["m"], r["n"], r["k"]) for g, r in rows.items()} == {
        "fprop": (40, 48, 64),
        "dgrad": (40, 64, 48),
        "wgrad": (64, 48, 40),
    }
    seen = run.tensors[1]
    x, w, g = (seen[role].double().flatten(0, -2) for role in ("input", "weight", "grad_output"))
    scales = {
        role: table(tmp_path, f"select scale from amax where step = 1 and tensor = '{role}'")[0]["scale"]
        for role in ("input", "weight")
    }
    fmt = recipe_named("delayed").format("input")
    x_q, w_q = (
        torch.from_numpy(fmt.round((t * scales[r]).float().numpy())) / scales[r]
        for t, r in ((x, "input"), (w, "weight"))
    )
    error = x_q @ w_q.t() - x @ w.t()
    assert rows["fprop"]["impact"] == pytest.approx((g * error).sum().item(), rel=2e-2)
    assert rows["fprop"]["sensitivity"] == pytest.approx(((g * error).sum(1) ** 2).sum().item(), rel=2e-2)
    assert rows["fprop"]["rel_l2"] == pytest.approx((error.norm() / (x @ w.t()).norm()).item(), rel=1e-2)
    assert rows["fprop"]["error_unexplained"] is None


def test_sampled_rows_are_drawn_afresh_and_repeatably(tmp_path: Path) -> None:
    """Other rows on other steps, the same rows in the same run again."""
    query = "select step, gemm, rel_l2 from gemms where layer = 'head' order by all"
    runs = []
    for name in ("a", "b"):
        train(Case(), steps=3, run_dir=tmp_path / name, every=1, rows=2)
        runs.append(table(tmp_path / name, query))
    assert runs[0] == runs[1]
    assert len({row["rel_l2"] for row in runs[0]}) == len(runs[0])


def test_other_recipes_are_measured_beside_the_main_one(tmp_path: Path) -> None:
    """what_if= adds rows for every operand; delayed ones keep a state of their own; repeats are left out."""
    train(Case(), steps=3, run_dir=tmp_path, every=2, what_if=["mxfp8", "delayed:history=2", "delayed"])
    rows = table(
        tmp_path, "select what_if, recipe, count(*) as n from tensors where layer = 'head' group by all order by all"
    )
    whats = [(r["what_if"], r["recipe"], r["n"]) for r in rows if r["what_if"]]
    assert whats == [("delayed", "delayed", 6), ("delayed:history=2", "delayed:history=2", 6), ("mxfp8", "mxfp8", 6)]


def test_what_if_of_an_fp8_layer_leaves_out_what_is_in_force(tmp_path: Path) -> None:
    """The recipe in force is no what-if."""
    train(Case(recipe="current"), steps=1, run_dir=tmp_path, every=1, what_if=["current", "mxfp8"])
    rows = table(tmp_path, "select distinct recipe, what_if from tensors where recipe is not null order by all")
    assert rows == [{"recipe": "current", "what_if": None}, {"recipe": "mxfp8", "what_if": "mxfp8"}]


@pytest.mark.parametrize(("histogram", "codes"), [("binade", False), ("codes", True), (None, None)])
def test_histograms_come_in_the_kind_asked_for(histogram: Any, codes: bool | None, tmp_path: Path) -> None:
    """Per power of two, per 16-bit code, or not at all; the counts are the tensor's."""
    train(Case(), steps=1, run_dir=tmp_path, every=1, histogram=histogram, layers="head")
    query = "select numel - zeros as n, zeros, histogram from tensors where tensor = 'input'"
    (row,) = table(tmp_path, query)
    if codes is None:
        assert row["histogram"] is None
    else:
        assert (row["histogram"]["codes"] is not None) is codes
        assert sum(row["histogram"]["counts"]) == row["n"] + (row["zeros"] if codes else 0)


def test_gemms_kept_in_bf16_are_not_compared(tmp_path: Path) -> None:
    """Of an FP8 layer with a fallback; an operand that no GEMM reads quantised is a what-if."""
    case = Case()
    model, (optimizer,) = build(case)
    fp8dbg.simulate(model, "current", ["head:dgrad", "head:wgrad", "blocks.0.up"])
    with fp8dbg.attach(model, tmp_path, every=1):
        loss_of(case, model).backward()
        optimizer.step()
    gemms = table(
        tmp_path, "select layer, gemm, host, recipe from gemms where layer in ('head', 'blocks.0.up') order by all"
    )
    assert [(r["layer"], r["gemm"], r["recipe"]) for r in gemms] == [
        ("blocks.0.up", "fprop", "delayed"),
        ("blocks.0.up", "wgrad", "delayed"),
        ("head", "fprop", "current"),
    ]
    tensors = table(
        tmp_path, "select tensor, what_if from tensors where layer = 'head' and recipe is not null order by tensor"
    )
    assert [(r["tensor"], r["what_if"]) for r in tensors] == [
        ("grad_output", "current"),
        ("input", None),
        ("weight", None),
    ]


def test_a_plan_applied_to_a_live_model_shows_in_the_run(tmp_path: Path) -> None:
    """Without attaching again; plain layers stay as they are, with a sentence if that is not what the plan says."""
    case = Case(recipe="current")
    model, (optimizer,) = build(case)
    assert isinstance(model, Net)
    model.head = nn.Linear(16, 8)
    plan = Plan((PlanEntry("blocks.0.up", ("fprop", "dgrad", "wgrad")), PlanEntry("head", ("fprop",), "mxfp8")))
    with fp8dbg.attach(model, tmp_path, every=1):
        for step in range(2):
            loss_of(case, model).backward()
            optimizer.step()
            if step == 0:
                said = fp8dbg.apply_fallback(model, plan)
    assert said == ["head is a plain nn.Linear: it stays in high precision. Use fp8dbg.simulate(...)."]
    rows = table(
        tmp_path, "select step, what_if from tensors where layer = 'blocks.0.up' and tensor = 'input' order by step"
    )
    assert rows == [{"step": 0, "what_if": None}, {"step": 1, "what_if": "delayed"}]


def _kept_in_bf16(model: nn.Module, layer: str) -> set[str]:
    module = model.get_submodule(layer)
    assert isinstance(module, SimulatedLinear)
    return module.fp8_fallback


def test_a_plan_for_a_layer_that_does_not_exist_changes_nothing() -> None:
    """The error lists the layers."""
    model = fp8dbg.simulate(Net(), "current")
    plan = Plan((PlanEntry("blocks.0.up", ("fprop",)), PlanEntry("blocks.7.up", ("fprop",))))
    for apply in (fp8dbg.apply_fallback, pytorch.apply_fallback):
        with pytest.raises(UnknownNameError, match=r"blocks\.7\.up"):
            apply(model, plan)
    assert _kept_in_bf16(model, "blocks.0.up") == set()


def test_a_written_plan_is_python_that_applies_it() -> None:
    """The text runs, and gives the model the plan's recipes."""
    plan = Plan(
        (PlanEntry("head", ("dgrad",), "bf16", "Gradients\nunderflow."), PlanEntry("blocks.0.up", ("fprop", "wgrad")))
    )
    model = Net()
    exec(pytorch.write_fallback(plan), {"model": model})
    assert _kept_in_bf16(model, "head") == {"dgrad"}
    assert _kept_in_bf16(model, "blocks.0.up") == {"fprop", "wgrad"}


def test_adapters_are_found_and_the_general_one_is_asked_last() -> None:
    """A file with ``claims`` is an adapter; each has all that the contract names."""
    found = hooks.adapters()
    assert found[-1].HOST == "pytorch"
    for adapter in found:
        assert all(hasattr(adapter, name) for name in ("HOST", "claims", "attach", "apply_fallback", "write_fallback"))
        assert hooks.adapter(adapter.HOST) is adapter
    with pytest.raises(UnknownNameError, match="pytorch"):
        hooks.adapter("jax")


def test_an_adapter_can_bring_calls_and_gradients_itself(tmp_path: Path) -> None:
    """Several layers in one module, operands that only the adapter knows: watch.forward and call.gradient."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = x @ weight.t()
            return x

    model = Fused()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp8dbg.attach(model, tmp_path, every=1) as run:
        first, second = (run.recorder.watch(Layer(name, model)) for name in ("first", "second"))

        def hook(module: Any, args: tuple[Tensor], output: Any) -> None:
            first.forward(args[0], None, module.weights[0])
            call = second.forward(None, output.detach(), module.weights[1])
            assert call is not None
            output.register_hook(lambda grad: call.gradient((grad,)))

        handle = model.register_forward_hook(hook)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        handle.remove()
    rows = table(tmp_path, "select layer, tensor from amax order by all")
    assert [tuple(row.values()) for row in rows] == [
        ("first", "input"),
        ("first", "weight"),
        ("second", "grad_output"),
        ("second", "weight"),
    ]


class Otherwise(nn.Module):
    """Layers that are announced in another order than they are called in, and two that are not called."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)
        self.up = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.unused = nn.Linear(8, 8)
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            block = nn.Sequential(up, nn.SiLU(), down)
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def not_a_number(module: nn.Module, grads: Any) -> Any:
    """A backward pre-hook that makes NaN of a module's gradient."""
    return tuple(torch.full_like(grad, math.nan) for grad in grads)


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("every", [0, 1])
def test_layers_are_listed_in_the_order_of_execution(tmp_path: Path, every: int, reentrant: bool | None) -> None:
    """Whatever the order they are announced in, so that the first NaN of a step is the one that came first."""
    torch.manual_seed(0)
    model = Otherwise(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp8dbg.attach(model, tmp_path, optimizer, every=every):
        for step in range(2):
            if step == 1:
                model.up[1].register_full_backward_pre_hook(not_a_number)
            model(torch.randn(4, 8, requires_grad=True)).sum().backward()
            optimizer.step()
    run = open_run(tmp_path)
    names = [entry["layer"] for entry in run.meta["layers"]]
    assert names == ["spare", "up.0", "down.0", "up.1", "unused", "down.1"]
    assert [f.layer for f in run.findings() if f.code == "non_finite"] == ["up.1"]


def test_layers_are_described_in_run_json(tmp_path: Path) -> None:
    """Name, path, type, host, shape and recipe of each; and how many were seen."""
    from fp8dbg.runs.folder import open_folder

    train(Case(lambda: nn.Sequential(Net())), steps=1, run_dir=tmp_path)
    meta = open_folder(tmp_path).meta
    assert meta["layers"][-1] == {
        "layer": "0.head",
        "module": "0.head",
        "host": "pytorch",
        "type": "Linear",
        "shape": [8, 16],
        "recipe": None,
        "bf16_gemms": ["fprop", "dgrad", "wgrad"],
    }
    assert meta["coverage"] == {"layers": 5, "seen": 5, "unseen": []}
    assert meta["optimizers"] == ["AdamW"]
    assert meta["recipe"]["name"] == "delayed"
