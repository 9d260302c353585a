"""One recorded tensor under another recipe: exactly where its values were kept, between bounds where binades were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from fp8dbg.analysis.whatif_scales import Scales, can_clip
from fp8dbg.analysis.whatif_tally import Cast
from fp8dbg.numerics.bounds import Binades, Bounds, cast_bounds, finer_bounds
from fp8dbg.numerics.code_census import CodeCensus
from fp8dbg.numerics.figures import Census
from fp8dbg.numerics.formats import Format
from fp8dbg.numerics.recipes import Recipe

if TYPE_CHECKING:
    from fp8dbg.runs.dumps import Dump

Row = dict[str, Any]

BASES = ("exact", "replay", "dump", "bounds")
"""exact: the figures follow from what was recorded; replay: so they do, under a replayed scale; dump: from the tensors
that were saved whole; bounds: what is shown are lower and upper bounds."""


@dataclass(frozen=True)
class Casting:
    """The cast asked about.

    Args:
        recipe: the recipe.
        fmt: replaces its formats; None: they stay.
        scales: what ``amax`` says; for delayed scaling.
    """

    recipe: Recipe
    fmt: Format | None
    scales: Scales

    def format(self, row: Row) -> Format:
        """What the row's tensor would be cast to."""
        return self.fmt or self.recipe.format(row["tensor"])

    def scale(self, row: Row) -> float | None:
        """The scale for the row's tensor, that of its largest block where scales are finer; None: not known."""
        if self.recipe.name == "delayed":
            return self.scales.at(row)
        seen = self.recipe.amax_seen(row["amax"], row["nan"] or 0, row["inf"] or 0)
        return self.recipe.current_scale(seen, row["tensor"], self.format(row))

    def whole(self, row: Row) -> bool:
        """Whether one scale serves the whole tensor."""
        return self.recipe.granularity(row["tensor"]) == "tensor"

    def cast(self, variants: list[Row], values: Values | None) -> tuple[str, Cast] | None:
        """Basis and figures for a tensor that was recorded under these recipes; None: cannot be told.

        Args:
            variants: its rows of ``tensors``.
            values: what of its values was kept.
        """
        row = variants[0]
        known = next((v for v in variants if self._is(v)), None)
        if known is not None and (cast := recorded(known)) is not None:
            return "exact", cast
        scale = self.scale(row)
        if scale is None or values is None:
            return None
        if values.census is not None and self.whole(row):
            found = values.census.quantised(self.format(row), scale)
            cast = Cast.exact(found.underflow, found.saturated, found.mse, finite_of(row))
            return None if cast is None else ("replay" if self.recipe.name == "delayed" else "exact", cast)
        bounds = self._bounds(row, values.binades, scale)
        return None if bounds is None else ("bounds", Cast(bounds.underflow, bounds.saturated, bounds.d2))

    def dumped(self, row: Row, dump: Dump) -> Cast | None:
        """From the tensor itself; None where its scale is not known."""
        from fp8dbg.numerics.measurement import measure

        scale = self.scale(row) if self.recipe.name == "delayed" else None
        if scale is None and self.recipe.name == "delayed":
            return None
        fmt = self.fmt.name if self.fmt else None
        found = measure(dump.load(), fmt, self.recipe, scale, row["tensor"])
        return Cast.exact(found.underflow, found.saturated, found.mse, finite_of(row))

    def _bounds(self, row: Row, binades: Binades, scale: float) -> Bounds | None:
        if self.whole(row):
            return cast_bounds(binades, self.format(row), scale)
        if self.recipe.name == "nvfp4":
            return None  # its block scales are rounded, to nothing in a block that is small enough
        return finer_bounds(binades, self.format(row), scale, clips=can_clip(self.recipe) is None)

    def _is(self, row: Row) -> bool:
        return bool(row["recipe"] == self.recipe.label and row["format"] == self.format(row).name)


@dataclass(frozen=True)
class Values:
    """What a row kept of its tensor's values: a count of every code, or of every binade."""

    binades: Binades
    census: Census | None


def recorded(row: Row) -> Cast | None:
    """The figures that a row has."""
    return Cast.exact(row["underflow"], row["saturated"], row["mse"], finite_of(row))


def finite_of(row: Mapping[str, Any]) -> int:
    """Its finite elements."""
    return int(row["numel"] - (row["nan"] or 0) - (row["inf"] or 0))


class Histograms:
    """The histogram column of a table, read row by row without a Python object for each number.

    Args:
        column: ``histogram``, as the schema has it.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        whole = column.combine_chunks()
        self._there = whole.is_valid().to_pylist()
        self._exponents = whole.field("exponent").to_pylist()
        self._lists = {name: whole.field(name) for name in ("counts", "codes")}
        self._offsets = {name: values.offsets.to_numpy() for name, values in self._lists.items()}
        self._flat = {name: v.values.to_numpy(zero_copy_only=False) for name, v in self._lists.items()}

    def values(self, i: int, row: Row) -> Values | None:
        """What row ``i`` kept; None where it kept nothing, or what does not fit its own counts."""
        counts, codes = self._part("counts", i), self._part("codes", i)
        if not self._there[i] or not counts.size:
            return None
        if codes.size:
            if len(codes) != len(counts) or row["dtype"] not in ("bfloat16", "float16"):
                return None
            census = CodeCensus.from_codes(row["dtype"], codes, counts)
            return Values(Binades(*census.histogram(), census.amin, census.amax, row["dtype"]), census)
        if self._exponents[i] is None:
            return None
        return Values(Binades(self._exponents[i], counts, row["amin"], row["amax"], row["dtype"]), None)

    def _part(self, name: str, i: int) -> np.ndarray[Any, Any]:
        offsets = self._offsets[name]
        return self._flat[name][offsets[i] : offsets[i + 1]] if len(offsets) > i + 1 else np.empty(0)
