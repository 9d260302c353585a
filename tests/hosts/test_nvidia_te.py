"""Transformer Engine's layers, recorded while they train on a CPU, against the casts that were really made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dbg
from fp8dbg.hooks import nvidia_te_apply
from fp8dbg.hooks import nvidia_te_state as state
from tests.hosts import te_cpu, te_nets
from tests.hosts.runs import Figures, figures, owner_of, rows
from tests.hosts.te_cpu.enums import torch_dtype
from tests.hosts.te_cpu.quantizers import Cast
from tests.hosts.test_fallback_text import Entry, Plan

PER_TENSOR = ("delayed", "current")
HIDDEN = {("2.fc2", "input"), ("2.fc1", "grad_output")}
"""What LayerNormMLP's kernels keep to themselves."""

Seen = dict[tuple[str, str], list[Cast]]


@contextmanager
def spying(net: nn.Module) -> Iterator[Seen]:
    """Layer and operand -> the casts made of it, recomputed ones left out; found by the identity of the quantizer."""
    seen: Seen = {}

    def observer(cast: Cast) -> None:
        key = owner_of(net, cast)
        recomputed = key[1] != "grad_output" and torch._C._current_graph_task_id() != -1
        if not recomputed:
            inner = {name: value.clone() for name, value in cast.inner.items()}
            seen.setdefault(key, []).append(Cast(cast.quantizer, cast.dense.detach().clone(), cast.scale, inner))

    te_cpu.OBSERVERS.append(observer)
    try:
        yield seen
    finally:
        te_cpu.OBSERVERS.remove(observer)


def train(
    te: Any,
    net: nn.Module,
    recipe: str | None,
    steps: int = 3,
    microbatches: int = 2,
    forward: Callable[[Tensor], Tensor] | None = None,
    spread: float = 3.0,
    lr: float = 0.1,
) -> list[Tensor]:
    """Losses of a few steps on inputs of growing spread, followed by the weights."""
    fp8_recipe = te_nets.recipe(recipe) if recipe is not None else None
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        for microbatch in range(microbatches):
            x = te_nets.batch(step * microbatches + microbatch).float() * 10.0 ** torch.linspace(-spread, 1, 128)
            x = x.bfloat16().requires_grad_()
            with te_nets.autocast(te, fp8_recipe, fp8_recipe is not None):
                y = (forward or net)(x)
            loss = y.float().pow(2).sum()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(p.detach().clone() for p in net.parameters())]


def expected_of(casts: list[Cast], role: str, microbatches: int) -> list[Figures]:
    """Figures from the bytes; a weight is recorded once a step and cast in each microbatch."""
    made = [Figures.of(c.dense, c.data, torch_dtype(c.quantizer.dtype), c.scale) for c in casts]
    return made[::microbatches] if role == "weight" else made


@pytest.mark.parametrize("recipe", PER_TENSOR)
def test_figures_are_those_of_the_bytes(te: Any, tmp_path: Path, recipe: str) -> None:
    """Every amax, scale, underflow, saturation and at_max equals the intercepted cast's, bit for bit."""
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=1), spying(net) as seen:
        train(te, net, recipe)
    recorded = figures(tmp_path)
    assert set(seen) - set(recorded) == HIDDEN
    for key, casts in seen.items():
        if key not in HIDDEN:
            assert recorded[key] == expected_of(casts, key[1], 2), key


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_block_figures_are_those_of_the_bytes(te: Any, tmp_path: Path, recipe: str) -> None:
    """Underflow, at_max and amax equal those of the bytes along rows."""
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=1), spying(net) as seen:
        train(te, net, recipe)
    recorded = figures(tmp_path)
    for key, casts in seen.items():
        if key not in HIDDEN:
            found = [(f.amax, f.underflow, f.at_max) for f in recorded[key]]
            assert found == [(f.amax, f.underflow, f.at_max) for f in expected_of(casts, key[1], 2)], key


