"""Where the figures of two runs differ beyond noise: paired sampled steps, a series for each figure of each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8dbg.analysis.paired import Block, Paired, paired
from fp8dbg.runs.folder import Folder

Floats = npt.NDArray[np.float64]

SIGMAS = 8.0
"""Robust standard deviations (1.4826 x MAD over all layers and steps of a role) that still count as noise."""

AT_ONCE = 3.0
"""A single sampled step counts where it is beyond this many times its threshold; otherwise it takes two in a row."""


@dataclass(frozen=True)
class Figure:
    """A figure that runs are compared by.

    Attributes:
        name: the column of compare_tensors.sql or compare_gemms.sql.
        title: what it is called in words.
        log2: whether it is in powers of two: 1 is a factor of 2.
        floor: differences up to this are immaterial, however little the runs scatter: two seeds of one recipe do so.
        cap: noise is never taken to be more than this, so that a fault in most layers cannot hide itself.
        cast: whether it is about the cast, and compared only where both runs cast alike.
    """

    name: str
    title: str
    log2: bool
    floor: float
    cap: float
    cast: bool = False


TENSOR_FIGURES = (
    Figure("non_finite", "NaN or Inf", False, 0.0, 0.0),
    Figure("zeros", "share of zeros", False, 0.05, 0.2),
    Figure("rms", "rms", True, 1.5, 3.0),
    Figure("amax", "amax", True, 2.0, 4.0),
    Figure("peak_to_median", "amax over median", True, 2.0, 4.0),
    Figure("kurtosis", "kurtosis", True, 2.5, 5.0),
    Figure("underflow", "underflow", False, 0.02, 0.2, cast=True),
    Figure("saturated", "saturated", False, 0.01, 0.05, cast=True),
    Figure("rel_l2", "rel_l2", True, 1.0, 2.0, cast=True),
    Figure("gain", "norm_ratio", True, 0.2, 0.5, cast=True),
    Figure("scale_delta", "scale_delta", True, 2.0, 4.0, cast=True),
)
GEMM_FIGURES = (
    Figure("error", "rel_l2 of the GEMM", True, 1.0, 2.0, cast=True),
    Figure("unexplained", "error_unexplained", False, 0.01, 0.05, cast=True),
)


@dataclass(frozen=True)
class Difference:
    """One figure of one tensor or GEMM that differs beyond noise.

    Attributes:
        layer, name: of which tensor (or GEMM).
        figure: the figure's name; title: in words.
        first_step: first sampled step of the difference; steps: on how many it is so from there on.
        a, b: the figure at its worst step, undone from log2; worst_step: that step.
        beyond: the difference there over its threshold; threshold: that.
        from_start: whether it is there from the first or second sampled step that both runs have.
    """

    layer: str
    name: str
    figure: str
    title: str
    first_step: int
    steps: int
    worst_step: int
    a: float
    b: float
    beyond: float
    threshold: float
    log2: bool
    from_start: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Row:
    """A figure of one role side by side: medians over layers and common steps, and the largest difference."""

    name: str
    figure: str
    title: str
    log2: bool
    a: float
    b: float
    largest: float
    threshold: float
    layer: str
    differing: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Differences:
    """Everything that two runs' figures say about each other.

    Attributes:
        steps: sampled steps that both have.
        found: differences, earliest first, then in order of execution.
        side_by_side: a row per role and figure.
        other_casts: a sentence on tensors that the runs cast differently, whose casts are not judged; "" if none is.
        layers: layers that both have; only_a, only_b: those that one has.
    """

    steps: list[int]
    found: list[Difference]
    side_by_side: list[Row]
    other_casts: str
    layers: list[str]
    only_a: list[str]
    only_b: list[str]


def differences(a: Folder, b: Folder, order: Mapping[str, int]) -> Differences:
    """Compare every figure on the sampled steps that both runs have.

    Args:
        a, b: open run folders.
        order: place of each layer in the model.
    """
    tensors, gemms = paired(a, b, "compare_tensors"), paired(a, b, "compare_gemms")
    steps = sorted({*tensors.steps, *gemms.steps})
    found, rows = [], []
    for table, figures in ((tensors, TENSOR_FIGURES), (gemms, GEMM_FIGURES)):
        for figure in figures:
            for block in table.blocks:
                if judged := _judged(block, figure, np.array(steps)):
                    found.extend(judged[0])
                    rows.append(judged[1])
    one, other = tensors.layers
    return Differences(
        steps=steps,
        found=sorted(found, key=lambda d: (d.first_step, *_place(d, order), -d.beyond)),
        side_by_side=rows,
        other_casts=_other_casts(tensors),
        layers=sorted(one & other, key=lambda name: order.get(name, 0)),
        only_a=sorted(one - other),
        only_b=sorted(other - one),
    )


def _place(difference: Difference, order: Mapping[str, int]) -> tuple[int, int, int]:
    """Order of execution within a step: forward through the layers, then backward."""
    place = order.get(difference.layer, 0)
    forward = ("input", "weight", "fprop", "output")
    return (0, place, forward.index(difference.name)) if difference.name in forward else (1, -place, 0)


def _judged(block: Block, figure: Figure, steps: npt.NDArray[np.int64]) -> tuple[list[Difference], Row] | None:
    """A figure's differences and its row side by side, for one role; None where no row has it in both runs."""
    sides = block.a[figure.name], block.b[figure.name]
    usable = np.isfinite(sides[0]) & np.isfinite(sides[1])
    if figure.cast:
        usable &= (block.casts[0] == block.casts[1]) & (block.casts[0] >= 0)
    if not usable.any():
        return None
    layers, index = np.unique(block.layer[usable], return_inverse=True)
    at = np.searchsorted(steps, block.step[usable])
    values = np.full((2, len(layers), len(steps)), np.nan)
    for side, figures in enumerate(sides):
        values[side, index, at] = figures[usable]
    return _role(values, block.name, figure, [block.layers[i] for i in layers], steps.tolist())


