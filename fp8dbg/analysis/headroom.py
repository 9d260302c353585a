"""What would have given a per-tensor scale room for a jump: a margin that is worth its price, or else what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np

from fp8dbg.analysis.scales import is_delayed, recipe_of
from fp8dbg.analysis.wording import times
from fp8dbg.numerics.formats import FORMATS

WORTH = 3
"""Largest margin that is worth its price: every binade of headroom is one less for small values, for the whole run."""

CHASING = ("current", "current_pow2", "tensorwise")
"""Recipes whose scale is made of the tensor that it casts: nothing can clip unless the scale is another one's."""


def margin_of(row: Mapping[str, Any]) -> int:
    """The margin in force: 0 where the row's recipe has none."""
    recipe = recipe_of(row)
    return int(recipe.parameters.get("margin", 0)) if recipe else 0


def margin_for(row: Mapping[str, Any], reach: float | None) -> int | None:
    """The smallest margin under which nothing would have saturated; None where nothing did, or the recipe has none.

    Args:
        row: of tensor_facts.
        reach: log2 of the largest scale x amax, under the margin in force.
    """
    if reach is None or not is_delayed(row):
        return None
    fmt = FORMATS[row["format"]]
    fraction, exponent = math.frexp(2.0**reach)
    largest = math.ldexp(float(np.float32(fraction)), exponent)  # the cast multiplies in float32
    binades = next(k for k in count() if not fmt.saturates(math.ldexp(largest, -k)))
    return margin_of(row) + binades if binades else None


def room_for(row: Mapping[str, Any], step: int, needed: int | None, once: bool) -> str:
    """What to do about values that clip, as one sentence that names nothing already in force.

    Args:
        row: of tensor_facts, of the tensor that clips.
        step: on which it first did.
        needed: the margin that would have held it and what clipped with it.
        once: whether that step alone clipped, so that the batch comes first.
    """
    recipe = recipe_of(row)
    if recipe is not None and recipe.name in CHASING:
        return f"Find what set this scale: {recipe.name} scaling makes it of the tensor itself, and nothing clips."
    look = "look at what rescaled the weight at" if row["tensor"] == "weight" else "look at the batch of"
    give = _room(needed, margin_of(row))
    first, second = (f"{look} step {step}", give) if once else (give, f"{look} step {step}")
    return f"{first[0].upper()}{first[1:]}; {second}."


def _room(needed: int | None, margin: int) -> str:
    if needed is None:
        return "current scaling for this layer would clip nothing"
    rather = f" rather than {margin}" if margin else ""
    if needed <= WORTH:
        return f"a margin of {needed}{rather}, or current scaling for this layer, would have held it"
    return (
        f"no margin worth its price would have held it (it takes {needed}{rather}: {times(needed - margin)} less room "
        "for small values), but current scaling for this layer would"
    )