@pytest.mark.parametrize("recipe", [*te_nets.RECIPES, None])
def test_training_is_bit_identical_and_each_call_is_one_row(te: Any, tmp_path: Path, recipe: str | None) -> None:
    """Same losses and weights with and without fp8dbg; one amax row per layer, visible operand and microbatch."""
    bare = train(te, te_nets.four_layers(te), recipe)
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=1):
        watched = train(te, net, recipe)
    assert all(map(torch.equal, bare, watched))
    counts = rows(tmp_path, "select layer, tensor, count(*) as n from amax group by all")
    assert {row["n"] for row in counts} == {3 * 2}
    layers = {"0", "1", "2.fc1", "2.fc2", "3"}
    every = {(layer, role) for layer in layers for role in ("input", "weight", "grad_output")}
    assert {(row["layer"], row["tensor"]) for row in counts} == every - HIDDEN
    assert rows(tmp_path, "select * from events where kind = 'error'") == []


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", te_nets.RECIPES)
def test_checkpointing_counts_nothing_twice(te: Any, tmp_path: Path, recipe: str, reentrant: bool) -> None:
    """te.checkpoint of either kind: one row per call, with the scale that was in force in the first pass."""

    def forward(x: Tensor) -> Tensor:
        return te.checkpoint(net, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    net = te_nets.four_layers(te)
    bare = train(te, net, recipe, forward=forward)
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=1), spying(net) as seen:
        watched = train(te, net, recipe, forward=forward)
    assert all(map(torch.equal, bare, watched))
    recorded = figures(tmp_path)
    for key, casts in seen.items():
        if key not in HIDDEN:
            found, expected = recorded[key], expected_of(casts, key[1], 2)
            if recipe not in PER_TENSOR:  # with many scales a tensor, saturation is not read off the bytes
                found, expected = ([replace(f, saturated=0, scale=None) for f in fs] for fs in (found, expected))
            assert found == expected, key


def test_the_first_step_is_said_to_have_the_initial_scale(te: Any, tmp_path: Path) -> None:
    """Under delayed scaling: 1.0 and "initial" until the first update, live afterwards."""
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=1):
        train(te, net, "delayed", steps=2, microbatches=1)
    query = "select distinct step, scale_source, scale = 1.0 as one from tensors where recipe is not null"
    found = rows(tmp_path, query)
    assert {tuple(row.values()) for row in found} == {(0, "initial", True), (1, "live", False)}


def test_evaluation_is_not_recorded(te: Any, tmp_path: Path) -> None:
    """Forwards without a gradient between steps leave neither rows nor another scale."""
    net = te_nets.four_layers(te)

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            net.eval()
            net(te_nets.batch(99) * 100)
            net.train()
        return net(x)  # type: ignore[no-any-return]

    with fp8dbg.attach(net, tmp_path, every=1):
        train(te, net, "current", forward=forward)
    assert {row["n"] for row in rows(tmp_path, "select count(*) as n from amax group by layer, tensor")} == {3 * 2}


def test_a_bf16_step_between_fp8_steps_has_no_scale(te: Any, tmp_path: Path) -> None:
    """The emulated scale of such a step would begin at 1: it is in force nowhere, and no state has been lost."""
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=2):
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        for step in range(6):
            with te_nets.autocast(te, te_nets.recipe("delayed"), enabled=step in (0, 1, 2, 4)):
                y = net(te_nets.batch(step))
            y.float().pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = rows(tmp_path, "select step, count(scale) as scales, count(*) as n from amax group by step order by step")
    assert [row["scales"] / row["n"] for row in found] == [1, 1, 1, 0, 1, 0]
    with fp8dbg.open_run(tmp_path) as opened:
        assert "frozen_scale" not in {finding.code for finding in opened.findings()}


