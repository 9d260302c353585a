"""Plain PyTorch: ``nn.Linear`` in BF16 or wider, and layers that simulate an FP8 recipe. The reference adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fp8dbg.errors import UnknownNameError
from fp8dbg.hooks import Handles, attach_each, plans
from fp8dbg.hooks.pytorch_fallback import write_fallback as write_fallback
from fp8dbg.numerics.simulated import SimulatedLinear
from fp8dbg.recording.layer import Gradients, Layer, ScaleInForce
from fp8dbg.recording.names import named_layers

if TYPE_CHECKING:
    from fp8dbg.numerics.recipes import Recipe
    from fp8dbg.recording.recorder import Recorder

HOST = "pytorch"


def claims(module: nn.Module) -> bool:
    """Every ``nn.Linear``, subclasses included: more particular adapters are asked first."""
    return isinstance(module, nn.Linear)


def attach(model: nn.Module, recorder: Recorder) -> Handles:
    """Hook every linear layer that no other host has claimed."""
    return Handles(attach_each(model, recorder, claims, lambda *found: recorder.hook(_layer(*found))))


def _layer(name: str, path: str, module: nn.Module) -> Layer:
    if isinstance(module, SimulatedLinear):
        return SimulatedLayer(name, module, path)
    return LinearLayer(name, module, path)


class LinearLayer(Layer):
    """``nn.Linear``: it reads what it is given, and the weight that it holds."""

    def ahead(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Tensor | None]:
        """The argument and the weight."""
        return (args[0] if args else next(iter(kwargs.values()), None)), self.weight()


class SimulatedLayer(LinearLayer):
    """A layer that computes as an FP8 recipe would: its recipe and scales are in force, its results are FP8's."""

    host = "simulated"
    nodes = (*Layer.nodes, "SimulatedGemmsBackward")
    module: SimulatedLinear

    def __init__(self, name: str, module: SimulatedLinear, path: str) -> None:
        super().__init__(name, module, path)
        self._read: Mapping[str, Recipe] | None = None
        self._recipe: Recipe | None = None

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the GEMMs that are quantised; None where the fallback plan leaves none."""
        recipes = self.module.fp8_recipes
        if recipes is not self._read:
            quantised = [recipe for gemm, recipe in recipes.items() if recipe.quantises(gemm)]
            main = self.module.fp8_recipe
            self._recipe = main if main in quantised else next(iter(quantised), None)
            self._read = recipes
        return self._recipe

    def recipe_of(self, gemm: str) -> Recipe | None:
        """As the plan says."""
        recipe = self.module.fp8_recipes[gemm]
        return recipe if recipe.quantises(gemm) else None

    def scale(self, role: str) -> ScaleInForce:
        """Delayed scaling's; (None, None) where every tensor chooses its own."""
        scale, source = self.module.fp8_scale(role)
        return (None, None) if scale is None else (scale, source)

    def results(self, node: str, gradients: tuple[Tensor | None, ...]) -> Gradients:
        """In the order of the simulated function's arguments: input, weight, bias."""
        if node == "SimulatedGemmsBackward":
            return gradients[0], gradients[1]
        return super().results(node, gradients)


def apply_fallback(model: nn.Module, plan: plans.Plan) -> list[str]:
    """Give simulated layers the recipes of a plan, in place. A plain ``nn.Linear`` is in BF16 already.

    Returns:
        A sentence for each layer that is asked for another FP8 recipe and does not simulate any.

    Raises:
        UnknownNameError: a layer of the plan is no linear layer of this model; nothing has been changed.
    """
    layers = {name: module for name, _, module in named_layers(model) if claims(module)}
    wanted = plans.by_layer(plan)
    for name in wanted:
        if name not in layers:
            raise UnknownNameError("linear layer", name, list(layers))
    said = []
    for name, recipes in wanted.items():
        module = layers[name]
        if isinstance(module, SimulatedLinear):
            module.use(module.fp8_recipe, {**module.fp8_recipes, **recipes})
        elif set(recipes.values()) != {"bf16"}:
            said.append(f"{name} is a plain nn.Linear: it stays in high precision. Use fp8dbg.simulate(...).")
    return said
