"""Which calls are recorded: each once, under every way of training, and no evaluation among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dbg
from tests.nets import CASES, CLASSES, WIDTH, Case, Net, attached, build, loss_of, table, train

LAYERS = ["blocks.0.down", "blocks.0.up", "blocks.1.down", "blocks.1.up", "head"]
OPERANDS, RESULTS = ["grad_output", "input", "weight"], ["grad_input", "grad_weight", "output"]


def _layers(name: str) -> list[str]:
    return LAYERS[:2] + LAYERS[4:] if name == "shared module" else LAYERS


@pytest.mark.parametrize("name", CASES)
def test_every_operand_has_one_amax_a_microbatch(name: str, tmp_path: Path) -> None:
    """No call is missed and none is counted twice, whatever is recomputed."""
    train(CASES[name], steps=2, run_dir=tmp_path, every=0)
    rows = table(tmp_path, "select step, microbatch, layer, tensor from amax order by all")
    expected = [
        {"step": step, "microbatch": microbatch, "layer": layer, "tensor": tensor}
        for step in range(2)
        for microbatch in range(CASES[name].microbatches)
        for layer in _layers(name)
        for tensor in OPERANDS
    ]
    assert rows == expected


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_and_gemm_of_a_measured_step_has_one_row_a_call(name: str, tmp_path: Path) -> None:
    """Operands, results and GEMMs of each call; the weight once a step; no dgrad where the input wants no gradient."""
    case = CASES[name]
    train(case, steps=1, run_dir=tmp_path, every=1)
    rows = table(tmp_path, "select tensor, layer, count(*) as n from tensors group by all")
    found = {(row["layer"], row["tensor"]): row["n"] for row in rows}
    for layer in _layers(name):
        calls = case.microbatches * (2 if name == "shared module" and layer != "head" else 1)
        first = layer == "blocks.0.up" and not case.gradients
        for tensor in OPERANDS + RESULTS:
            expected = 1 if tensor == "weight" else calls
            if first and tensor == "grad_input":
                expected = case.microbatches if name == "shared module" else 0
            assert found.get((layer, tensor), 0) == expected, (layer, tensor)
    keys = "step, microbatch, call, layer, tensor, what_if"
    assert not table(tmp_path, f"select {keys} from tensors group by all having count(*) > 1")
    assert not table(tmp_path, "select microbatch, call, layer, gemm from gemms group by all having count(*) > 1")


def test_calls_of_a_shared_module_are_told_apart(tmp_path: Path) -> None:
    """The n-th call of a module in a microbatch is call n, forward and backward alike."""
    train(CASES["shared module"], steps=1, run_dir=tmp_path, every=1)
    query = "select microbatch, call, count(*) as n from tensors where layer = 'blocks.0.up' and tensor <> 'weight'"
    rows = table(tmp_path, f"{query} and tensor <> 'grad_input' group by all order by all")
    assert rows == [{"microbatch": m, "call": c, "n": 4} for m in range(2) for c in range(2)]


def test_calls_of_a_module_shared_by_two_reentrant_segments_keep_their_order(tmp_path: Path) -> None:
    """What is recomputed last was called first."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)
            nn.init.eye_(self.linear.weight)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = 3.0 * torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=True)
            return x

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp8dbg.attach(model, tmp_path, every=1):
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        optimizer.step()
    rows = table(tmp_path, "select call, amax from tensors where tensor = 'input' order by call")
    assert rows == [{"call": 0, "amax": 1.0}, {"call": 1, "amax": 3.0}]


def test_evaluation_passes_leave_no_row(tmp_path: Path) -> None:
    """eval() with and without gradients, and no_grad in training mode: none is followed by a backward."""
    with attached(tmp_path, Case(validate=True), every=1) as (_, step):
        step()
        step()
    counts = "select (select count(*) from amax) as amax, (select count(*) from gemms) as gemms"
    assert table(tmp_path / "run", counts) == [{"amax": 30, "gemms": 28}]