def test_a_layer_outside_the_autocast_is_a_bf16_layer(te: Any, tmp_path: Path) -> None:
    """It is compared with the recipe that attach was given; its neighbour brings its own."""
    net = te_nets.four_layers(te)

    def forward(x: Tensor) -> Tensor:
        with te_nets.autocast(te, None, enabled=False):
            x = net[0](x)
        return net[3](net[2](net[1](x)))  # type: ignore[no-any-return]

    with fp8dbg.attach(net, tmp_path, every=1, recipe="mxfp8"):
        train(te, net, "current", forward=forward)
    found = rows(
        tmp_path, "select distinct layer, recipe, what_if from tensors where recipe is not null order by layer"
    )
    assert ("0", "mxfp8", "mxfp8") in {tuple(row.values()) for row in found}
    assert ("1", "current", None) in {tuple(row.values()) for row in found}
    assert {row["recipe"] for row in found if row["layer"] == "0"} == {"mxfp8"}


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_backward_that_the_recipe_keeps_in_bf16_is_not_called_fp8(te: Any, tmp_path: Path, override: str) -> None:
    """A recipe with backward_override: fprop alone is compared, and the gradients' figures are of what FP8 would do."""
    if te_cpu.te_version() < (2, 16):
        pytest.skip("recipes have no backward_override before Transformer Engine 2.16")
    net = te_nets.four_layers(te)[:2]  # LayerNormMLP refuses such a recipe
    with fp8dbg.attach(net, tmp_path, every=1):
        with te_nets.autocast(te, te_nets.recipe("current", backward_override=override)):
            y = net(te_nets.batch(0).requires_grad_())
        y.float().pow(2).mean().backward()
        torch.optim.SGD(net.parameters(), lr=1e-3).step()
    assert {row["gemm"] for row in rows(tmp_path, "select gemm from gemms")} == {"fprop"}
    query = "select tensor, min(what_if) as what_if from tensors where recipe is not null group by tensor"
    found = {row["tensor"]: row["what_if"] for row in rows(tmp_path, query)}
    assert found == {"input": None, "weight": None, "grad_output": "current"}


def test_calibration_is_recorded_as_the_bf16_that_it_is(te: Any, tmp_path: Path) -> None:
    """A calibrating autocast computes in BF16: rows compare with attach's recipe, training is as without fp8dbg."""
    results = []
    for attached in (False, True):
        net = te_nets.four_layers(te)
        with fp8dbg.attach(net, tmp_path, every=1, recipe="delayed") if attached else nullcontext():
            for step in range(2):
                with te_nets.calibration(te, te_nets.recipe("delayed")):
                    y = net(te_nets.batch(step))
                y.float().pow(2).mean().backward()
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                optimizer.step()
                optimizer.zero_grad()
            meta: Any = net[0].fp8_meta
            history = meta["scaling_fwd"].amax_history.clone()
        results.append([history, *(p.detach().clone() for p in net.parameters())])
    assert all(map(torch.equal, *results))
    found = rows(tmp_path, "select distinct recipe, what_if from tensors where recipe is not null")
    assert [tuple(row.values()) for row in found] == [("delayed", "delayed")]
    counts = rows(tmp_path, "select count(*) as n from amax group by layer, tensor")
    assert {row["n"] for row in counts} == {2}


def test_experts_are_layers_and_an_idle_one_is_no_fault(te: Any, tmp_path: Path) -> None:
    """GroupedLinear: each expert's rows and gradient are its own; one without tokens has no row and no event."""
    torch.manual_seed(0)
    net = nn.Sequential(te.GroupedLinear(3, 64, 96, bias=False, params_dtype=torch.bfloat16))
    splits = [32, 0, 64]
    with fp8dbg.attach(net, tmp_path, every=1), spying(net) as seen:
        x = torch.randn(96, 64, dtype=torch.bfloat16, requires_grad=True)
        with te_nets.autocast(te, te_nets.recipe("current")):
            y = net[0](x, splits)
        y.float().pow(2).sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    recorded = figures(tmp_path)
    assert {layer for layer, _ in recorded} == {"0.gemm_0", "0.gemm_2"}
    for key, found in recorded.items():
        assert found == expected_of(seen[key], key[1], 1), key
    assert rows(tmp_path, "select * from events") == []


