"""From a fallback as people write it to a recipe per layer and GEMM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from fp8dbg.errors import UnknownNameError, UsageError
from fp8dbg.numerics.arguments import texts
from fp8dbg.numerics.recipes import GEMMS, Recipe, recipe_named

Fallback = Iterable[str] | Mapping[str, Iterable[str] | Mapping[str, str | Recipe]]
"""Layers or "layer:gemm" to keep in BF16; or, by layer, the GEMMs to keep in BF16, or a recipe per GEMM."""


def recipes_per_gemm(layers: list[str], recipe: Recipe, fallback: Fallback | None) -> dict[str, dict[str, Recipe]]:
    """The recipe of every GEMM of every layer; later entries of the fallback win.

    Layers may be globs ("blocks.*.up", "*"); one that is the very name of a layer is never taken for a glob. A layer,
    GEMM or recipe that does not exist is an UnknownNameError that lists those that do.
    """
    chosen = {name: dict.fromkeys(GEMMS, recipe) for name in layers}
    for pattern, gemms in _entries(layers, fallback or ()):
        for name in _matching(layers, pattern):
            chosen[name].update(gemms)
    return chosen


def delayed_recipe(recipes: Iterable[Recipe]) -> Recipe | None:
    """The delayed recipe among those of one layer's GEMMs, which share one state; more than one is a UsageError."""
    delayed = sorted({r.label: r for r in recipes if r.name == "delayed"}.items())
    if len(delayed) > 1:
        labels = " and ".join(label for label, _ in delayed)
        raise UsageError(f"One layer cannot scale by {labels}.", "Give its GEMMs the same delayed recipe.")
    return delayed[0][1] if delayed else None


def _entries(layers: list[str], fallback: Fallback) -> list[tuple[str, dict[str, Recipe]]]:
    if isinstance(fallback, str):
        fallback = [fallback]
    if isinstance(fallback, Mapping):
        return [
            (layer, _gemms(value)) for layer, value in zip(texts("fallback", fallback), fallback.values(), strict=True)
        ]
    return [_parsed(layers, entry) for entry in texts("fallback", fallback)]


def _parsed(layers: list[str], entry: str) -> tuple[str, dict[str, Recipe]]:
    """ "layer" or "layer:gemm"; a layer's own name may hold a colon."""
    layer, colon, gemm = entry.rpartition(":")
    if entry in layers or not colon:
        return entry, _gemms(GEMMS)
    return layer, _gemms([gemm])


def _gemms(value: Iterable[str] | Mapping[str, str | Recipe]) -> dict[str, Recipe]:
    wanted = value if isinstance(value, Mapping) else dict.fromkeys(texts("fallback", value), "bf16")
    for gemm in wanted:
        if gemm not in GEMMS:
            raise UnknownNameError("GEMM", gemm, list(GEMMS))
    return {gemm: recipe_named(recipe) for gemm, recipe in wanted.items()}


def _matching(layers: list[str], pattern: str) -> list[str]:
    found = [pattern] if pattern in layers else [name for name in layers if fnmatchcase(name, pattern)]
    if not found:
        raise UnknownNameError("layer", pattern, layers)
    return found
