"""What the page's charts draw from: every tensor's figures, thinned to a budget that is stated on the page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fp8dbg.analysis.evidence import natural
from fp8dbg.numerics.formats import FORMATS
from fp8dbg.render.cube import Cube, add_floors, add_gemm_floors, make_cube, plain
from fp8dbg.render.figures import representable
from fp8dbg.runs.folder import Folder
from fp8dbg.runs.queries import ask

VALUES = 3_000_000
"""Figures drawn of all tensors together, at most: about 9 MB of page."""
EVERY_VALUES = 600_000
"""Figures of amax and scale over every step, at most."""
CLOSE_VALUES = 600_000
"""Figures drawn once more at a finer resolution, for the layers that findings name."""
MOST_BUCKETS, FEWEST_BUCKETS = 500, 40
PER_LAYER, PER_LAYER_EVERY = 3 * 14 + 3 * 6 + 3 * 9, 3 * 4
"""Series of one layer on sampled steps (operands, results, GEMMs), and on every step."""
_EVERY = 1 << 40
"""Buckets enough for each sampled step to have its own."""
HISTOGRAMS = 9_000
"""Histograms on the page, at most."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One column of the charts: its first and last step, and how many (sampled) steps it holds."""

    first_step: int
    last_step: int
    sampled: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Tensors and GEMMs over one set of buckets."""

    buckets: list[Bucket]
    tensors: Cube
    gemms: Cube


class PageData:
    """The figures of a run as the page draws them.

    Args:
        run: an open run folder.
        named: layers that findings name, worst first: they are drawn at a finer resolution where the run is thinned.
        moments: steps worth a histogram, most important first; the first and the last sampled step are added.
    """

    def __init__(self, run: Folder, named: list[str], moments: list[int]) -> None:
        self.run, self.named, self.moments = run, named, moments

    @cached_property
    def layers(self) -> list[str]:
        """Every layer with figures, in the order of execution where run.json has it, else by number."""
        seen = set(self._seen.to_pylist())
        entries = [entry for entry in self.run.meta.get("layers") or [] if isinstance(entry, dict)]
        known = list(dict.fromkeys(str(e["layer"]) for e in entries if e.get("layer") in seen))
        return [*known, *sorted(seen.difference(known), key=natural)]

    @cached_property
    def _seen(self) -> pa.Array:
        return pc.drop_null(self.run.answer("page_layers")["layer"].combine_chunks())

    @cached_property
    def grid(self) -> Grid:
        """Everything, at the resolution that fits the budget."""
        return self._grid(_fitting(VALUES, PER_LAYER * len(self.layers)))

    @cached_property
    def close(self) -> Grid | None:
        """The named layers at a finer resolution; None where the grid holds every sampled step already."""
        if all(bucket.sampled == 1 for bucket in self.grid.buckets) or not self.close_layers:
            return None
        return self._grid(_fitting(CLOSE_VALUES, PER_LAYER * len(self.close_layers)), self.close_layers)

    @cached_property
    def close_layers(self) -> list[str]:
        """The named layers that get the finer resolution."""
        return [layer for layer in self.named if layer in set(self.layers)][:16]

    @cached_property
    def every(self) -> tuple[list[Bucket], Cube]:
        """amax and scale over every step."""
        buckets = _fitting(EVERY_VALUES, PER_LAYER_EVERY * len(self.layers))
        rows = ask(self.run, "page_steps_seen", buckets=buckets)
        table = self.run.answer("page_amax", {"buckets": buckets, "layers": None})
        drawn = table.filter(pc.is_in(table["layer"], value_set=self._seen))
        return [_bucket(row) for row in rows], make_cube(drawn, len(rows))

    def _grid(self, buckets: int, layers: list[str] | None = None) -> Grid:
        rows = ask(self.run, "page_buckets", buckets=buckets)
        values = {"buckets": buckets, "layers": None if layers is None else json.dumps(layers)}
        tensors, gemms = (make_cube(self.run.answer(q, values), len(rows)) for q in ("page_tensors", "page_gemms"))
        add_floors(tensors)
        add_gemm_floors(gemms, tensors)
        return Grid([_bucket(row) for row in rows], tensors, gemms)

    @cached_property
    def histogram_steps(self) -> list[int]:
        """Sampled steps with histograms: the first, the last, and the sampled steps at or after the moments."""
        sampled = [row["first_step"] for row in ask(self.run, "page_buckets", buckets=_EVERY)]
        if not sampled:
            return []
        after = [next((s for s in sampled if s >= moment), sampled[-1]) for moment in self.moments]
        chosen = dict.fromkeys([sampled[-1], *after[:4], sampled[0]])
        return sorted(list(chosen)[: max(1, HISTOGRAMS // max(1, 6 * len(self.layers)))])

    def histograms(self) -> list[dict[str, Any]]:
        """For each of those steps, the histogram of every tensor that has one."""
        numbers = {layer: i for i, layer in enumerate(self.layers)}
        entries: dict[int, list[list[Any]]] = {step: [] for step in self.histogram_steps}
        for row in self.run.answer("page_histograms", {"steps": json.dumps(self.histogram_steps)}).to_pylist():
            exponent, counts, *rest = _histogram(row)
            if counts:
                entries[row["step"]].append([numbers[row["layer"]], row["tensor"], exponent, counts, *rest])
        return [{"step": step, "of": of} for step, of in entries.items()]

    def ranks(self) -> Cube | None:
        """The worst each rank saw; None for a run of one rank."""
        table = self.run.answer("page_ranks", {})
        count = max((len(ranks) for ranks in table["rank"].to_pylist()), default=0)
        return None if count < 2 else _by_rank(table)

    def plain(self) -> dict[str, Any]:
        """All of it as JSON."""
        numbers = {layer: i for i, layer in enumerate(self.layers)}
        grids = [self.grid, self.close]
        ranks, (spans, every) = self.ranks(), self.every
        return {
            "every": {"buckets": _plain_buckets(spans), "tensor": plain(every, numbers)},
            "grids": [_plain_grid(grid, numbers) for grid in grids if grid is not None],
            "histograms": self.histograms(),
            "ranks": ranks and plain(ranks, numbers),
        }


def _fitting(values: int, series: int) -> int:
    return max(FEWEST_BUCKETS, min(MOST_BUCKETS, values // max(1, series)))


def _bucket(row: dict[str, Any]) -> Bucket:
    return Bucket(row["first_step"], row["last_step"], row["sampled"])


def _plain_buckets(buckets: list[Bucket]) -> list[list[int]]:
    return [list(asdict(bucket).values()) for bucket in buckets]


def _plain_grid(grid: Grid, numbers: dict[str, int]) -> dict[str, Any]:
    return {
        "buckets": _plain_buckets(grid.buckets),
        "tensor": plain(grid.tensors, numbers),
        "gemm": plain(grid.gemms, numbers),
    }


def _by_rank(table: pa.Table) -> Cube:
    """A cube whose columns are ranks, in ascending order."""
    ranks = sorted({rank for row in table["rank"].to_pylist() for rank in row})
    place = {rank: i for i, rank in enumerate(ranks)}
    buckets = pa.array([[place[rank] for rank in row] for row in table["rank"].to_pylist()], pa.list_(pa.int64()))
    cube = make_cube(table.drop_columns("rank").append_column("bucket", buckets), len(ranks))
    cube.keys["ranks"] = ranks
    add_floors(cube)
    return cube


def _histogram(row: dict[str, Any]) -> tuple[int, list[int], int | None, dict[str, float] | None]:
    """First binade, counts, number of elements, and where the format's range lies (None where no scale is known)."""
    exponent, counts = _binades(row["histogram"], row["dtype"])
    return exponent, counts, row["numel"], _range(row)


