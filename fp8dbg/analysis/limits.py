"""Limits: where a figure stops being the format's noise, from the format's floor and the run's own healthy window.

A limit starts at a multiple of what the number format does to healthy data. The run's own window may widen it (a
tensor that has always been a little wide is no news), but only up to a cap, and only if the window itself is healthy:
a fault that was there from the first step cannot hide in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8dbg.numerics.formats import FORMATS

DEVIATIONS = 8.0
"""Robust standard deviations (1.4826 x MAD) above the window's median that still count as usual."""

STOCHASTIC = 2.0
"""Stochastic rounding has up to twice the error of rounding to nearest, and less bias: it is not blamed for that."""


@dataclass(frozen=True)
class Limit:
    """A figure's limit and the sentence that says where it comes from."""

    value: float
    basis: str


@dataclass(frozen=True)
class Rule:
    """How a figure's limit is made: a floor, and the cap to which a healthy window may widen it."""

    figure: str
    floor: float
    cap: float
    why: str

    def limit(self, row: Mapping[str, Any], scale: float = 1.0) -> Limit:
        """The limit for one row of tensor_facts or gemm_facts.

        Args:
            row: its facts, with ``usual_`` and ``spread_`` of the figure.
            scale: what floor and cap are multiples of (a format's noise floor), or 1.
        """
        floor, cap = self.floor * scale, self.cap * scale
        usual, spread = row.get(f"usual_{self.figure}"), row.get(f"spread_{self.figure}") or 0.0
        if usual is None or usual > floor:
            return Limit(floor, f"{self.why} ({self._text(floor)})")
        own = usual + DEVIATIONS * 1.4826 * spread
        if own <= floor:
            return Limit(floor, f"{self.why} ({self._text(floor)}); its own usual value is {self._text(usual)}")
        value = min(own, cap)
        return Limit(value, f"its own healthy window: median {self._text(usual)}, limit {self._text(value)}")

    def _text(self, value: float) -> str:
        return f"{self.figure} {value:.2g}"


def noise_floor(row: Mapping[str, Any]) -> float | None:
    """rel_l2 of a healthy cast under this row's format and rounding; None for a format that is not known."""
    fmt = FORMATS.get(row["format"] or "")
    if fmt is None or fmt.noise is None:
        return None
    return fmt.noise.rel_l2 * (STOCHASTIC if "stochastic" in (row["recipe"] or "") else 1.0)
