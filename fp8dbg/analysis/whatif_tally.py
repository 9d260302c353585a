"""Counts and sums of casts added up over steps, microbatches and ranks; between bounds where no more is known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Between = tuple[float, float]
"""Lower and upper bound; equal where the value is exact."""

FIGURES = ("underflow_ratio", "saturated_ratio", "rel_l2", "sqnr_db")


@dataclass(frozen=True)
class Cast:
    """What one cast does to one recorded tensor: elements flushed and clipped, and the sum of (y - x)^2 (or None)."""

    underflow: Between
    saturated: Between
    d2: Between | None

    @classmethod
    def exact(cls, underflow: int | None, saturated: int | None, mse: float | None, finite: int) -> Cast | None:
        """From a row's own figures; None where it has none."""
        if underflow is None or saturated is None:
            return None
        d2 = None if mse is None else (mse * finite, mse * finite)
        return cls((underflow, underflow), (saturated, saturated), d2)


@dataclass
class Tally:
    """Casts of one tensor, added up: counts exactly, ratios formed at the end."""

    rows: int = 0
    finite: int = 0
    nonzero: int = 0
    x2: float = 0.0
    underflow: list[float] = field(default_factory=lambda: [0.0, 0.0])
    saturated: list[float] = field(default_factory=lambda: [0.0, 0.0])
    d2: list[float] | None = field(default_factory=lambda: [0.0, 0.0])

    def add(self, row: Mapping[str, Any], cast: Cast) -> None:
        """Add a cast of the tensor that a row of ``tensors`` describes."""
        finite = row["numel"] - (row["nan"] or 0) - (row["inf"] or 0)
        self.rows += 1
        self.finite += finite
        self.nonzero += finite - (row["zeros"] or 0)
        self.x2 += (row["rms"] or 0.0) ** 2 * finite
        for total, part in ((self.underflow, cast.underflow), (self.saturated, cast.saturated)):
            total[0], total[1] = total[0] + part[0], total[1] + part[1]
        if self.d2 is not None:
            self.d2 = None if cast.d2 is None else [self.d2[0] + cast.d2[0], self.d2[1] + cast.d2[1]]

    def figures(self) -> dict[str, Between | None]:
        """The ``FIGURES``, None where there is nothing to take one over. sqnr_db is worst first, as the others are
        best first: its bounds are those of rel_l2."""
        rel_l2 = None
        if self.rows and self.d2 is not None and self.x2:
            rel_l2 = math.sqrt(self.d2[0] / self.x2), math.sqrt(self.d2[1] / self.x2)
        return {
            "underflow_ratio": _ratio(self.underflow, self.nonzero),
            "saturated_ratio": _ratio(self.saturated, self.finite),
            "rel_l2": rel_l2,
            "sqnr_db": None if rel_l2 is None or not rel_l2[0] else (_decibels(rel_l2[1]), _decibels(rel_l2[0])),
        }


def _ratio(counts: list[float], total: int) -> Between | None:
    return (counts[0] / total, counts[1] / total) if total else None


def _decibels(rel_l2: float) -> float:
    return 0.0 - 20.0 * math.log10(rel_l2)