def test_real_gemms_are_compared_with_the_shadow(te: Any, tmp_path: Path) -> None:
    """Healthy FP8 errors, nothing unexplained beyond the rounding of a BF16 result (a large bias adds to that)."""
    net = te_nets.four_layers(te, bias=False)
    with fp8dbg.attach(net, tmp_path, every=1):
        train(te, net, "current", spread=0.5)
    found = rows(tmp_path, "select layer, gemm, rel_l2, error_unexplained as rest from gemms")
    compared = {(row["layer"], row["gemm"]) for row in found if row["rest"] is not None}
    seen = {("0", "fprop"), ("0", "dgrad"), ("0", "wgrad"), ("1", "fprop"), ("1", "wgrad")}
    assert compared == seen | {("3", "fprop"), ("3", "dgrad"), ("3", "wgrad")}
    for row in found:
        assert 0.01 < row["rel_l2"] < 0.12
        assert row["rest"] is None or row["rest"] < 0.003


def test_results_are_those_of_the_parameters(te: Any, tmp_path: Path) -> None:
    """The grad_weight that is recorded of each layer is its own weight's gradient: same size, same amax."""
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=1):
        with te_nets.autocast(te, te_nets.recipe("current")):
            y = net(te_nets.batch(0))
        y.float().pow(2).sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    names = {"0.weight": "0", "1.weight": "1", "2.fc2_weight": "2.fc2", "3.weight": "3"}
    gradients = {names[n]: p.grad for n, p in net.named_parameters() if n in names and p.grad is not None}
    expected = {name: (grad.numel(), float(grad.float().abs().max())) for name, grad in gradients.items()}
    found = rows(tmp_path, "select layer, numel, amax from tensors where tensor = 'grad_weight'")
    assert {row["layer"]: (row["numel"], row["amax"]) for row in found} == expected


def test_a_spike_under_delayed_scaling_clips_for_one_step(te: Any, tmp_path: Path) -> None:
    """Activations 50 times larger in one step: most values clip, the SQNR falls by over 20 dB, and then recovers."""
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=1):
        for step in range(6):
            x = te_nets.batch(step) * (50.0 if step == 4 else 1.0)
            with te_nets.autocast(te, te_nets.recipe("delayed", amax_compute_algo="most_recent")):
                y = net(x)
            y.float().pow(2).mean().backward()
            optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
            optimizer.step()
            optimizer.zero_grad()
    figures_ = "saturated / numel as clipped, sqnr_db, scale_delta"
    query = f"select step, {figures_} from tensors where layer = '0' and tensor = 'input'"
    found = {row["step"]: row for row in rows(tmp_path, query)}
    assert found[3]["sqnr_db"] > 28
    assert found[4]["clipped"] > 0.9
    assert found[4]["sqnr_db"] < 1.0
    assert found[4]["scale_delta"] == pytest.approx(torch.tensor(50.0).log2().item(), abs=0.6)
    titles = [finding.code for finding in fp8dbg.open_run(tmp_path).findings()]
    assert any("saturat" in code for code in titles), titles


def test_a_wide_tensor_under_current_scaling_is_flushed_and_blocks_keep_it(te: Any, tmp_path: Path) -> None:
    """Inputs over ten binades' spread: per-tensor E4M3 turns over a third of them into zero, MXFP8 none."""
    ratios = {}
    for recipe in ("current", "mxfp8"):
        net = te_nets.four_layers(te)
        with fp8dbg.attach(net, tmp_path / recipe, every=1):
            for step in range(2):
                spread = torch.randn(64, 1, generator=torch.Generator().manual_seed(50 + step)) * 8.0
                x = (te_nets.batch(step).float() * spread.exp2()).bfloat16()
                with te_nets.autocast(te, te_nets.recipe(recipe)):
                    y = net(x)
                y.float().pow(2).mean().backward()
                torch.optim.SGD(net.parameters(), lr=1e-6).step()
        query = "select max(underflow_ratio) as ratio from tensor_ratios where layer = '0' and tensor = 'input'"
        ratios[recipe] = rows(tmp_path / recipe, query)[0]["ratio"]
    assert ratios["current"] > 0.33
    assert ratios["mxfp8"] < 0.01
    found = [f for f in fp8dbg.open_run(tmp_path / "current").findings() if f.layer == "0" and f.tensor == "input"]
    assert found


