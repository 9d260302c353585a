"""What a per-tensor scale makes full use of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8dbg.errors import UsageError
from fp8dbg.numerics.formats import FORMATS
from fp8dbg.numerics.recipes import Recipe, parse_recipe


def recipe_of(row: Mapping[str, Any]) -> Recipe | None:
    """The recipe of a row, with its parameters; None for a host's own that fp8dbg does not know by name."""
    try:
        return parse_recipe(row["recipe"] or "")
    except UsageError:
        return None


def is_delayed(row: Mapping[str, Any]) -> bool:
    """Whether the row's scale follows a history of amax."""
    recipe = recipe_of(row)
    return recipe is not None and recipe.name == "delayed"


def full_use(row: Mapping[str, Any]) -> float:
    """scale x amax where the format is fully used: its maximum, times 2^-margin."""
    recipe = recipe_of(row)
    margin = float(recipe.parameters.get("margin", 0)) if recipe else 0.0
    return float(FORMATS[row["format"]].max * 2.0**-margin)


def reach(row: Mapping[str, Any]) -> float:
    """How many times smaller than amax a value may be before the row's format, fully used, flushes it to zero."""
    fmt = FORMATS[row["format"]]
    return float(fmt.max / (fmt.smallest_subnormal / 2))
