"""The amax of every operand on every step: one pass over a tensor, none where it was seen a moment ago.

On an accelerator an amax waits there until somebody reads it, so that an unsampled step never waits for the device.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from struct import pack, unpack
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8dbg.numerics.census import Amax, amax_of
from fp8dbg.recording.copies import version_of

if TYPE_CHECKING:
    from fp8dbg.numerics.recipes import Recipe

__all__ = ["Amax", "Extent", "LastSeen", "extent_of", "merged"]


class LastSeen:
    """``amax_of`` that remembers one tensor: q, k and v read the same one, and so do gate and up.

    It is the same while the object lives and nobody has written into it; no reference of ours keeps it alive.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], object, Amax] | None = None

    def amax(self, x: Tensor) -> Amax:
        """The amax of a floating-point tensor."""
        last, version = self._last, version_of(x)  # one read: another thread's forward may be here too
        if last is not None and last[0]() is x and last[1] == version:
            return last[2]
        found = amax_of(x)
        self._last = weakref.ref(x), version, found
        return found


class Extent(NamedTuple):
    """How far the values of an operand reach.

    ``amax`` is over the finite elements, None if there is none. ``nan`` and ``inf`` count the others; None: not
    counted. ``seen`` is the amax as a cast's fmax sees it: Inf counts, NaN does not, 0 where nothing is seen.
    """

    amax: float | None
    nan: int | None
    inf: int | None
    seen: float

    def seen_by(self, recipe: Recipe) -> float:
        """The amax that a recipe's own reduction hands on: ``seen``, or NaN in a library that lets NaN through."""
        return recipe.amax_seen(self.seen, self.nan or 0, 0)


def extent_of(amax: Amax, dtype: torch.dtype) -> Extent:
    """The extent of the same tensor cast to ``dtype``: rounding is monotonic, so the amax is rounded, not the tensor.

    An amax that the cast turns into Inf (float16's reach ends at 65504) leaves no count to tell of.
    """
    value, nan, inf = amax.amax, amax.nan, amax.inf
    if value is None:
        return Extent(None, nan, inf, math.inf if inf else 0.0)
    if dtype is torch.bfloat16:
        value = _bfloat16(value)
    elif dtype is torch.float16:
        value = float(np.float32(value).astype(np.float16))
    if value == math.inf:
        return Extent(None, nan, None, math.inf)
    return Extent(value, nan, inf, math.inf if inf else value)


def _bfloat16(value: float) -> float:
    """A non-negative float32 number rounded to bfloat16, ties to even."""
    bits = int.from_bytes(pack("<f", value), "little")
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(unpack("<f", rounded.to_bytes(4, "little"))[0])


def merged(several: Iterable[Extent]) -> Extent:
    """One extent for all calls of a layer in a microbatch: the largest amax, the sums of the counts."""
    first, *others = several
    for other in others:
        amax = max((e.amax for e in (first, other) if e.amax is not None), default=None)
        counts = _sum(first.nan, other.nan), _sum(first.inf, other.inf)
        first = Extent(amax, *counts, max(first.seen, other.seen))
    return first


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b
