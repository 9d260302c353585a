"""A fallback plan applied to live Transformer Engine modules: an autocast of their own around their forward."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from fp8dbg.errors import UnknownNameError
from fp8dbg.hooks import nvidia_te_state as state
from fp8dbg.hooks import plans
from fp8dbg.hooks.megatron_names import global_names
from fp8dbg.recording.names import named_layers

Context = Callable[[], AbstractContextManager[Any]]

_FUSED = (
    "one autocast decides for all the operations that te.ops' fuser runs together; it is left as before. "
    "Call what should be in BF16 in a te.autocast(enabled=False) of its own."
)

_BACKWARD = {"dgrad": "bf16", "wgrad": "bf16"}
_WHOLE_BF16 = dict.fromkeys(plans.GEMMS, "bf16")


def apply_fallback(model: nn.Module, plan: plans.Plan) -> list[str]:
    """Make the plan hold in a live model, in place; the modules' own hooks, parameters and state stay as they are.

    A whole module goes to BF16, or to another recipe than delayed scaling, in an autocast of its own inside the
    run's; a plan for some of a module's GEMMs takes the others along to BF16. Its backward alone goes to BF16 where
    the version has ``backward_override`` (2.16); that override needs a run whose recipe is
    not delayed scaling. Every rank must apply the same plan: amax reductions are collective.

    Returns:
        A sentence for each module of which more or less than planned could be done.

    Raises:
        UnknownNameError: a layer of the plan is no Transformer Engine layer of this model.
    """
    rename = global_names(model)
    modules = {rename(name): module for name, _, module in named_layers(model) if state.kind_of(module)}
    owner = {layer: name for name, module in modules.items() for layer in state.layer_names(name, module)}
    wanted = plans.by_layer(plan)
    for layer in wanted:
        if layer not in owner:
            raise UnknownNameError("Transformer Engine layer", layer, list(owner))
    said = []
    for name in dict.fromkeys(owner[layer] for layer in wanted):
        if state.kind_of(modules[name]) == state.OPERATION:
            said.append(f"{name}: {_FUSED}")
            continue
        layers = state.layer_names(name, modules[name])
        context, sentence = _context_for(name, [wanted.get(layer, {}) for layer in layers])
        if sentence:
            said.append(sentence)
        if context is not None:
            _wrap_forward(modules[name], context)
    return said


def _context_for(name: str, recipes: list[plans.Recipes]) -> tuple[Context | None, str]:
    """The context for a module's forward, or None; and what must be said about it."""
    first = recipes[0]
    alike = all(other == first for other in recipes)
    if alike and first == _WHOLE_BF16:
        return _in_bf16, ""
    if alike and first == _BACKWARD and state.te_version() >= (2, 16):
        return _backward_in_bf16, ""
    labels = {label for one in recipes for label in one.values()}
    if alike and plans.is_whole(first) and len(labels) == 1 and plans.recipe_name(first["fprop"]) in _THEIRS:
        return functools.partial(_in_recipe, first["fprop"]), ""
    if labels == {"bf16"}:
        return _in_bf16, (
            f"{name}: an autocast switches the whole module, so all its GEMMs go to bf16; "
            "Transformer Engine's debug features (write_fallback) keep single ones."
        )
    asked = ", ".join(sorted(labels))
    return None, f"{name}: an autocast around the module cannot give it {asked} as planned; it is left as before."


def _wrap_forward(module: nn.Module, context: Context) -> None:
    forward = module.forward

    @functools.wraps(forward)
    def in_context(*args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    module.forward = in_context  # on this instance: subclasses and hooks see no change


def _autocast(enabled: bool, recipe: Any = None) -> AbstractContextManager[Any]:
    import transformer_engine.pytorch as te

    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe)  # type: ignore[no-any-return]
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)  # type: ignore[no-any-return]


def _running() -> Any:
    """The recipe of the autocast around this call, or None outside of one."""
    from transformer_engine.pytorch import fp8

    manager = fp8.FP8GlobalStateManager
    return manager.get_fp8_recipe() if manager.is_fp8_enabled() else None


def _in_bf16() -> AbstractContextManager[Any]:
    return _autocast(False) if _running() is not None else nullcontext()


def _in_recipe(label: str) -> AbstractContextManager[Any]:
    return _autocast(True, _theirs(label)) if _running() is not None else nullcontext()


def _backward_in_bf16() -> AbstractContextManager[Any]:
    running = _running()
    if running is None or type(running).__name__ == "DelayedScaling":
        return nullcontext()
    return _autocast(True, _with_override(running))


_OVERRIDDEN: dict[str, Any] = {}


def _with_override(recipe: Any) -> Any:
    """The recipe with its backward in high precision; one object per recipe, since state is found by identity."""
    text = str(recipe)
    if text not in _OVERRIDDEN:
        made = copy.copy(recipe)
        made.backward_override = "high_precision"
        made.__dict__.pop("_cached_repr", None)
        _OVERRIDDEN[text] = made
    return _OVERRIDDEN[text]


_THEIRS = {
    "current": "Float8CurrentScaling",
    "current_pow2": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}


@functools.lru_cache(maxsize=32)
def _theirs(label: str) -> Any:
    """Transformer Engine's recipe for a label; one object per label, since its state is found by identity."""
    from transformer_engine.common import recipe as recipes

    name = plans.recipe_name(label)
    arguments: dict[str, Any] = {}
    if name != "nvfp4":
        arguments["fp8_format"] = recipes.Format.HYBRID if plans.is_hybrid(label) else recipes.Format.E4M3
    made = getattr(recipes, _THEIRS[name])(**arguments)
    if name == "current_pow2":  # its arguments for this, use_power_2_scales too, change nothing
        for cast in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            setattr(made, cast, recipes.QParams(power_2_scale=True))
    return made
