"""A fallback plan for torchao: as Python that converts a model, as torchtitan flags, and applied to a live model."""

from __future__ import annotations

from typing import Any

from fp8dbg.hooks import plans

FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")

CASTS = {
    "fprop": ("cast_config_input", "cast_config_weight"),
    "dgrad": ("cast_config_grad_output", "cast_config_weight_for_grad_input"),
    "wgrad": ("cast_config_input_for_grad_weight", "cast_config_grad_output_for_grad_weight"),
}
"""GEMM -> the fields of Float8LinearConfig that hold the casts of its operands: both are float8 or neither is."""

_MODULE = '''
import dataclasses

from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType, convert_to_float8_training

# Layer -> the recipe of the GEMMs that differ from the recipe of the run.
PLAN = {
@PLAN@
}

CASTS = {
    "fprop": ("cast_config_input", "cast_config_weight"),
    "dgrad": ("cast_config_grad_output", "cast_config_weight_for_grad_input"),
    "wgrad": ("cast_config_input_for_grad_weight", "cast_config_grad_output_for_grad_weight"),
}


def config_for(recipe, gemms=(), emulate=False):
    """The recipe's configuration with these GEMMs in high precision."""
    base = Float8LinearConfig.from_recipe_name(recipe)
    fields = {name: dataclasses.replace(getattr(base, name)) for pair in CASTS.values() for name in pair}
    for gemm in gemms:
        for name in CASTS[gemm]:  # a fresh object each time: torchao writes into it
            fields[name] = CastConfig(scaling_type=ScalingType.DISABLED, target_dtype=fields[name].target_dtype)
    return dataclasses.replace(base, emulate=emulate, **fields)


def fits(module, name):
    """float8 GEMMs on a GPU want multiples of 16."""
    return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0


def module_filter_fn(module, name):
    """For a convert_to_float8_training call of your own: everything that the plan does not name."""
    return fits(module, name) and name not in PLAN


def convert(model, recipe=@RECIPE@, emulate=False, also=fits):
    """Convert the model's linear layers to float8 training, each as the plan says; ``also`` is your own filter."""
    convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: module_filter_fn(module, name) and also(module, name),
        config=config_for(recipe, emulate=emulate),
    )
    for layer, gemms in PLAN.items():
        recipes = {gemms.get(gemm, recipe) for gemm in CASTS} - {"bf16"}
        if recipes:  # one call per layer, so that each gets its own configuration
            config = config_for(*recipes, [gemm for gemm in gemms if gemms[gemm] == "bf16"], emulate)
            convert_to_float8_training(model, module_filter_fn=lambda _, name, l=layer: name == l, config=config)
    return model
'''


def write_fallback(plan: plans.Plan, recipe: str = "rowwise") -> str:
    """The plan as a Python file with ``convert(model)``, and torchtitan's flags in its comments.

    ``recipe`` is the recipe of the run: tensorwise, rowwise or rowwise_with_gw_hp. A GEMM that should follow a recipe
    that torchao's float8 layers do not have, or one that differs from its layer's other FP8 GEMMs, is named in a
    comment and left as it is.
    """
    layers, notes = expressible(plan, recipe)
    entries = [f"    {layer!r}: {recipes!r}," for layer, recipes in layers.items()]
    body = _MODULE.replace("@PLAN@", "\n".join(entries) or "    # nothing").replace("@RECIPE@", repr(recipe))
    head = [
        *plans.comment("fp8dbg fallback plan for torchao float8 training: import this file and call convert(model)."),
        *plans.described(plan),
        *[line for note in notes for line in plans.comment(note)],
        *plans.comment("torchtitan:"),
        *[f"#   {line}" for line in torchtitan_flags(plan, recipe).splitlines()],
    ]
    return "\n".join(head) + "\n" + body


def expressible(plan: plans.Plan, recipe: str) -> tuple[dict[str, plans.Recipes], list[str]]:
    """The part of the plan that Float8Linear can follow under ``recipe``, and a sentence for each thing it cannot."""
    layers: dict[str, plans.Recipes] = {}
    notes = []
    for layer, recipes in plans.by_layer(plan).items():
        kept, said = _of_one_layer(layer, recipes, recipe)
        notes += said
        if kept:
            layers[layer] = kept
    return layers, notes


