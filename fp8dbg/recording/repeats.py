"""Activation checkpointing runs a forward twice: does the second read what the first did? Sampled steps only."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from fp8dbg.numerics.census import Amax, amax_of

SAMPLES = 64
"""Elements, evenly spread, by which a tensor is known again; random numbers drawn anew show in nearly all of them."""

DIFFERS = 0.01
"""Share of amax beyond which a difference is one: kernels that add up in another order stay below 2^-8 in BF16."""

_MOST = 256


class _Sign(NamedTuple):
    amax: Amax
    samples: Tensor


class Repeats:
    """The first passes of one layer that may be run again within the step, known by amax and a few samples."""

    __slots__ = ("_passes", "_step")

    def __init__(self) -> None:
        self._passes: deque[_Sign] = deque(maxlen=_MOST)
        self._step = -1

    def first(self, step: int, x: Tensor) -> None:
        """A first pass reads ``x``, any shape and device."""
        if step != self._step:
            self._passes.clear()
            self._step = step
        self._passes.append(_sign(x))

    def again(self, step: int, x: Tensor) -> float | None:
        """A later pass reads ``x``: by how much of amax it differs from the first pass that it resembles most.

        None where no first pass is open: it was not seen, or has been repeated already. Waits for an accelerator.
        """
        if step != self._step or not self._passes:
            return None
        sign = _sign(x)
        differences = [_difference(sign, one) for one in self._passes]
        least = min(range(len(differences)), key=lambda i: (differences[i], -i))
        del self._passes[least]
        return differences[least]


def _sign(x: Tensor) -> _Sign:
    x = x.detach()
    flat = x.reshape(-1) if x.is_contiguous() else x.flatten()
    return _Sign(amax_of(x), flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].float())


def _difference(one: _Sign, other: _Sign) -> float:
    """Over the larger amax; 1 where the shapes differ, 0 where both hold nothing finite."""
    if one.samples.shape != other.samples.shape:
        return 1.0
    low, high = sorted((one.amax.amax or 0.0, other.amax.amax or 0.0))
    if not high:
        return 0.0
    apart = (_finite(one.samples) - _finite(other.samples)).abs().amax()
    return max(float(apart), high - low) / high


def _finite(samples: Tensor) -> Tensor:
    return torch.nan_to_num(samples, nan=0.0, posinf=0.0, neginf=0.0)
