"""A fallback plan for Megatron-Core: ``--te-precision-config-file`` and flags."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from fp8dbg.hooks import nvidia_te_fallback, plans

_RECIPES = {
    "current": "fp8_quantization_recipe: tensorwise",
    "tensorwise": "fp8_quantization_recipe: tensorwise",
    "block": "fp8_quantization_recipe: blockwise",
    "mxfp8": "fp8_quantization_recipe: mxfp8",
    "nvfp4": "fp4_quantization_recipe: nvfp4",
}
_EXPERT = re.compile(r"\.gemm_\d+$")
_LAYER_NUMBER = re.compile(r"(?<=\bdecoder\.layers\.)\d+")


def write_fallback(plan: plans.Plan, stages: Sequence[int] = (), model_layers: Collection[str] = ()) -> str:
    """The plan as the YAML of ``--te-precision-config-file``, with the flags in its comments.

    Args:
        plan: layers by their global names.
        stages: decoder layers on each pipeline stage, e.g. (16, 16); () means that there is one stage.
        model_layers: every linear layer of the model, if whole decoder layers at either end should also be given as
            --first-last-layers-bf16.

    Megatron switches whole modules: a plan for some GEMMs keeps the module's other GEMMs in BF16 too, one for an
    expert of a grouped linear all its experts, and says so, as it does of experts whose recipe is another than the one
    that all of them get. A recipe that the file cannot name is said in a comment and the layer left as it is.
    """
    names: dict[str, str] = {}
    matchers, notes = [], []
    for number, (layer, (recipes, experts)) in enumerate(_by_module(plan).items(), 1):
        recipe, note = _recipe_of(layer, recipes)
        notes += note + plans.comment(_together(layer, experts, recipe))
        if recipe is None:
            continue
        pattern, hit = _local(layer, stages)
        notes += plans.comment(hit)
        name = names.setdefault(recipe, f"fp8dbg_{plans.recipe_name(recipe)}_{len(names)}")
        matchers += _matcher(number, pattern, name)
    configs = [line for recipe, name in names.items() for line in _config(name, recipe)]
    lines = [
        *plans.comment("fp8dbg fallback plan for Megatron-Core (0.16 and later)."),
        *plans.comment("Use: --te-precision-config-file <this file>, together with the run's own --fp8-format."),
        *plans.described(plan),
        *_end_layers(plan, model_layers),
        *notes,
    ]
    return plans.text_of([*lines, *_mapping("configs", configs), *_mapping("matchers", matchers)])


def _by_module(plan: plans.Plan) -> dict[str, tuple[plans.Recipes, dict[str, plans.Recipes]]]:
    """Module -> its recipes by GEMM, and those of each layer of the plan that is it or one of its experts."""
    modules: dict[str, tuple[plans.Recipes, dict[str, plans.Recipes]]] = {}
    for layer, recipes in plans.by_layer(plan).items():
        module = _EXPERT.sub("", layer)
        merged, planned = modules.setdefault(module, ({}, {}))
        merged.update({g: label for g, label in recipes.items() if merged.get(g) != "bf16"})
        planned[layer] = recipes
    return modules


def _together(module: str, planned: dict[str, plans.Recipes], given: str | None) -> str:
    """What must be said where a module's experts are layers of their own: it is one, and has one recipe."""
    experts = [layer.removeprefix(f"{module}.") for layer in planned if layer != module]
    if not experts:
        return ""
    asked = {layer.removeprefix(f"{module}."): set(recipes.values()) - {given} for layer, recipes in planned.items()}
    others = [f"{label} for {layer}" for layer, labels in asked.items() for label in sorted(labels)]
    said = f"{module}: {', '.join(experts)} planned; all its experts go together."
    begin = f"They have one recipe, {given}; not given" if given else "Not given"
    return f"{said} {begin}: {', '.join(others)}." if others else said


def _mapping(name: str, lines: list[str]) -> list[str]:
    return [f"{name}:", *lines] if lines else [f"{name}: {{}}"]


