"""A fallback plan for Transformer Engine, as the YAML of its debug features."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fp8dbg.hooks import plans

FEATURE_NAMES: tuple[tuple[tuple[int, int], str, str], ...] = (
    ((2, 13), "DisableQuantizationLayer", "DisableQuantizationGEMM"),
    ((2, 4), "DisableFP8Layer", "DisableFP8GEMM"),
)
"""From which version on: the debug feature for a whole layer, and the one for some GEMMs. Before 2.4: none."""

_OPERANDS = {"fprop": ("activation", "weight"), "dgrad": ("gradient", "weight"), "wgrad": ("gradient", "activation")}

_USE = (
    "Load it before the first Transformer Engine module is built: nvdlfw_inspect.api.initialize("
    "config_file=<this file>, feature_dirs=[<transformer_engine>/debug/features]); name the layers with "
    "nvdlfw_inspect.api.infer_and_assign_layer_names(model); call nvdlfw_inspect.api.step() after each step."
)
_COST = (
    "These layers stay on the debug path at every iteration: no CUDA graphs, no userbuffer overlap, no CPU offload, "
    "unfused norms and activations. Good for trying a plan; for a long run prefer te.autocast(enabled=False) around "
    "them, or Megatron's --te-precision-config-file."
)


def write_fallback(plan: plans.Plan, version: tuple[int, int] = (2, 20), first_layer: int = 0) -> str:
    """The plan as YAML for nvdlfw_inspect.

    Args:
        plan: layers and GEMMs.
        version: major and minor version of Transformer Engine, which decides the features' names.
        first_layer: the number that infer_and_assign_layer_names gives the first layer: 1 for Megatron models.

    A recipe that no debug feature can give is named in a comment, and that layer left as it is.
    """
    names = _features(version)
    lines = plans.comment(f"fp8dbg fallback plan for Transformer Engine {version[0]}.{version[1]} (debug features).")
    if names is None:
        return plans.text_of([*lines, *plans.comment(_too_old(version)), *plans.described(plan)])
    lines += [*plans.comment(_USE), *plans.comment(_COST), *plans.described(plan), *_notes(plan)]
    return plans.text_of([*lines, *_sections(features(plan, version), first_layer)])


def _too_old(version: tuple[int, int]) -> str:
    return (
        f"Transformer Engine {version[0]}.{version[1]} has no debug features (they came with 2.4), so this file "
        "configures nothing: wrap the layers below in te.fp8_autocast(enabled=False) instead; single GEMMs cannot "
        "be kept in BF16."
    )


def _features(version: tuple[int, int]) -> tuple[str, str] | None:
    return next(((layer, gemm) for since, layer, gemm in FEATURE_NAMES if version >= since), None)


def features(plan: plans.Plan, version: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Layer -> the ``transformer_engine`` part of its debug configuration; layers it cannot serve are absent."""
    named = _features(version)
    if named is None:
        return {}
    whole_layer, some_gemms = named
    made: dict[str, dict[str, Any]] = {}
    for layer, recipes in plans.by_layer(plan).items():
        bf16 = plans.in_bf16(recipes)
        current = [gemm for gemm, recipe in recipes.items() if plans.recipe_name(recipe) == "current"]
        config: dict[str, Any] = {}
        if plans.is_whole(bf16):
            config[whole_layer] = {"enabled": True}
        elif bf16:
            config[some_gemms] = {"enabled": True, "gemms": list(bf16)}
        if current:
            tensors = list(dict.fromkeys(tensor for gemm in current for tensor in _OPERANDS[gemm]))
            config["PerTensorScaling"] = {"enabled": True, "gemms": current, "tensors": tensors}
        if config:
            made[layer] = config
    return made


def _notes(plan: plans.Plan) -> list[str]:
    lines = []
    for layer, recipes in plans.by_layer(plan).items():
        if any(plans.recipe_name(label) == "current" for label in recipes.values()):
            lines += plans.comment(f"{layer}: PerTensorScaling works inside DelayedScaling only.")
        for label, gemms in plans.refused(recipes, ["current"]).items():
            lines += plans.comment(
                f"{layer}: no debug feature gives recipe {label}, so {plans.spelled(gemms)} left as before; "
                "put that layer in its own te.autocast with the recipe."
            )
    return lines


def debug_name_pattern(layers: list[str], first_layer: int = 0) -> str:
    """Regular expression that finds exactly these layers under their debug names.

    infer_and_assign_layer_names puts "model." and the wrappers' "module." in front and numbers layers by their
    ``layer_number`` (1 up in Megatron). Only ``layer_name_regex_pattern`` works in a real model: exact_layer_names
    raises for every layer it does not list.
    """

    def renumbered(layer: str) -> str:
        return re.sub(r"(?<=\blayers\.)\d+", lambda found: str(int(found[0]) + first_layer), layer)

    return rf"^(?:model\.)?(?:module\.)*(?:{'|'.join(re.escape(renumbered(layer)) for layer in layers)})$"


def _sections(by_layer: Mapping[str, dict[str, Any]], first_layer: int) -> list[str]:
    """One section per different configuration: a layer that two sections match is an error at run time."""
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for layer, config in by_layer.items():
        groups.setdefault(repr(config), (config, []))[1].append(layer)
    lines: list[str] = []
    for number, (config, layers) in enumerate(groups.values(), 1):
        lines += [
            f"fp8dbg_fallback_{number}:",
            "  enabled: True",
            "  layers:",
            f"    layer_name_regex_pattern: {plans.quoted(debug_name_pattern(layers, first_layer))}",
            "  transformer_engine:",
        ]
        for feature, fields in config.items():
            lines.append(f"    {feature}:")
            lines += [f"      {key}: {_yaml(value)}" for key, value in fields.items()]
    return lines


def _yaml(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)