def test_a_resume_without_the_amax_state_starts_from_scale_one(te: Any, tmp_path: Path) -> None:
    """Weights reloaded without _extra_state: the first resumed step has the initial scale, and gradients vanish."""
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=1):
        train(te, net, "delayed", steps=3, microbatches=1, spread=0.0, lr=1e-6)
    weights = {name: value for name, value in net.state_dict().items() if not name.endswith("_extra_state")}
    resumed = te_nets.four_layers(te, seed=1)
    resumed.load_state_dict(weights, strict=False)
    with fp8dbg.attach(resumed, tmp_path, every=1, first_step=3):
        train(te, resumed, "delayed", steps=2, microbatches=1, spread=0.0, lr=1e-6)
    query = "select step, scale_source, scale_delta from tensors where layer = '3' and tensor = 'weight' order by step"
    found = {row["step"]: (row["scale_source"], row["scale_delta"]) for row in rows(tmp_path, query)}
    assert [found[step][0] for step in range(5)] == ["initial", "live", "live", "initial", "live"]
    assert found[3][1] < -10
    assert abs(found[4][1]) < 1


def test_an_unknown_version_is_warned_of(te: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that was never read: a warning with its number, an event, and recording goes on."""
    monkeypatch.setattr(state, "te_version", lambda: (9, 1))
    net = te_nets.four_layers(te)
    with pytest.warns(UserWarning, match=r"Transformer Engine 9\.1 is not one"), fp8dbg.attach(net, tmp_path, every=1):
        train(te, net, "current", steps=1)
    assert len(figures(tmp_path)) == 13
    assert "9.1" in rows(tmp_path, "select detail from events where detail like '%9.1%'")[0]["detail"]


def test_a_changed_layout_is_an_event_and_not_an_exception(te: Any, tmp_path: Path) -> None:
    """Scales that are not where they used to be: training goes on, the run says what is not seen of which layer."""
    bare = train(te, te_nets.four_layers(te), "delayed", steps=1)
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, tmp_path, every=1) as run:
        layer: Any = run.recorder.watches[0].layer
        layer.slots = state.Slots(70, 80, 90)
        assert all(map(torch.equal, bare, train(te, net, "delayed", steps=1)))
    events = rows(tmp_path, "select layer, detail from events where kind = 'error'")
    assert events
    assert {row["layer"] for row in events} == {"0"}
    assert {layer for layer, _ in figures(tmp_path)} == {"1", "2.fc1", "2.fc2", "3"}


# --- a plan on a live model


def same_as_bf16(te: Any, module: nn.Module, recipe: str) -> set[str]:
    """The GEMMs of a te.Linear whose results equal those without any autocast, bit for bit."""
    results = []
    for enabled in (True, False):
        x = te_nets.batch(5).requires_grad_()
        with te_nets.autocast(te, te_nets.recipe(recipe), enabled):
            y = module(x)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        weight = module.weight
        assert isinstance(weight, Tensor)
        results.append([y, *torch.autograd.grad(y, (x, weight), grad)])
    return {gemm for gemm, a, b in zip(("fprop", "dgrad", "wgrad"), *results, strict=True) if torch.equal(a, b)}


@pytest.mark.parametrize("recipe", te_nets.RECIPES)
def test_a_plan_is_applied_to_a_live_model(te: Any, recipe: str) -> None:
    """The planned module computes in BF16 inside the run's autocast, its neighbour stays in FP8."""
    net = te_nets.four_layers(te)
    assert fp8dbg.apply_fallback(net, Plan((Entry("0"), Entry("2.fc1"), Entry("2.fc2")))) == []
    assert same_as_bf16(te, net[0], recipe) == {"fprop", "dgrad", "wgrad"}
    x = te_nets.batch(0)
    with te_nets.autocast(te, te_nets.recipe(recipe)):
        net(net[0](x)[:, :128])
    assert [state.in_fp8(module) for module in net] == [False, True, False, True]


def test_the_backward_alone_goes_to_bf16(te: Any) -> None:
    """dgrad and wgrad, where the version has backward_override; before, a sentence says that it cannot be done."""
    net = te_nets.four_layers(te)
    said = nvidia_te_apply.apply_fallback(net, Plan((Entry("0", ("dgrad", "wgrad")),)))
    if te_cpu.te_version() >= (2, 16):
        assert said == []
        assert same_as_bf16(te, net[0], "current") == {"dgrad", "wgrad"}
    else:
        assert "all its GEMMs go to bf16" in said[0]
        assert same_as_bf16(te, net[0], "current") == {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize(("recipe", "recorded"), [("mxfp8", "mxfp8"), ("current_pow2", "current:power_of_2=true")])
def test_a_layer_gets_another_recipe(te: Any, tmp_path: Path, recipe: str, recorded: str) -> None:
    """One layer planned for another recipe in a run of current scaling: its rows say so."""
    net = te_nets.four_layers(te)
    assert nvidia_te_apply.apply_fallback(net, Plan((Entry("3", recipe=recipe),))) == []
    with fp8dbg.attach(net, tmp_path, every=1):
        train(te, net, "current")
    found = rows(tmp_path, "select distinct layer, recipe from tensors where recipe is not null order by layer")
    assert {row["layer"]: row["recipe"] for row in found}["3"] == recorded
    assert {row["recipe"] for row in found if row["layer"] != "3"} == {"current"}


def test_applying_says_what_an_autocast_cannot_do(te: Any) -> None:
    """One GEMM, or one of two layers, takes the module's rest along to BF16; delayed scaling for a layer is refused."""
    net = te_nets.four_layers(te)
    plan = Plan((Entry("0", ("fprop",)), Entry("2.fc1"), Entry("3", recipe="delayed")))
    said = nvidia_te_apply.apply_fallback(net, plan)
    assert [sentence.split(":")[0] for sentence in said] == ["0", "2", "3"]
    assert "all its GEMMs go to bf16" in said[0]
    assert "left as before" in said[2]
    with te_nets.autocast(te, te_nets.recipe("current")):
        net(te_nets.batch(0))
    assert [state.in_fp8(module) for module in net] == [False, True, False, True]
    with pytest.raises(fp8dbg.errors.UnknownNameError, match=r"2\.fc1"):
        nvidia_te_apply.apply_fallback(net, Plan((Entry("2"),)))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_weights_held_in_fp8_alone_are_recorded_as_their_values(te: Any, tmp_path: Path, recipe: str) -> None:
    """FP8 primary weights: training is bit-identical; the figures are of the FP8 values, which lose nothing."""
    init = getattr(te, "quantized_model_init", None) or te.fp8_model_init
    results = []
    for attached in (False, True):
        with init(enabled=True, recipe=te_nets.recipe(recipe)):
            net = te_nets.four_layers(te)
        if attached:
            with fp8dbg.attach(net, tmp_path, every=1):
                results.append(train(te, net, recipe, steps=2, lr=1e-6))
        else:
            results.append(train(te, net, recipe, steps=2, lr=1e-6))
    bare, watched = ([x.dequantize() if hasattr(x, "_quantizer") else x for x in result] for result in results)
    assert all(map(torch.equal, bare, watched))
    found = rows(tmp_path, "select distinct layer from tensors where tensor = 'weight' and rel_l2 < 1e-6")
    assert {row["layer"] for row in found} == {"0", "1", "2.fc1", "2.fc2", "3"}
    assert rows(tmp_path, "select * from events where kind = 'error'") == []
