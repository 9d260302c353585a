"""From the ``amax`` table: the scales that a recipe would have had, cast by cast, and which casts would have clipped.

Every step is there, sampled or not. A rank's scales follow from its own amaxes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fp8dbg.numerics.formats import FORMATS, Format
from fp8dbg.numerics.recipes import Recipe
from fp8dbg.numerics.replay import replay
from fp8dbg.runs.folder import Folder
from fp8dbg.runs.queries import QUESTIONS
from fp8dbg.runs.schema import OPERANDS

Key = tuple[str, str, int]
"""Layer, tensor and rank."""

Floats = npt.NDArray[np.float64]

_MICROBATCHES = 65536
"""What reports/whatif_amax.sql multiplies a step by."""


@dataclass
class Clips:
    """Steps of one tensor on which some value was beyond the format's maximum, now and then; None: not known."""

    steps: int = 0
    now: int | None = None
    then: int | None = None


@dataclass
class Series:
    """The casts of one operand on one rank, in order; arrays [n]."""

    cast: npt.NDArray[np.int64]
    seen: Floats
    scale: Floats
    replayed: Floats | None = None

    @cached_property
    def steps(self) -> npt.NDArray[np.int64]:
        """The step of each cast."""
        return self.cast // _MICROBATCHES

    def scale_at(self, step: int, microbatch: int) -> float | None:
        """The replayed scale at a cast; None before any update, and where the cast is not in the table."""
        place = int(np.searchsorted(self.cast, step * _MICROBATCHES + microbatch))
        if self.replayed is None or place == len(self.cast) or self.cast[place] != step * _MICROBATCHES + microbatch:
            return None
        return None if np.isnan(self.replayed[place]) else float(self.replayed[place])


@dataclass
class Scales:
    """What the ``amax`` table says under a recipe; made by ``scales_under``."""

    series: dict[Key, Series] = field(default_factory=dict)

    def at(self, row: dict[str, Any]) -> float | None:
        """The delayed scale in force at a row of ``tensors``."""
        found = self.series.get((row["layer"], row["tensor"], row["rank"]))
        return None if found is None else found.scale_at(row["step"], row["microbatch"])

    def clips(self, layer: str, tensor: str, now: str | None, recipe: Recipe, fmt: Format | None) -> Clips:
        """On how many steps casts clip, on any rank. ``now``: the format in force; ``fmt``: instead of the recipe's."""
        mine = [s for (a, b, _), s in self.series.items() if (a, b) == (layer, tensor)]
        if not mine:
            return Clips()
        known = now in FORMATS and any(~np.isnan(s.scale).all() for s in mine)
        return Clips(
            _count(s.steps for s in mine),
            _count(s.steps[_clipped(s.seen, s.scale, FORMATS[str(now)])] for s in mine) if known else None,
            None if can_clip(recipe) is None else _count(_clipped_then(s, recipe, tensor, fmt) for s in mine),
        )

    def doubts(self) -> list[str]:
        """What the replay does not know: updates before the record began, and steps that are not in it."""
        found = []
        for (layer, tensor, _), series in self.series.items():
            first, last = int(series.steps[0]), int(series.steps[-1])
            missing = last - first + 1 - _count([series.steps])
            if first > 0 or missing:
                found.append((layer, tensor, first, missing))
        if not found:
            return []
        layer, tensor, first, missing = max(found, key=lambda f: (f[3], f[2]))
        return [
            f"The replay starts with an empty history at the first amax recorded, and steps that were not recorded are "
            f"not in it: {layer} {tensor} begins at step {first} and lacks {missing} steps since; so with "
            f"{len(found)} tensors."
        ]


def scales_under(folder: Folder, recipe: Recipe, layers: list[str], fmt: Format | None = None) -> Scales:
    """Read the ``amax`` table; for delayed scaling replay it.

    Args:
        folder: an open run folder.
        recipe: the one asked about.
        layers: those wanted.
        fmt: replaces the recipe's formats.
    """
    question = QUESTIONS["whatif_amax"]
    table = folder.sql(question.sql, question.values({"layers": json.dumps(layers)})).to_arrow_table()
    made = Scales()
    for key, series in _series(table):
        if recipe.name == "delayed":
            series.replayed = replay(recipe, key[1], series.seen, fmt)
        made.series[key] = series
    return made


def can_clip(recipe: Recipe) -> bool | None:
    """Whether scales that are finer than a tensor can clip; False where one per tensor is chosen; None: cannot say."""
    if recipe.name == "nvfp4":
        return None
    return None if recipe.parameters.get("rounding", "up") in ("floor", "even") else False


def _series(table: pa.Table) -> Iterator[tuple[Key, Series]]:
    lists = {name: table[name].combine_chunks() for name in ("cast", "seen", "scale")}
    offsets = lists["cast"].offsets.to_numpy()
    flat = {name: column.values.to_numpy(zero_copy_only=False) for name, column in lists.items()}
    keys = zip(*(table[name].to_pylist() for name in ("layer", "tensor", "rank")), strict=True)
    for i, key in enumerate(keys):
        if key[0] is None or key[1] not in OPERANDS or offsets[i] == offsets[i + 1]:
            continue
        part = slice(offsets[i], offsets[i + 1])
        order = np.argsort(flat["cast"][part], kind="stable")
        cast, seen, scale = (flat[name][part][order] for name in ("cast", "seen", "scale"))
        yield key, Series(cast, seen.astype(np.float64), scale.astype(np.float64))


def _count(steps: Iterable[npt.NDArray[np.int64]]) -> int:
    """Different steps among these, each array ascending."""
    distinct = [part[np.flatnonzero(np.diff(part, prepend=part[0] - 1))] for part in steps if part.size]
    return len(distinct[0]) if len(distinct) == 1 else len(set().union(*(part.tolist() for part in distinct)))


def _clipped(seen: Floats, scale: Floats, fmt: Format) -> npt.NDArray[np.bool_]:
    """Whether the largest value of each cast is beyond the maximum, by the product that the cast takes, in float32."""
    with np.errstate(all="ignore"):
        return fmt.saturates(seen.astype(np.float32) * scale.astype(np.float32))


def _clipped_then(series: Series, recipe: Recipe, tensor: str, fmt: Format | None) -> npt.NDArray[np.int64]:
    if recipe.granularity(tensor) != "tensor":
        return series.steps[:0]
    used = fmt or recipe.format(tensor)
    if series.replayed is None:
        scale = recipe.scales(series.seen.astype(np.float32), tensor, used).astype(np.float64)
    else:
        scale = np.nan_to_num(series.replayed, nan=1.0)
    return series.steps[_clipped(series.seen, scale, used)]
