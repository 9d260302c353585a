"""Delayed scaling replayed over a whole series of amaxes at once: ``DelayedState``, update by update, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fp8dbg.numerics.scales import FLT_MAX

if TYPE_CHECKING:
    from fp8dbg.numerics.formats import Format
    from fp8dbg.numerics.recipes import Recipe

Floats = npt.NDArray[np.float64]

_INFINITE = 1e300
"""Stands for Inf, which a rolling maximum of pandas would take for a missing value."""


def replay(recipe: Recipe, role: str, amaxes: npt.ArrayLike, fmt: Format | None = None) -> Floats:
    """The scale in force at each of a series of casts, each followed by an update with its amax.

    Args:
        recipe: a delayed one.
        role: input, weight or grad_output.
        amaxes: one per update, in order, [n]; Inf where the host saw one, 0 where it saw nothing.
        fmt: replaces the role's own format.

    Returns:
        float64 [n], values of float32: NaN up to and including the first cast after which an update set a scale, for
        which the scale is 1 as before any update.
    """
    seen = np.asarray(amaxes, dtype=np.float32).astype(np.float64)
    rolled = np.flatnonzero((seen != 0) & ~np.isnan(seen))
    chosen = _window(recipe, seen[rolled])
    wanted = np.full(len(seen), np.nan)
    usable = (chosen > 0) & (chosen < _INFINITE)
    # float32's own quotient: a float64 one of float32 numbers rounds to it
    quotient = np.minimum(float(recipe.scaled_max(role, fmt)) / chosen[usable], float(FLT_MAX))
    wanted[rolled[usable]] = quotient.astype(np.float32)
    in_force = _carried(wanted)
    return np.concatenate([[np.nan], in_force[:-1]])[: len(seen)]


def _window(recipe: Recipe, amaxes: Floats) -> Floats:
    """What each update divides by: the largest of the last ``history`` amaxes, or the last."""
    finite = np.where(np.isinf(amaxes), _INFINITE, amaxes)
    if recipe.parameters["algorithm"] == "most_recent" or not finite.size:
        return finite
    import pandas as pd

    largest: Floats = pd.Series(finite).rolling(int(recipe.parameters["history"]), min_periods=1).max().to_numpy()
    return largest


def _carried(values: Floats) -> Floats:
    """Each NaN replaced by the last number before it, where there is one."""
    last = np.maximum.accumulate(np.where(np.isnan(values), -1, np.arange(len(values))))
    return np.where(last >= 0, values[last], np.nan)
