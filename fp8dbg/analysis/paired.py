"""The figures of two runs on the rows that both have: same layer, same tensor or GEMM, same step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fp8dbg.runs.folder import Folder
from fp8dbg.runs.queries import ask_table

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

KEYS = ("name", "layer", "step")


class Words:
    """Numbers for words, the same in both runs; -1 is no word."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def codes(self, column: pa.ChunkedArray) -> Integers:
        """The number of each word of a column."""
        encoded = column.combine_chunks().dictionary_encode()
        numbers = [self.known.setdefault(word, len(self.known)) for word in encoded.dictionary.to_pylist()]
        indices = encoded.indices.fill_null(len(numbers)).to_numpy(zero_copy_only=False)
        return np.asarray(np.array([*numbers, -1], np.int64)[indices])


@dataclass(frozen=True)
class Block:
    """The rows of one role (or GEMM) that both runs have, ordered by layer and step.

    Attributes:
        name: of the role.
        layers: names, in order of their number; layer: which of them each row is of; step: its step.
        casts: name of the cast in A and in B of each row, as numbers that are equal where they are alike.
        a, b: the figures of each run by name, [rows]; NaN where there is none.
    """

    name: str
    layers: list[str]
    layer: Integers
    step: Integers
    casts: tuple[Integers, Integers]
    a: dict[str, Floats]
    b: dict[str, Floats]


@dataclass(frozen=True)
class Paired:
    """Two runs' answers to one question, paired.

    Attributes:
        blocks: one for each role or GEMM.
        steps: the common steps.
        layers: the layers of A and those of B.
        casts: words for the numbers of ``Block.casts``.
    """

    blocks: list[Block]
    steps: list[int]
    layers: tuple[set[str], set[str]]
    casts: list[str]


def paired(a: Folder, b: Folder, question: str) -> Paired:
    """Pair two runs' answers to compare_tensors or compare_gemms."""
    layers, names, casts = Words(), Words(), Words()
    sides = [ask_table(folder, question) for folder in (a, b)]
    own = [set(side["layer"].unique().to_pylist()) for side in sides]
    coded = [
        (names.codes(s["name"]), layers.codes(s["layer"]), s["step"].to_numpy(), casts.codes(s["cast"])) for s in sides
    ]
    last = 1 + max((int(c[2].max()) for c in coded if len(c[2])), default=0)
    keys = [(c[0] * len(layers.known) + c[1]) * last + c[2] for c in coded]
    _, left, right = np.intersect1d(keys[0], keys[1], assume_unique=True, return_indices=True)
    name, layer, step, _ = (column[left] for column in coded[0])
    picked = (coded[0][3][left], coded[1][3][right])
    figures = [_figures(side, rows) for side, rows in zip(sides, (left, right), strict=True)]
    blocks = [
        Block(
            name=list(names.known)[name[part.start]],
            layers=list(layers.known),
            layer=layer[part],
            step=step[part],
            casts=(picked[0][part], picked[1][part]),
            a={figure: values[part] for figure, values in figures[0].items()},
            b={figure: values[part] for figure, values in figures[1].items()},
        )
        for part in _runs_of(name)
    ]
    return Paired(blocks, np.unique(step).tolist(), (own[0], own[1]), list(casts.known))


def _figures(side: pa.Table, rows: Integers) -> dict[str, Floats]:
    named = [name for name in side.column_names if name not in (*KEYS, "cast")]
    return {name: side[name].to_numpy().astype(np.float32)[rows] for name in named}


def _runs_of(sorted_values: Integers) -> Iterator[slice]:
    """The slice of each stretch of equal values."""
    edges = np.flatnonzero(np.diff(sorted_values)) + 1
    for start, end in zip([0, *edges.tolist()], [*edges.tolist(), len(sorted_values)], strict=True):
        if end > start:
            yield slice(start, end)
