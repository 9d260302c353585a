"""Simulated FP8 layers: what their GEMMs compute, and the GEMMs that fall back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8dbg.errors import UnknownNameError, UsageError
from fp8dbg.numerics import simulated_gemms
from fp8dbg.numerics.casting import contraction_axis
from fp8dbg.numerics.recipes import GEMMS, ROLES, Recipe, recipe_named, recipe_names
from fp8dbg.numerics.simulated import SimulatedLinear, simulate
from tests import slow, slow_blocks
from tests.simulated import SHORT, assert_equal, grads, layers, normal, one_thread, small, state, step

__all__ = ["one_thread"]


STATELESS = [name for name in recipe_names() if name != "delayed"]


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
    @pytest.mark.parametrize(
        ("dtype", "has_units"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)]
    )
    def test_output_and_gradients(
        self, label: str, dtype: torch.dtype, has_units: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All three GEMMs and the bias, for a batch of sequences: float32 to 1e-5; bfloat16 rounded once.

        On a machine that multiplies bfloat16 itself, and on one that does not.
        """
        monkeypatch.setattr(simulated_gemms, "_multiplies_bfloat16", lambda device: has_units)
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
        model = small()
        with pytest.raises(UsageError, match="cannot scale by"):
            simulate(model, "delayed", {"2": {"wgrad": "delayed:history=2"}})
        assert not layers(model)

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
