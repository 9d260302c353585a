"""Simulated FP8 layers as modules: saved, copied, compiled, hooked, on other devices."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fp8dbg
from fp8dbg.errors import UsageError
from fp8dbg.numerics.recipes import recipe_names
from fp8dbg.numerics.scaling_state import STATE
from fp8dbg.numerics.simulated import SimulatedLinear, simulate
from tests.simulated import SHORT, assert_equal, grads, layers, normal, one_thread, small, state, step

__all__ = ["one_thread"]


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

    def test_another_recipe_later(self) -> None:
        """Simulating again replaces the recipe, and the state where its recipe changes."""
        model = simulate(small(), SHORT)
        step(model, normal(16, 32))
        before = state(model)
        assert_equal(state(simulate(model, SHORT)), before)
        simulate(model, "mxfp8")
        assert {layer.fp8_recipe.label for layer in layers(model)} == {"mxfp8"}
        assert not state(model)
        simulate(model, "delayed")
        assert all(layer.fp8_scale("weight") == (1.0, "initial") for layer in layers(model))

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