def _recipe_of(layer: str, recipes: plans.Recipes) -> tuple[str | None, list[str]]:
    """The one recipe label the module gets, or None, and what must be said about it."""
    labels = set(recipes.values())
    label = "bf16" if "bf16" in labels else next(iter(recipes.values()))
    if label != "bf16" and plans.recipe_name(label) not in _RECIPES:
        reason = f"{layer}: this file cannot name recipe {label}, so the module is left as it is."
        return None, plans.comment(reason)
    if len(labels) == 1 and plans.is_whole(recipes):
        return label, []
    asked = ", ".join(f"{gemm} in {recipe}" for gemm, recipe in recipes.items())
    said = f"{layer}: asked for {asked}; Megatron switches whole modules, so all three of its GEMMs go to {label}."
    return label, plans.comment(said + " For one GEMM use Transformer Engine's debug features.")


def _local(layer: str, stages: Sequence[int]) -> tuple[str, str]:
    """The matcher's pattern, which is local to a stage, and a sentence about the other layers that it will hit."""
    found = _LAYER_NUMBER.search(layer)
    if found is None or len(stages) < 2:
        return layer, ""
    stage, local = 0, int(found[0])
    while stage < len(stages) - 1 and local >= stages[stage]:
        local -= stages[stage]
        stage += 1
    starts = [sum(stages[:i]) for i in range(len(stages))]
    others = [start + local for i, start in enumerate(starts) if i != stage and local < stages[i]]
    pattern = _LAYER_NUMBER.sub(str(local), layer)
    said = (
        f"{layer}: a matcher sees the number within its pipeline stage ({pattern}), so it also matches "
        f"decoder layer {', '.join(map(str, others))} on the other stages; one global layer alone cannot be expressed."
    )
    return pattern, said if others else ""


def _config(name: str, label: str) -> list[str]:
    fields = [] if label == "bf16" else [_RECIPES[plans.recipe_name(label)]]
    if fields and fields[0].startswith("fp8"):
        fields.append(f"fp8_format: {'hybrid' if plans.is_hybrid(label) else 'e4m3'}")
    return [
        f"  {name}:",
        '    transformer_engine_config_type: "TEQuantizationParams"',
        f"    training_recipe: {{{', '.join(fields)}}}" + ("" if fields else "  # no recipe: BF16"),
    ]


def _matcher(number: int, pattern: str, config: str) -> list[str]:
    literal = re.sub(r"([\[*?])", r"[\1]", pattern)
    return [
        f"  fp8dbg_layer_{number}:",
        '    type: "glob"',
        f"    pattern: {plans.quoted(literal)}",
        f"    config: {config}",
        "    enabled: true",
    ]


def _end_layers(plan: plans.Plan, model_layers: Collection[str]) -> list[str]:
    """The plan's whole BF16 decoder layers at either end, as flags, if it has any."""
    planned = {name for name, recipes in plans.by_layer(plan).items() if plans.is_whole(plans.in_bf16(recipes))}
    linears: dict[int, set[str]] = {}
    for name in model_layers:
        found = _LAYER_NUMBER.search(name)
        if found is not None:
            linears.setdefault(int(found[0]), set()).add(name)
    whole = [linears[number] <= planned for number in sorted(linears)]
    start, end = _leading(whole), _leading(whole[::-1])
    if not start and not end:
        return []
    flags = f"--first-last-layers-bf16 --num-layers-at-start-in-bf16 {start} --num-layers-at-end-in-bf16 {end}"
    return plans.comment(
        f"Its layers at either end can be given as flags too: {flags}. "
        "Delayed scaling refuses them: it uses one autocast around all layers."
    )


def _leading(flags: list[bool]) -> int:
    return flags.index(False) if False in flags else len(flags)


def write_debug_features(plan: plans.Plan, version: tuple[int, int] = (2, 20)) -> str:
    """The plan GEMM by GEMM, as Transformer Engine debug YAML under Megatron's 1-based global layer numbers."""
    return nvidia_te_fallback.write_fallback(plan, version, first_layer=1)