def _role(
    values: Floats, name: str, figure: Figure, layers: list[str], steps: list[int]
) -> tuple[list[Difference], Row]:
    gap = values[1] - values[0]
    size = np.abs(gap)
    noise = 1.4826 * float(np.nanmedian(size))
    threshold = float(np.clip(SIGMAS * noise, figure.floor, figure.cap))
    first = _first_beyond(gap, threshold)
    worst = np.unravel_index(int(np.nanargmax(size)), size.shape)
    found = [
        _difference(values[:, i], size[i], int(first[i]), threshold, (layers[i], name), figure, steps)
        for i in np.flatnonzero(first < len(steps))
    ]
    middle = [_undone(float(np.nanmedian(side)), figure) for side in values]
    row = Row(
        name=name,
        figure=figure.name,
        title=figure.title,
        log2=figure.log2,
        a=middle[0],
        b=middle[1],
        largest=float(gap[worst]),
        threshold=threshold,
        layer=layers[worst[0]],
        differing=len(found),
    )
    return found, row


def _first_beyond(gap: Floats, threshold: float) -> npt.NDArray[np.int64]:
    """For each series where it first differs, or the number of steps if it never does; steps without a value pass."""
    steps = gap.shape[1]
    first = np.full(len(gap), steps, np.int64)
    for i, series in enumerate(gap):
        known = np.flatnonzero(np.isfinite(series))
        sign = np.sign(series[known]) * (np.abs(series[known]) > threshold)
        again = np.append(sign[1:] == sign[:-1], False)
        starts = np.flatnonzero((sign != 0) & (again | (np.abs(series[known]) > AT_ONCE * threshold)))
        if len(starts):
            first[i] = known[starts[0]]
    return first


def _difference(
    values: Floats, size: Floats, first: int, threshold: float, place: tuple[str, str], figure: Figure, steps: list[int]
) -> Difference:
    worst = first + int(np.nanargmax(size[first:]))
    known = np.flatnonzero(np.isfinite(size))
    return Difference(
        layer=place[0],
        name=place[1],
        figure=figure.name,
        title=figure.title,
        first_step=steps[first],
        steps=int((size[first:] > threshold).sum()),
        worst_step=steps[worst],
        a=_undone(float(values[0, worst]), figure),
        b=_undone(float(values[1, worst]), figure),
        beyond=float(size[worst] / threshold) if threshold else float("inf"),
        threshold=threshold,
        log2=figure.log2,
        from_start=first in known[:2] and first <= 2,
    )


def _undone(value: float, figure: Figure) -> float:
    """The figure as it is written everywhere else."""
    return value if not figure.log2 or figure.name == "scale_delta" else float(2.0 ** min(value, 1000.0))


def _other_casts(tensors: Paired) -> str:
    count, pair = 0, ("", "")
    for block in tensors.blocks:
        one, other = block.casts
        unlike = np.flatnonzero((one != other) & (one >= 0) & (other >= 0))
        if len(unlike) and not count:
            pair = (tensors.casts[one[unlike[0]]], tensors.casts[other[unlike[0]]])
        count += len(np.unique(block.layer[unlike]))
    if not count:
        return ""
    return (
        f"The runs cast {count} tensors differently (as {pair[0]} in A, {pair[1]} in B): the figures of their casts "
        "are not judged, those of their values are."
    )
