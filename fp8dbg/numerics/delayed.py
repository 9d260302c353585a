"""Delayed scaling's state: the amax window and the scale that follows from it, as Transformer Engine updates them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8dbg.errors import UsageError
from fp8dbg.numerics.scales import FLT_MAX

if TYPE_CHECKING:
    from fp8dbg.numerics.recipes import Recipe


class DelayedState:
    """Scale and amax history of one operand under the delayed recipe, bit for bit as TE's fused update kernel.

    Slot 0 of the history collects the running amax of the current step; an update rolls it in. Where the collected
    amax is 0 nothing rolls and the scale stays. An Inf in the window keeps the scale where it is for as long as it is
    there (algorithm max); NaN never enters a maximum. Source: TE 2.20 common/recipe/delayed_scaling.cu.
    """

    def __init__(self, recipe: Recipe, role: str) -> None:
        self._scaled_max = recipe.scaled_max(role)
        self._most_recent = recipe.parameters["algorithm"] == "most_recent"
        self._history = np.zeros(int(recipe.parameters["history"]), dtype=np.float32)
        self._scale = np.float32(1.0)
        self.initial = True
        """True until an update has set the scale: the first step casts with scale 1."""

    @property
    def scale(self) -> float:
        """The scale in force."""
        return float(self._scale)

    @property
    def history(self) -> list[float]:
        """The window: slot 0 collects, the last slot is the most recent update."""
        return [float(a) for a in self._history]

    def observe(self, amax: float) -> None:
        """Collect an amax into the current step, as a cast does; NaN is ignored."""
        self._history[0] = np.fmax(self._history[0], np.float32(amax))

    def update(self, amax: float = 0.0) -> float:
        """Roll the window and return the new scale.

        Args:
            amax: this step's (reduced) amax; may be Inf. 0 means: what ``observe`` collected.
        """
        last = np.float32(amax) if amax != 0 else self._history[0]
        window = np.float32(0.0)
        if last != 0:
            self._history = np.append(self._history[1:], last)
            window = np.fmax.reduce(self._history, initial=window)
            self._history[0] = 0.0
        chosen = last if self._most_recent else window
        if np.isfinite(chosen) and chosen > 0:
            with np.errstate(over="ignore"):
                self._scale = np.fmin(self._scaled_max / chosen, FLT_MAX)
            self.initial = False
        return self.scale

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: scale, history, initial."""
        return {"scale": self.scale, "history": self.history, "initial": self.initial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the numbers of ``state_dict``; a history of another length is a UsageError."""
        if len(state["history"]) != len(self._history):
            raise UsageError(
                f"The saved amax history holds {len(state['history'])} values, this recipe's {len(self._history)}.",
                "Use the recipe it was saved under.",
            )
        self._scale = np.float32(state["scale"])
        self._history = np.array(state["history"], dtype=np.float32)
        self.initial = bool(state["initial"])