def _of_one_layer(layer: str, recipes: plans.Recipes, own: str) -> tuple[plans.Recipes, list[str]]:
    refused = plans.refused(recipes, FLOAT8_RECIPES)
    said = [
        f"{layer}: a Float8Linear has no recipe {label}, so {plans.spelled(gemms)} left as before."
        for label, gemms in refused.items()
    ]
    kept = {gemm: label for gemm, label in recipes.items() if label not in refused}
    others = {kept.get(gemm, own) for gemm in plans.GEMMS} - {"bf16"}
    if len(others) > 1:
        said.append(
            f"{layer}: one Float8Linear follows one float8 recipe, so its GEMMs cannot follow "
            f"{' and '.join(sorted(others))} together; only its BF16 GEMMs are set."
        )
        kept = {gemm: label for gemm, label in kept.items() if label == "bf16"}
    return kept, said


def torchtitan_flags(plan: plans.Plan, recipe: str = "rowwise") -> str:
    """The plan as torchtitan 0.2's command-line flags, with ``#`` sentences for what they cannot say.

    The filter takes substrings of layer names, so it knows whole layers only. torchtitan 0.3 has converters in Python
    instead (read in its 0.3.0: components/quantization/float8.py); what to write there is said in a sentence.
    """
    whole: list[str] = []
    partial: list[str] = []
    for layer, recipes in plans.by_layer(plan).items():
        (whole if plans.is_whole(plans.in_bf16(recipes)) else partial).append(layer)
    lines = ['--model.converters="quantize.linear.float8"', f"--quantize.linear.float8.recipe_name={recipe}"]
    if whole:
        lines.append(f"--quantize.linear.float8.filter_fqns={plans.quoted(','.join(whole))}")
        lines += plans.comment(
            "filter_fqns matches substrings: a layer whose name contains one of these stays in BF16 too."
        )
    lines += plans.comment(_for_config_registry(whole, recipe))
    for layer in partial:
        lines += plans.comment(
            f"{layer}: torchtitan's flags keep whole layers only; use convert(model) from this file."
        )
    return "\n".join(lines)


def _for_config_registry(layers: list[str], recipe: str) -> str:
    if recipe == "tensorwise":
        return "torchtitan 0.3 has no such flags and no recipe tensorwise."
    converter = f"Float8LinearConverter.Config(recipe_name={recipe!r}, filter_fqns={layers!r})"
    return f"torchtitan 0.3 has no such flags; among the converters of its config_registry: {converter}"


def config_without(base: Any, gemms: tuple[str, ...]) -> Any:
    """``base`` (a Float8LinearConfig) with these GEMMs in high precision; nothing of ``base`` is changed."""
    import dataclasses

    from torchao.float8 import CastConfig, ScalingType

    fields = {name: dataclasses.replace(getattr(base, name)) for pair in CASTS.values() for name in pair}
    for gemm in gemms:
        for name in CASTS[gemm]:
            # A fresh object each time: Float8LinearConfig writes into the ones it is given.
            fields[name] = CastConfig(scaling_type=ScalingType.DISABLED, target_dtype=fields[name].target_dtype)
    return dataclasses.replace(base, **fields)


def apply_fallback(model: Any, plan: plans.Plan) -> list[str]:
    """Make the plan hold in a live model, in place, before its first step or between steps.

    GEMMs that go to BF16 are switched off in their layer's own configuration; a layer that wants another float8
    recipe gets that recipe's casts. Parameters, and optimizers that hold them, stay as they are.

    Returns:
        A sentence for each thing that torchao cannot do.

    Raises:
        UnknownNameError: a layer of the plan is no float8 layer of this model.
    """
    import dataclasses

    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    from fp8dbg.errors import UnknownNameError
    from fp8dbg.recording.names import named_layers

    layers = {name: module for name, _, module in named_layers(model) if isinstance(module, Float8Linear)}
    said = []
    for layer, recipes in plans.by_layer(plan).items():
        if layer not in layers:
            raise UnknownNameError("torchao float8 layer", layer, list(layers))
        module = layers[layer]
        kept, notes = _of_one_layer(layer, recipes, "the recipe it has")
        said += notes
        base: Any = module.config
        other = next((label for label in kept.values() if label != "bf16"), None)
        if other is not None:
            base = dataclasses.replace(Float8LinearConfig.from_recipe_name(other), emulate=base.emulate)
        module.config = config_without(base, plans.in_bf16(kept))
    return said
