"""Simulated FP8 layers: the right values, bit-exact scales, and training loops of every kind."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8dbg
from fp8dbg.errors import UnknownNameError, UsageError
from fp8dbg.numerics.casting import contraction_axis
from fp8dbg.numerics.recipes import GEMMS, ROLES, DelayedState, Recipe, recipe_named, recipe_names
from fp8dbg.numerics.scaling_state import STATE, roll_
from fp8dbg.numerics.simulated import SimulatedLinear, simulate
from tests import slow, slow_blocks

STATELESS = [name for name in recipe_names() if name != "delayed"]
SHORT = "delayed:history=3"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
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


class TestValues:
    """Against an independent emulation: other libraries' casts, float64 products."""

    @staticmethod
    def seen(x: Tensor, recipe: Recipe, role: str, gemm: str) -> Tensor:
        """What the GEMM sees of an operand; the operand itself where the recipe leaves the GEMM in BF16."""
        if not recipe.quantises(gemm):
            return x.double()
        granularity, axis = recipe.granularity(role, gemm), contraction_axis(role, gemm)
        return torch.from_numpy(slow_blocks.cast(x, recipe, role, granularity, axis)["seen"]).double()

    @pytest.mark.parametrize("label", [*STATELESS, "mxfp8:rounding=floor", "block:power_of_2=false"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_output_and_gradients(self, label: str, dtype: torch.dtype) -> None:
        """All three GEMMs and the bias, for a batch of sequences: float32 to 1e-5; bfloat16 rounded once."""
        recipe = recipe_named(label)
        layer = SimulatedLinear(80, 48, dtype=dtype, recipe=recipe)
        x = (normal(2, 20, 80) * torch.exp(normal(2, 20, 1, seed=3))).to(dtype).requires_grad_()
        g = (normal(2, 20, 48, seed=1) * torch.exp(normal(2, 20, 1, seed=4))).to(dtype)
        y = layer(x)
        y.backward(g)
        flat_x, flat_g, w = x.detach().view(40, 80), g.view(40, 48), layer.weight.detach()
        wanted_y = self.seen(flat_x, recipe, "input", "fprop") @ self.seen(w, recipe, "weight", "fprop").t()
        wanted_x = self.seen(flat_g, recipe, "grad_output", "dgrad") @ self.seen(w, recipe, "weight", "dgrad")
        wanted_w = self.seen(flat_g, recipe, "grad_output", "wgrad").t() @ self.seen(flat_x, recipe, "input", "wgrad")
        rtol = 1e-5 if dtype == torch.float32 else 2.0**-8
        for found, wanted in (
            (y.detach().view(40, 48), wanted_y + layer.bias.detach().double()),
            (x.grad, wanted_x),
            (layer.weight.grad, wanted_w),
            (layer.bias.grad, flat_g.double().sum(0)),
        ):
            assert found is not None
            assert found.dtype == dtype
            size = wanted.square().mean().sqrt().item()
            torch.testing.assert_close(found.double().view_as(wanted), wanted, rtol=rtol, atol=2e-6 * size)

    def test_delayed_scales_reach_the_casts(self) -> None:
        """The second step casts under the scales that the first step's amax gave, for all three operands."""
        layer = SimulatedLinear(32, 16, bias=False, recipe="delayed")
        x, g = normal(8, 32).requires_grad_(), 1e-4 * normal(8, 16, seed=1)
        recipe = recipe_named("delayed")
        scales = dict.fromkeys(ROLES, 1.0)
        for factor in (1.0, 3.0):
            layer.weight.grad, x.grad = None, None
            y = layer(factor * x)
            y.backward(factor * g)
            now = {"input": factor * x.detach(), "weight": layer.weight.detach(), "grad_output": factor * g}
            q = {
                role: torch.from_numpy(slow.rounded((v * scales[role]).numpy(), recipe.formats[role])) / scales[role]
                for role, v in now.items()
            }
            torch.testing.assert_close(y.detach().double(), q["input"] @ q["weight"].t(), rtol=1e-5, atol=1e-6)
            assert layer.weight.grad is not None
            wanted = q["grad_output"].t() @ q["input"]
            torch.testing.assert_close(layer.weight.grad.double(), wanted, rtol=1e-5, atol=1e-9)
            scales = {role: recipe.current_scale(v.abs().max().item(), role) for role, v in now.items()}

    @pytest.mark.parametrize("label", recipe_names())
    def test_every_recipe_learns(self, label: str) -> None:
        """A small regression under autocast: the loss falls by half, and no random number is drawn."""
        model = simulate(small(), label)
        x = normal(64, 32)
        y = torch.tanh(x @ normal(32, 32, seed=1) / 6)
        optimizer, losses = torch.optim.Adam(model.parameters(), 5e-3), []
        before = torch.get_rng_state()
        for _ in range(60):
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(x).float() - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]
        assert torch.equal(torch.get_rng_state(), before)

    def test_runs_repeat(self) -> None:
        """Two runs of the same model give the same bits."""
        runs = []
        for _ in range(2):
            model = simulate(small(), SHORT)
            for i in range(3):
                step(model, normal(16, 32, seed=i))
            runs.append({**grads(model), **state(model)})
        assert_equal(*runs)


class TestScales:
    """Delayed scaling's state inside a layer."""

    @pytest.mark.parametrize(
        "label", ["delayed:history=4", "delayed:history=4,algorithm=most_recent", "delayed:history=1,margin=1"]
    )
    def test_updates_are_bit_exact(self, label: str) -> None:
        """Spikes, zeros, Inf, tiny and huge values: scale, window and count as ``DelayedState`` has them."""
        recipe = recipe_named(label)
        amaxes = [1.0, 3.3, 0.0, math.inf, 100.0, 1e-3, 7.7, 1e-38, 3e38, 0.1, 0.1, 0.1, 0.1, 0.1, 5e-45]
        for role in ROLES:
            oracle, size = DelayedState(recipe, role), int(recipe.parameters["history"])
            history, scale, updates = torch.zeros(1, size), torch.ones(1), torch.zeros(1, dtype=torch.int64)
            for amax in amaxes:
                history[0, 0] = max(history[0, 0].item(), amax)
                oracle.observe(amax)
                oracle.update()
                over_window = recipe.parameters["algorithm"] == "max"
                roll_(history, scale, updates, float(recipe.scaled_max(role)), over_window)
                assert scale.item() == oracle.scale
                assert history[0].tolist() == oracle.history
                assert (updates.item() == 0) == oracle.initial

    @pytest.mark.parametrize("algorithm", ["max", "most_recent"])
    def test_a_layer_follows_the_oracle(self, algorithm: str) -> None:
        """Ten microbatches of changing size: every cast sees the scale that follows from all earlier ones."""
        recipe = recipe_named("delayed", history=3, algorithm=algorithm)
        layer = SimulatedLinear(16, 8, recipe=recipe)
        oracles = {role: DelayedState(recipe, role) for role in ROLES}
        for i, size in enumerate([1.0, 10.0, 0.1, 0.0, 5.0, 1e4, 1.0, 1.0, 1.0, 1.0]):
            x, g = size * normal(4, 16, seed=i), size * 1e-6 * normal(4, 8, seed=i)
            y = layer(x)
            assert layer.fp8_scale("grad_output")[0] == oracles["grad_output"].scale
            y.backward(g)
            assert [layer.fp8_scale(r)[0] for r in ("input", "weight")] == [
                oracles[r].scale for r in ("input", "weight")
            ]
            for role, v in {"input": x, "weight": layer.weight, "grad_output": g}.items():
                oracles[role].update(v.abs().max().item())
            with torch.no_grad():
                layer.weight.mul_(1.5)

    def test_first_casts_are_initial(self) -> None:
        """Scale 1 until an update has set it; then live. Recipes without state leave the scale to be emulated."""
        layer = SimulatedLinear(16, 8, recipe="delayed")
        assert [layer.fp8_scale(role) for role in ROLES] == [(1.0, "initial")] * 3
        x = normal(4, 16)
        layer(x).sum().backward()
        assert layer.fp8_scale("input") == (1.0, "initial")
        assert layer.fp8_scale("grad_output") == (57344.0, "live")
        layer(x)
        wanted = recipe_named("delayed").current_scale(x.abs().max().item(), "input")
        assert layer.fp8_scale("input") == (wanted, "live")
        assert SimulatedLinear(16, 8, recipe="current").fp8_scale("input") == (None, "emulated")
        fallen_back = SimulatedLinear(16, 8, recipe="delayed", recipes={"dgrad": "bf16", "wgrad": "bf16"})
        assert fallen_back.fp8_scale("grad_output") == (None, "emulated")

    def test_evaluation_changes_nothing(self) -> None:
        """eval(), with gradients or without, uses the scale in force and leaves the state alone."""
        model = simulate(small(), SHORT)
        step(model, normal(16, 32))
        before = state(model)
        model.eval()
        step(model, 100 * normal(16, 32))
        with torch.no_grad():
            model(50 * normal(16, 32))
        assert_equal(state(model), before)

    def test_accumulation_updates_per_microbatch(self) -> None:
        """Once per forward, as in Transformer Engine, whatever the optimizer: the window holds microbatches' amaxes."""
        layer = SimulatedLinear(16, 8, recipe="delayed:history=4")
        for size in (1.0, 2.0, 4.0):
            layer(torch.full((2, 16), size)).sum().backward()
        assert layer.get_buffer("fp8_amax_history")[ROLES.index("input")].tolist() == [4.0, 0.0, 1.0, 2.0]

    def test_state_keeps_its_precision(self) -> None:
        """A model cast to bfloat16 keeps float32 scales; one built on the meta device starts at scale 1."""
        model = simulate(small(), SHORT)
        step(model, normal(16, 32))
        before = state(model)
        model.to(torch.bfloat16)
        assert_equal(state(model), before)
        with torch.device("meta"):
            made = SimulatedLinear(16, 8, recipe="delayed")
        made = made.to_empty(device="cpu")
        made.reset_parameters()
        assert made.get_buffer("fp8_scales").tolist() == [1.0, 1.0, 1.0]
        assert not made.get_buffer("fp8_amax_history").any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("label", recipe_names())
def test_the_path_of_other_devices(label: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an accelerator would do, done on a CPU: the same scales bit for bit; in bfloat16 one rounding more."""
    found, steps = [], (1.0, 1e3, 0.0, 1e-3)
    for on_host in (True, False):
        monkeypatch.setattr("fp8dbg.numerics.tiles.on_host", lambda tensor, answer=on_host: answer)
        torch.manual_seed(0)
        layer = SimulatedLinear(80, 48, dtype=dtype, recipe=label)
        made: dict[str, Tensor] = {}
        for i, size in enumerate(steps):
            x = (size * normal(16, 80, seed=i)).to(dtype).requires_grad_()
            y = layer(x)
            y.backward(normal(16, 48, seed=9).to(dtype))
            assert x.grad is not None
            made |= {f"output {i}": y.detach(), f"dgrad {i}": x.grad}
        found.append((made | grads(layer), state(layer)))
    assert_equal(found[0][1], found[1][1])
    slack = 1e-5 if dtype == torch.float32 else 2.0**-6
    for name, value in found[0][0].items():
        size = value.float().square().mean().sqrt().item()
        torch.testing.assert_close(found[1][0][name], value, rtol=slack, atol=slack * size)


class Reused(nn.Module):
    """A layer called twice in one forward, with inputs of different size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(3 * torch.tanh(self.layer(x)))
        return y


@pytest.mark.parametrize("reentrant", [True, False])
class TestCheckpointing:
    """A recompute updates nothing and sees what the first pass saw: bit for bit as without checkpointing."""

    @staticmethod
    def run(model: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor], interleaved: bool) -> dict[str, Tensor]:
        """Three steps of two microbatches, one after the other or both forwards first; all that there is to compare."""
        seen = {}
        for i in range(3):
            batches = [(1 + 4 * m + i) * normal(8, 32, seed=10 * i + m).requires_grad_() for m in range(2)]
            losses = []
            for x in batches:
                with torch.autocast("cpu", torch.bfloat16):
                    losses.append(forward(model, x).float().square().sum())
                if not interleaved:
                    losses.pop().backward()  # type: ignore[no-untyped-call]
            for loss in losses:
                loss.backward()  # type: ignore[no-untyped-call]
            seen[f"loss {i}"] = torch.stack(losses) if losses else torch.zeros(0)
        return {**seen, **grads(model), **state(model)}

    @pytest.mark.parametrize("interleaved", [False, True], ids=["one by one", "in flight"])
    @pytest.mark.parametrize("build", [small, Reused])
    def test_bits_as_without(self, build: Callable[[], nn.Module], interleaved: bool, reentrant: bool) -> None:
        """Two layers, and one layer called twice; microbatches one by one, and two in flight as in a pipeline."""

        def saved(model: nn.Module, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(model, x, use_reentrant=reentrant)
            return y

        plain = self.run(simulate(build(), SHORT), lambda m, x: m(x), interleaved)
        assert_equal(self.run(simulate(build(), SHORT), saved, interleaved), plain)


class TestFallback:
    """Layers and GEMMs that stay in BF16."""

    @pytest.mark.parametrize("gemms", [("fprop",), ("dgrad",), ("wgrad",), GEMMS], ids=str)
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("dtype", ["autocast", torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("shape", [(24, 32), (2, 12, 32)], ids=str)
    def test_bits_of_nn_linear(self, shape: tuple[int, ...], dtype: Any, bias: bool, gemms: tuple[str, ...]) -> None:
        """A GEMM kept in BF16 gives the bits of ``nn.Linear``'s own, under autocast and without."""
        torch.manual_seed(0)
        plain = nn.Linear(32, 48, bias=bias)
        made = simulate(copy.deepcopy(plain), "current", {"": list(gemms)})
        found = []
        for layer in (plain, made):
            x = normal(*shape).requires_grad_()
            if dtype != "autocast":
                layer.to(dtype)
                x = x.detach().to(dtype).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
                y = layer(x)
            y.backward(normal(*y.shape, seed=1).to(y.dtype))
            assert x.grad is not None
            found.append({"fprop": y.detach(), "dgrad": x.grad, **grads(layer)})
        for name, gemm in {"fprop": "fprop", "dgrad": "dgrad", "weight": "wgrad", "bias": None}.items():
            if name in found[0]:
                same = torch.equal(found[0][name], found[1][name])
                assert same == (gemm is None or gemm in gemms), name
                assert found[0][name].dtype == found[1][name].dtype

    def test_names_globs_and_mappings(self) -> None:
        """Each way to write it; an exact name is no glob; a recipe per GEMM; a later entry wins."""

        def fallbacks(fallback: Any) -> dict[str, set[str]]:
            model = nn.ModuleDict({"a": nn.Linear(4, 4), "a:b": nn.Linear(4, 4), "c[0]": nn.Linear(4, 4)})
            simulate(model, "current", fallback)
            return {name: m.fp8_fallback for name, m in model.items() if isinstance(m, SimulatedLinear)}

        everything = set(GEMMS)
        assert fallbacks(None) == {"a": set(), "a:b": set(), "c[0]": set()}
        assert fallbacks(["a"]) == {"a": everything, "a:b": set(), "c[0]": set()}
        assert fallbacks("a*:dgrad") == {"a": {"dgrad"}, "a:b": {"dgrad"}, "c[0]": set()}
        assert fallbacks(["a:b", "c[0]:wgrad"]) == {"a": set(), "a:b": everything, "c[0]": {"wgrad"}}
        assert fallbacks({"*": ["fprop"], "a": {"fprop": "mxfp8", "wgrad": "bf16"}})["a"] == {"wgrad"}

    def test_recipes_of_their_own(self) -> None:
        """fallback includes the GEMMs that a recipe itself leaves in BF16; a plan may give GEMMs another recipe."""
        assert SimulatedLinear(4, 4, recipe="rowwise_with_gw_hp").fp8_fallback == {"wgrad"}
        layer = simulate(nn.Linear(4, 4), "delayed", {"": {"wgrad": "mxfp8", "dgrad": "bf16"}})
        assert isinstance(layer, SimulatedLinear)
        assert layer.fp8_recipe.name == "delayed"
        assert {gemm: recipe.name for gemm, recipe in layer.fp8_recipes.items()} == {
            "fprop": "delayed",
            "dgrad": "bf16",
            "wgrad": "mxfp8",
        }
        whole = simulate(nn.Linear(4, 4), "current", {"": dict.fromkeys(GEMMS, "delayed:history=2")})
        assert isinstance(whole, SimulatedLinear)
        assert whole.fp8_recipe.label == "delayed:history=2"
        with pytest.raises(UsageError, match="cannot scale by"):
            simulate(nn.Linear(4, 4), "delayed", {"": {"wgrad": "delayed:history=2"}})

    def test_a_plan_on_a_live_layer_keeps_the_state(self) -> None:
        """Falling back on one GEMM does not send the scales back to 1."""
        model = simulate(small(), SHORT)
        step(model, normal(16, 32))
        before = state(model)
        for layer in layers(model):
            layer.use(layer.fp8_recipe, {"dgrad": "bf16"})
        assert_equal(state(model), before)

    def test_unknown_names(self) -> None:
        """Layers, GEMMs and recipes that do not exist: the valid ones are listed."""
        with pytest.raises(UnknownNameError, match="Valid names: 0, 2"):
            simulate(small(), "delayed", ["head"])
        with pytest.raises(UnknownNameError, match="dgrad, fprop, wgrad"):
            simulate(small(), "delayed", ["0:backward"])
        with pytest.raises(UnknownNameError, match="delayed"):
            simulate(small(), "delay")
        with pytest.raises(UsageError, match=r"GELU has no nn\.Linear"):
            simulate(nn.GELU())


class TestModule:
    """What a module must do besides computing."""

    def test_saving_and_loading_continues_bit_for_bit(self) -> None:
        """Three steps, or two, a checkpoint and one: the same state and gradients."""
        straight = simulate(small(), SHORT)
        broken = simulate(small(), SHORT)
        for i in range(2):
            step(straight, normal(16, 32, seed=i))
            step(broken, normal(16, 32, seed=i))
        resumed = simulate(small(seed=1), SHORT)
        resumed.load_state_dict(broken.state_dict())
        for model in (straight, resumed):
            model.zero_grad()
            step(model, normal(16, 32, seed=2))
        assert_equal({**grads(resumed), **state(resumed)}, {**grads(straight), **state(straight)})

    def test_a_checkpoint_without_state_starts_at_scale_1(self) -> None:
        """Loaded strictly into a layer in use: weights arrive, scales go back to 1, and the first output is off."""
        model = simulate(small(bias=False), SHORT)
        for _ in range(2):
            healthy = step(model, 1e-3 * normal(16, 32))
        weights = {k: v for k, v in model.state_dict().items() if k.rsplit(".", 1)[-1] not in STATE}
        assert weights.keys() == small(bias=False).state_dict().keys()
        model.load_state_dict(weights)
        assert all(layer.fp8_scale("input") == (1.0, "initial") for layer in layers(model))
        spoilt = step(model, 1e-3 * normal(16, 32))
        exact = small(bias=False)(1e-3 * normal(16, 32)).detach()
        assert (spoilt - exact).norm() > 3 * (healthy - exact).norm()

    def test_objects_and_hooks_stay(self) -> None:
        """The modules, parameters and hooks are the very same ones: an optimizer made before goes on working."""
        model = small()
        modules, parameters, calls = list(model.modules()), list(model.parameters()), []
        model[0].register_forward_hook(lambda *_: calls.append(1))
        assert simulate(model) is model
        assert [id(m) for m in model.modules()] == [id(m) for m in modules]
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
        model(normal(2, 32))
        assert calls == [1]

    def test_tied_weights_and_shared_layers(self) -> None:
        """A weight shared with an embedding stays shared; a layer under two names falls back under either."""
        model = nn.ModuleDict({"embed": nn.Embedding(16, 8), "head": nn.Linear(8, 16, bias=False)})
        model["head"].weight = model["embed"].weight
        model["again"] = model["head"]
        simulate(model, "current", ["again:dgrad"])
        assert model["head"].weight is model["embed"].weight
        assert model["head"].fp8_fallback == {"dgrad"}
        model["head"](model["embed"](torch.arange(16))).sum().backward()
        assert model["embed"].weight.grad is not None

    def test_subclasses_are_left_alone(self) -> None:
        """What a subclass computes is its own business (MultiheadAttention never calls its out_proj)."""
        attention = nn.MultiheadAttention(8, 2)
        with pytest.raises(UsageError):
            simulate(attention)
        assert not isinstance(attention.out_proj, SimulatedLinear)

    def test_copies_are_independent(self) -> None:
        """A deep copy trains on without moving the original's scales."""
        model = simulate(small(), SHORT)
        step(model, normal(16, 32))
        twin, before = copy.deepcopy(model), state(model)
        step(twin, 100 * normal(16, 32))
        assert_equal(state(model), before)
        assert not torch.equal(*(layers(m)[0].get_buffer("fp8_scales") for m in (twin, model)))

    def test_repr_tells_recipe_and_fallback(self) -> None:
        """One line: the recipe, and the GEMMs that have another."""
        text = repr(simulate(nn.Linear(4, 8), "delayed:history=16", [":dgrad"]))
        assert text == (
            "SimulatedLinear(in_features=4, out_features=8, bias=True, recipe=delayed:history=16, dgrad=bf16)"
        )

    def test_compiled_models_run(self) -> None:
        """torch.compile breaks its graph at the layer and gives eager's bits, state included."""
        eager, compiled = simulate(small(), SHORT), simulate(small(), SHORT)
        run = torch.compile(compiled, backend="aot_eager")
        for i in range(3):
            x = normal(16, 32, seed=i)
            y, z = step(eager, x), step(compiled, x, lambda _, v: run(v))
            assert torch.equal(y, z)
        assert_equal({**grads(compiled), **state(compiled)}, {**grads(eager), **state(eager)})

    def test_frozen_weights_and_leaf_inputs(self) -> None:
        """Only the gradients that are asked for are computed, and an empty batch is no error."""
        layer = SimulatedLinear(32, 8, recipe="delayed")
        layer.weight.requires_grad_(False)
        x = normal(4, 32).requires_grad_()
        layer(x).sum().backward()
        assert x.grad is not None
        assert layer.weight.grad is None
        layer.weight.requires_grad_(True)
        layer(normal(4, 32)).sum().backward()
        assert layer.weight.grad is not None
        assert layer(torch.zeros(0, 32)).shape == (0, 8)

    def test_second_derivatives_are_refused(self) -> None:
        """A cast has no useful derivative: a message instead of zeros."""
        layer, x = SimulatedLinear(8, 8, recipe="current"), normal(4, 8).requires_grad_()
        (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()  # type: ignore[no-untyped-call]

    def test_simulate_is_public(self) -> None:
        """fp8dbg.simulate is this function."""
        assert fp8dbg.simulate is simulate
