"""Delayed scaling's state: the amax window and the scale that follows from it, as Transformer Engine updates them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8dbg.errors import UsageError
from fp8dbg.numerics.scales import FLT_MAX

if TYPE_CHECKING:
    from fp8dbg.numerics.recipes import Recipe


_FLT_MAX = float(FLT_MAX)


class DelayedState:
    """Scale and amax history of one operand under the delayed recipe, bit for bit as TE's fused update kernel.

    Slot 0 of the history collects the running amax of the current step; an update rolls it in. Where the collected
    amax is 0 nothing rolls and the scale stays. An Inf in the window keeps the scale where it is for as long as it is
    there (algorithm max); NaN never enters a maximum. Source: TE 2.20 common/recipe/delayed_scaling.cu.

    An update takes about a microsecond whatever the history's length: a run makes one per operand and microbatch.
    """

    def __init__(self, recipe: Recipe, role: str) -> None:
        self._scaled_max = float(recipe.scaled_max(role))
        self._most_recent = recipe.parameters["algorithm"] == "most_recent"
        self._length = int(recipe.parameters["history"])
        self._scale, self._scaled_for = 1.0, 0.0
        self.initial = True
        """True until an update has set the scale: the first step casts with scale 1."""
        self._fill([0.0] * self._length)

    def _fill(self, history: list[float]) -> None:
        """Take over a history: the slot that collects, and the updates behind it."""
        self._collected = history[0]
        self._past: deque[float] = deque(maxlen=self._length - 1)
        self._peaks: deque[tuple[int, float]] = deque()
        self._updates = 0
        for amax in history[1:]:
            if amax:
                self._push(amax)
            else:
                self._past.append(0.0)
                self._updates += 1

    def _push(self, amax: float) -> None:
        """Roll one amax in. ``_peaks`` falls: an amax that a later, no smaller one follows is never the maximum."""
        self._past.append(amax)
        self._updates += 1
        peaks = self._peaks
        if peaks and peaks[0][0] <= self._updates - self._length:
            peaks.popleft()
        if amax == amax:
            while peaks and peaks[-1][1] <= amax:
                peaks.pop()
            peaks.append((self._updates, amax))

    @property
    def scale(self) -> float:
        """The scale in force."""
        return self._scale

    @property
    def history(self) -> list[float]:
        """The window: slot 0 collects, the last slot is the most recent update."""
        return [self._collected, *self._past]

    def observe(self, amax: float) -> None:
        """Collect an amax into the current step, as a cast does; NaN is ignored."""
        self._collected = float(np.fmax(self._collected, np.float32(amax)))

    def update(self, amax: float = 0.0) -> float:
        """Roll the window and return the new scale.

        Args:
            amax: this step's (reduced) amax; may be Inf. 0 means: what ``observe`` collected.
        """
        last = float(np.float32(amax)) if amax != 0 else self._collected
        window = 0.0
        if last != 0:
            self._push(last)
            self._collected = 0.0
            window = self._peaks[0][1] if self._peaks else 0.0
        chosen = last if self._most_recent else window
        if 0.0 < chosen < math.inf:
            if chosen != self._scaled_for:
                # float32's own quotient: a float64 one of float32 numbers rounds to it
                self._scale = float(np.float32(min(self._scaled_max / chosen, _FLT_MAX)))
                self._scaled_for = chosen
            self.initial = False
        return self._scale

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: scale, history, initial."""
        return {"scale": self.scale, "history": self.history, "initial": self.initial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the numbers of ``state_dict``; a history of another length is a UsageError."""
        if len(state["history"]) != self._length:
            raise UsageError(
                f"The saved amax history holds {len(state['history'])} values, this recipe's {self._length}.",
                "Use the recipe it was saved under.",
            )
        self._scale, self._scaled_for = float(np.float32(state["scale"])), 0.0
        self._fill([float(np.float32(amax)) for amax in state["history"]])
        self.initial = bool(state["initial"])
