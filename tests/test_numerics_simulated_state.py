"""Delayed scaling's state in simulated layers: bit-exact, saved, and moved by first passes only."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8dbg.numerics.recipes import ROLES, DelayedState, recipe_named
from fp8dbg.numerics.scaling_state import roll_
from fp8dbg.numerics.simulated import SimulatedLinear, simulate
from tests.simulated import SHORT, assert_equal, grads, normal, one_thread, small, state, step

__all__ = ["one_thread"]


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
