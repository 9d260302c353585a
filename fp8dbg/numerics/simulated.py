"""Linear layers that compute all three GEMMs as an FP8 recipe would, on any device: FP8 training without FP8 units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from fp8dbg.errors import UsageError
from fp8dbg.numerics.arguments import a_module
from fp8dbg.numerics.casting import OPERANDS
from fp8dbg.numerics.fallbacks import Fallback, delayed_recipe, recipes_per_gemm
from fp8dbg.numerics.recipes import GEMMS, Recipe, recipe_named
from fp8dbg.numerics.scaling_state import STATE, DelayedScaling, Scale
from fp8dbg.numerics.simulated_gemms import SimulatedGemms
from fp8dbg.text import in_unicode

Model = TypeVar("Model", bound=nn.Module)


class SimulatedLinear(nn.Linear):
    """``nn.Linear`` whose GEMMs see what an FP8 recipe's would: operands cast and scaled, products summed in float32.

    Operands are cast from the dtype that ``nn.Linear`` would multiply in (the autocast dtype, else the input's), so a
    GEMM in BF16 gives ``nn.Linear``'s own bits. Gradients pass through the casts unchanged. Weight and bias keep their
    dtype; nothing is random. Made by ``simulate``, or directly:

    Args:
        recipe: a recipe or its label; for GEMMs that ``recipes`` does not name.
        recipes: another recipe per GEMM; "bf16" keeps one as it is.

    Under delayed scaling the state is in the buffers ``fp8_scales``, ``fp8_amax_history`` and ``fp8_updates``, float32
    whatever the model is cast to; see ``DelayedScaling`` for when it moves: training forwards and their backwards only,
    never a recompute or ``eval()``. A checkpoint without it loads and starts again at scale 1, as Transformer Engine
    does when its extra state is lost: expect a spike. Under DistributedDataParallel the buffers of rank 0 go to all
    (its ``broadcast_buffers``); otherwise every rank keeps its own scale.
    """

    fp8_recipe: Recipe
    """The recipe of the layer; a GEMM may have another."""
    fp8_recipes: dict[str, Recipe]
    """The recipe of each GEMM."""
    _scaling: DelayedScaling | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe = "delayed",
        recipes: Mapping[str, str | Recipe] | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.use(recipe, recipes or {})

    @classmethod
    def adopt(cls, layer: nn.Module, recipe: str | Recipe, recipes: Mapping[str, str | Recipe]) -> SimulatedLinear:
        """Turn an ``nn.Linear`` into a simulated one in place: same object, parameters, hooks and names."""
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer.use(recipe, recipes)
        return layer

    def use(self, recipe: str | Recipe, recipes: Mapping[str, str | Recipe]) -> None:
        """Set the layer's recipe and those of single GEMMs; delayed scaling's state stays if its recipe does."""
        self.fp8_recipe = recipe_named(recipe)
        self.fp8_recipes = {gemm: recipe_named(recipes.get(gemm, self.fp8_recipe)) for gemm in GEMMS}
        if len(set(self.fp8_recipes.values())) == 1:
            self.fp8_recipe = next(iter(self.fp8_recipes.values()))
        wanted = delayed_recipe(self.fp8_recipes.values())
        present = self.__dict__.get("_scaling")
        if present is None or present.recipe != wanted:
            for name in STATE:
                self._buffers.pop(name, None)
            self._scaling = DelayedScaling(self, wanted) if wanted else None

    @property
    def fp8_fallback(self) -> set[str]:
        """The GEMMs that run in BF16, by the plan or by the recipe itself."""
        return {gemm for gemm, recipe in self.fp8_recipes.items() if not recipe.quantises(gemm)}

    def fp8_scale(self, role: str) -> tuple[Scale | None, str]:
        """The scale in force, and where it comes from.

        For input and weight: the scale of the last forward's cast. For grad_output: that of the next backward's cast,
        so read it before the layer's own backward runs, for instance in a hook on the layer's output. A float on a
        CPU, a 0-d tensor elsewhere; "initial" if no update has ever set it, else "live". (None, "emulated") where no
        scale is kept: the recipe chooses one from every tensor.
        """
        if self._scaling is None or role not in self._kept_roles(GEMMS):
            return None, "emulated"
        return self._scaling.scale(self, role)

    # compiled loops and state cannot be traced; torch.compiler.disable would import all of the compiler at once
    @_disable_dynamo
    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``: input [.., in_features], any floating dtype autocast or the weight's."""
        if self.fp8_fallback == set(GEMMS):
            return super().forward(input)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        with torch.autocast(kind, enabled=False):
            x, weight = input.to(dtype), self.weight.to(dtype)
            bias = None if self.bias is None else self.bias.to(dtype)
            scales = self._forward_scales(x, weight)
            y: Tensor = SimulatedGemms.apply(x, weight, bias, self.fp8_recipes, scales, self)  # type: ignore[no-untyped-call]
            return y

    def _kept_roles(self, gemms: Iterable[str]) -> set[str]:
        """The roles that these GEMMs cast under a scale kept in the layer."""
        return {role for gemm in gemms if self.fp8_recipes[gemm].name == "delayed" for role in OPERANDS[gemm]}

    def _forward_scales(self, x: Tensor, weight: Tensor) -> dict[str, Scale]:
        roles = self._kept_roles(GEMMS)
        operands = {role: t for role, t in (("input", x), ("weight", weight)) if role in roles}
        return self._scaling.forward_scales(self, operands) if self._scaling else {}

    def backward_scales(self, grad_output: Tensor) -> dict[str, Scale]:
        """The kept scale of this backward's cast of the output gradient, if there is one; called once per backward."""
        if self._scaling is None or "grad_output" not in self._kept_roles(("dgrad", "wgrad")):
            return {}
        return {"grad_output": self._scaling.backward_scale(self, grad_output)}

    def reset_parameters(self) -> None:
        """New weights as in ``nn.Linear``, and delayed scaling's state back to scale 1."""
        super().reset_parameters()
        if "_scaling" in self.__dict__ and self._scaling:  # nn.Linear's constructor comes here before there is a recipe
            self._scaling.reset(self)

    def extra_repr(self) -> str:
        """nn.Linear's, the recipe, and the GEMMs in BF16."""
        others = {g: r.label for g, r in self.fp8_recipes.items() if r != self.fp8_recipe}
        changed = "".join(f", {gemm}={label}" for gemm, label in others.items())
        return f"{super().extra_repr()}, recipe={self.fp8_recipe.label}{changed}"

    def _apply(self, fn: Any, recurse: bool = True) -> SimulatedLinear:
        """Move with the model, but never to a narrower dtype: a scale in bfloat16 would be another scale."""
        before = {name: self._buffers[name] for name in STATE if name in self._buffers}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            now = self._buffers[name]
            if old is not None and now is not None and now.dtype != old.dtype:
                self._buffers[name] = old.to(now.device)
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)
        names = [prefix + name for name in STATE]
        if self._scaling and not any(name in state_dict for name in names):
            missing[:] = [key for key in missing if key not in names]
            self._scaling.reset(self)