def _range(row: dict[str, Any]) -> dict[str, float] | None:
    low, high = row["scale"] or row["scale_min"], row["scale"] or row["scale_max"]
    if row["format"] not in FORMATS or not low or not high or low < 0 or high < 0:
        return None
    return {name: round(value, 3) for name, value in representable(FORMATS[row["format"]], low, high).items()}


def _binades(histogram: dict[str, Any], dtype: str | None) -> tuple[int, list[int]]:
    """Counts per binade, folded from 16-bit codes where the histogram holds those; zeros and non-finite left out.

    No counts where it is damaged: numbers missing, or not one count for each code.
    """
    listed, named = histogram["counts"] or [], histogram["codes"]
    if None in listed or (named is not None and (None in named or len(named) != len(listed))):
        return 0, []
    if named is None:
        return histogram["exponent"] or 0, listed
    counts = np.array(listed, np.int64)
    codes = np.array(named, np.uint16)
    values = _values(codes, dtype)
    finite = np.isfinite(values) & (values != 0)
    if not finite.any():
        return 0, []
    exponents = np.floor(np.log2(np.abs(values[finite]))).astype(np.int64)
    first = int(exponents.min())
    return first, np.bincount(exponents - first, weights=counts[finite]).astype(np.int64).tolist()


def _values(codes: np.ndarray[Any, np.dtype[np.uint16]], dtype: str | None) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What 16-bit codes stand for."""
    if dtype == "float16":
        return codes.view(np.float16).astype(np.float64)
    return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