def test_a_layer_that_no_gradient_reaches_is_recorded_without_one(tmp_path: Path) -> None:
    """A frozen first layer runs in FP8 all the same; it has no backward to record."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with fp8dbg.attach(model, tmp_path, every=1):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        model(torch.randn(3, 4))  # no backward follows
    rows = table(tmp_path, "select step, tensor from amax where layer = '0' order by all")
    assert rows == [{"step": 0, "tensor": "input"}, {"step": 0, "tensor": "weight"}]
    gemms = table(tmp_path, "select layer, gemm from gemms order by all")
    assert gemms == [{"layer": "0", "gemm": "fprop"}, {"layer": "2", "gemm": "fprop"}, {"layer": "2", "gemm": "wgrad"}]


def test_training_in_evaluation_mode_is_training(tmp_path: Path) -> None:
    """Fine-tuning with eval() for the sake of dropout or batch norm: the backward says what it is."""
    case = Case()
    model, (optimizer,) = build(case)
    model.eval()
    with fp8dbg.attach(model, tmp_path, every=1):
        for _ in range(2):
            loss_of(case, model).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert table(tmp_path, "select step, count(*) as n from amax group by step order by step") == [
        {"step": 0, "n": 15},
        {"step": 1, "n": 15},
    ]


def test_the_weight_is_measured_although_an_evaluation_came_first(tmp_path: Path) -> None:
    """The row that an evaluation pass took with it is made again."""
    case = Case()
    model, (optimizer,) = build(case)
    with fp8dbg.attach(model, tmp_path, every=1):
        model.eval()
        loss_of(case, model)
        model.train()
        loss_of(case, model).backward()
        optimizer.step()
    assert table(tmp_path, "select count(*) as n from tensors where tensor = 'weight'") == [{"n": 5}]


def test_an_exception_in_the_users_forward_is_the_users(tmp_path: Path) -> None:
    """It passes through, the session closes, and what was finished before is there."""

    class Fragile(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if self.training and x.isnan().any():
                raise ArithmeticError("the user's own")
            return out

    case = Case(Fragile)
    model, (optimizer,) = build(case)
    with pytest.raises(ArithmeticError, match="the user's own"), fp8dbg.attach(model, tmp_path):  # noqa: PT012
        loss_of(case, model).backward()
        optimizer.step()
        model(torch.full((2, 5, WIDTH), torch.nan))
    assert table(tmp_path, "select count(*) as n from amax") == [{"n": 15}]


def test_training_goes_on_after_an_exception_that_the_user_caught(tmp_path: Path) -> None:
    """A forward that failed half-way leaves no trace in the next."""

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.fails = True

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            if self.fails:
                raise ArithmeticError
            out: Tensor = self.b(x)
            return out

    model = Fragile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp8dbg.attach(model, tmp_path, every=1):
        with pytest.raises(ArithmeticError):
            model(torch.randn(2, 4))
        model.fails = False
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert table(tmp_path, "select step, microbatch, count(*) as n from amax group by all") == [
        {"step": 0, "microbatch": 0, "n": 6}
    ]


def test_amaxes_are_those_of_what_the_gemm_reads(tmp_path: Path) -> None:
    """Under autocast the BF16 casts; the gradient is the one that arrives after the user's own hooks on it."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    x = torch.randn(5, 8)
    with fp8dbg.attach(layer, tmp_path, every=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        y.register_hook(lambda grad: 2 * grad)
        (y.float() * torch.arange(20.0).view(5, 4)).sum().backward()
        optimizer.step()
    amaxes = {row["tensor"]: row["amax"] for row in table(tmp_path, "select tensor, amax from amax")}
    assert amaxes == {
        "input": x.bfloat16().abs().max().item(),
        "weight": layer.weight.bfloat16().abs().max().item(),
        "grad_output": 38.0,
    }
    tensors = table(tmp_path, "select tensor, amax, dtype from tensors where recipe is not null")
    assert {row["tensor"]: row["amax"] for row in tensors} == amaxes
    assert {row["dtype"] for row in tensors} == {"bfloat16"}


def test_right_value_9_the_microbatches_of_a_step_combine(tmp_path: Path) -> None:
    """Row 9: the step's amax is the largest of the four, its underflow the sum of counts over the sum of sizes."""
    layer = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    amaxes = [12.0, 3.0, 1.5, 0.75]
    with fp8dbg.attach(layer, tmp_path, every=1, recipe="unscaled"):
        for n, amax in enumerate(amaxes, 1):
            x = torch.full((n, 4), 1e-4)
            x[0, 0] = amax
            layer(x).sum().backward()
        optimizer.step()
    rows = table(tmp_path, "select microbatch, amax from amax where tensor = 'input' order by microbatch")
    assert rows == [{"microbatch": m, "amax": amax} for m, amax in enumerate(amaxes)]
    step = "select max(amax) as amax, sum(underflow) / sum(numel - zeros - nan - inf) as underflow_ratio from tensors"
    assert table(tmp_path, f"{step} where tensor = 'input'") == [{"amax": 12.0, "underflow_ratio": 36 / 40}]


def test_right_value_14_only_a_weight_gradient_is_not_finite(tmp_path: Path) -> None:
    """Row 14: a weight gradient is not finite, and no activation or output gradient is.

    NaN (Inf less Inf) where the CPU rounds each product, Inf where it adds products unrounded.
    """

    class Scale(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    layers = [nn.Linear(4, 4, bias=False) for _ in range(4)]
    for layer in layers:
        nn.init.eye_(layer.weight)
    with torch.no_grad():
        layers[3].weight.mul_(1e-38)
    model = nn.Sequential(*layers[:3], Scale(1e38), layers[3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    signs = torch.tensor([[10.0], [-10.0]])
    with fp8dbg.attach(model, tmp_path, every=1):
        (model(torch.full((2, 4), 3.0)) * signs).sum().backward()
        optimizer.step()
    rows = table(tmp_path, "select layer, tensor, nan + inf as not_finite from tensors where nan + inf > 0")
    assert rows == [{"layer": "4", "tensor": "grad_weight", "not_finite": 16}]


def test_non_finite_operands_are_counted_on_every_step(tmp_path: Path) -> None:
    """The amax is over what is finite; the counts say what is not, and no NaN is written."""
    layer = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    x = torch.tensor([[1.0, torch.nan, -2.0, torch.inf], [0.5, 0.0, -torch.inf, torch.nan]])
    with fp8dbg.attach(layer, tmp_path, every=0):
        layer(x).sum().backward()
        optimizer.step()
    rows = table(tmp_path, "select amax, nan, inf from amax where tensor = 'input'")
    assert rows == [{"amax": 2.0, "nan": 2, "inf": 2}]


@pytest.mark.parametrize(("recipe", "hidden"), [("current", False), ("tensorwise", True)])
def test_a_nan_reaches_the_scale_where_the_library_lets_it(recipe: str, hidden: bool, tmp_path: Path) -> None:
    """torchao's amax is then NaN, and so is the scale: NULL in both tables, and no GEMM is called healthy."""
    layer = nn.Linear(4, 2, bias=False)
    x = torch.ones(200, 4)
    x[199, 3] = torch.nan
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with fp8dbg.attach(layer, tmp_path, optimizer, recipe=recipe, every=1, rows=1):
        layer(x)[:199].sum().backward()
        optimizer.step()
    scales = [table(tmp_path, f"select scale from {t} where tensor = 'input'")[0]["scale"] for t in ("amax", "tensors")]
    assert scales == ([None, None] if hidden else [448.0, 448.0])
    (fprop,) = table(tmp_path, "select rel_l2 from gemms where gemm = 'fprop'")
    assert (fprop["rel_l2"] is None) is hidden


def test_a_weight_written_into_between_microbatches_is_read_again(tmp_path: Path) -> None:
    """LBFGS changes it within a step: amax, scale and GEMM are those of the weight that each pass read."""
    layer = nn.Linear(8, 4, bias=False)
    nn.init.constant_(layer.weight, 0.5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with fp8dbg.attach(layer, tmp_path, optimizer, recipe="current", every=1):
        layer(torch.ones(2, 8)).sum().backward()
        with torch.no_grad():
            layer.weight *= 3
        layer(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    rows = table(tmp_path, "select amax, scale from amax where tensor = 'weight' order by microbatch")
    assert [(row["amax"], row["scale"]) for row in rows] == [(0.5, 896.0), (1.5, pytest.approx(448 / 1.5))]
    fprop = table(tmp_path, "select rel_l2 from gemms where gemm = 'fprop'")
    assert [row["rel_l2"] for row in fprop] == [pytest.approx(0, abs=1e-6)] * 2


@pytest.mark.parametrize("every", [0, 1])
def test_forwards_that_go_ahead_of_their_backwards_are_told_apart(every: int, tmp_path: Path) -> None:
    """A microbatch is a backward pass: two passes, two amaxes, measured in full or not, never two rows of one key."""
    layer = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with fp8dbg.attach(layer, tmp_path, optimizer, recipe="delayed:algorithm=most_recent", every=every):
        for _ in range(2):
            first, second = layer(torch.ones(3, 4)).sum(), layer(torch.full((3, 4), 7.0)).sum()
            first.backward()
            second.backward()
            optimizer.step()
    rows = table(tmp_path, "select step, microbatch, amax, scale from amax where tensor = 'input' order by all")
    found = [tuple(row.values()) for row in rows]
    assert found == [(0, 0, 1.0, 1.0), (0, 1, 7.0, 448.0), (1, 0, 1.0, 64.0), (1, 1, 7.0, 448.0)]
    places = table(
        tmp_path, "select microbatch, call, amax from tensors where tensor = 'input' and step = 1 order by all"
    )
    assert [tuple(row.values()) for row in places] == ([(0, 0, 1.0), (1, 0, 7.0)] if every else [])


def test_a_double_backward_is_recorded_once(tmp_path: Path) -> None:
    """Two losses of one graph, or a gradient penalty, run the gradient's hooks twice."""
    layer = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with fp8dbg.attach(layer, tmp_path, every=1):
        y = layer(torch.randn(3, 4))
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        optimizer.step()
    rows = table(tmp_path, "select tensor, count(*) as n from amax group by tensor order by tensor")
    assert rows == [{"tensor": name, "n": 1} for name in OPERANDS]


def test_amaxes_that_wait_on_an_accelerator_become_the_same_rows(tmp_path: Path) -> None:
    """They are settled when a measured step begins, not before; emulated scales follow as if nothing had waited."""
    options: dict[str, Any] = {"every": 3, "recipe": "delayed:history=2"}
    train(Case(microbatches=2), steps=6, run_dir=tmp_path / "host", **options)
    with attached(tmp_path, Case(microbatches=2), **options) as (run, step):
        run.recorder.on_host = False
        waiting = []
        for _ in range(6):
            step()
            waiting.append(len(run.recorder.books))
    assert waiting == [0, 10, 0, 0, 10, 0]
    every_row = "select * exclude (histogram) from tensors order by all"
    for query in ("select * from amax order by all", every_row, "select * from gemms order by all"):
        assert table(tmp_path / "run", query) == table(tmp_path / "host", query)


def test_copies_of_an_attached_model_are_not_recorded(tmp_path: Path) -> None:
    """An EMA copy, deep or pickled, calls no hook of ours; and it can be made at all."""
    import copy
    import io

    case = Case()
    model, (optimizer,) = build(case)
    with fp8dbg.attach(model, tmp_path, every=1):
        twin = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
        loss_of(case, twin).backward()
        loss_of(case, model).backward()
        optimizer.step()
    assert table(tmp_path, "select count(*) as n from amax") == [{"n": 15}]


def test_a_parametrized_weight_is_not_computed_for_our_sake(tmp_path: Path) -> None:
    """Spectral norm moves its own state at every access: the weight stays unseen, and the run says so."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    state: list[Any] = []
    for attach in (False, True):
        torch.manual_seed(1)
        before = {k: v.clone() for k, v in layer.state_dict().items()}
        session = fp8dbg.attach(layer, tmp_path, every=1) if attach else None
        layer(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        if session is not None:
            session.close()
        state.append({k: v.clone() for k, v in layer.state_dict().items()})
        layer.load_state_dict(before)
    assert all(torch.equal(state[0][k], state[1][k]) for k in state[0])
    assert {row["tensor"] for row in table(tmp_path, "select tensor from amax")} == {"input", "grad_output"}
    events = table(tmp_path, "select kind, layer from events")
    assert {"kind": "gap", "layer": "ParametrizedLinear"} in events


def test_other_modules_are_recorded_where_the_user_names_their_type(tmp_path: Path) -> None:
    """Operands only: no GEMM is assumed."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp8dbg.attach(model, tmp_path, every=1, also=[nn.LayerNorm]):
        model(torch.randn(3, 8)).sum().backward()
        optimizer.step()
    query = "select tensor from tensors where layer = '0' and recipe is not null order by tensor"
    assert [row["tensor"] for row in table(tmp_path, query)] == OPERANDS
    assert not table(tmp_path, "select gemm from gemms where layer = '0'")