def simulate(model: Model, recipe: str | Recipe = "delayed", fallback: Fallback | None = None) -> Model:
    """Turn every ``nn.Linear`` of a model, in place, into one that computes as the recipe would; returns the model.

    Do so before wrapping the model (DDP, FSDP, compile) and before loading a checkpoint that has scaling state.
    Parameters, tied weights, hooks and names stay. Subclasses of ``nn.Linear`` are left alone, as what they compute is
    their own; layers that are simulated already get the new recipe.

    Args:
        recipe: a recipe or its label, as "delayed:history=16".
        fallback: what stays in BF16: layers or "layer:gemm", globs allowed, as ["lm_head", "blocks.0.*:dgrad"]; or a
            mapping from layers to GEMMs, or from layers to a recipe per GEMM.

    A name that does not exist is an UnknownNameError; a model without ``nn.Linear`` a UsageError.
    """
    recipe = recipe_named(recipe)
    named = a_module(model).named_modules(remove_duplicate=False)
    layers = {in_unicode(name): module for name, module in named if type(module) in (nn.Linear, SimulatedLinear)}
    if not layers:
        raise UsageError(f"{type(model).__name__} has no nn.Linear to simulate.", "Simulate before wrapping the model.")
    chosen: dict[nn.Module, dict[str, Recipe]] = {}
    for name, recipes in recipes_per_gemm(list(layers), recipe, fallback).items():
        # of a layer that goes by two names, an exception under either of them counts
        changed = {gemm: r for gemm, r in recipes.items() if r != recipe}
        chosen.setdefault(layers[name], {}).update(changed)
    for changed in chosen.values():  # all are checked before one is changed
        delayed_recipe(changed.get(gemm, recipe) for gemm in GEMMS)
    for layer, changed in chosen.items():
        SimulatedLinear.adopt(layer, recipe, changed)
    return model
