"""``fp8dbg whatif``: what another recipe would have done to the tensors of a run, from what was recorded alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from operator import itemgetter
from typing import Any

from fp8dbg.analysis.evidence import natural
from fp8dbg.analysis.whatif_casts import BASES, Casting, Histograms, Row, recorded
from fp8dbg.analysis.whatif_scales import Clips, scales_under
from fp8dbg.analysis.whatif_tally import FIGURES, Between, Cast, Tally
from fp8dbg.analysis.whatif_verdict import conclusion
from fp8dbg.errors import NothingRecordedError, UnknownNameError, UsageError
from fp8dbg.numerics.formats import format_named
from fp8dbg.numerics.recipes import Recipe, recipe_named
from fp8dbg.runs.dumps import Dump
from fp8dbg.runs.folder import Folder
from fp8dbg.runs.queries import QUESTIONS, ask
from fp8dbg.runs.schema import OPERANDS

MOST_ROWS = 3000
"""Rows of ``tensors`` that are read; of a longer run, steps that are spread evenly: some 0.5 ms a row."""

_TENSOR = ("layer", "tensor")
_PLACE = ("step", "microbatch", "call", "rank")


@dataclass(frozen=True)
class Answer:
    """One tensor: what was, and what would have been.

    Attributes:
        layer, tensor: which.
        basis: how the figures are known, one of ``BASES``; None: they are not, only the clipped steps are.
        steps: sampled steps that they are over, the same ones for both sides.
        recipe, in_force: what ``now`` is, and whether the layer really did it or was only compared with it.
        now, then: the ``FIGURES``, each as (lower, upper) bound, equal where exact; None where there is none.
        clipped: steps of the ``amax`` table, and on how many of them some value was beyond the maximum.
    """

    layer: str
    tensor: str
    basis: str | None
    steps: int
    recipe: str | None
    in_force: bool
    now: dict[str, Between | None]
    then: dict[str, Between | None]
    clipped: Clips


@dataclass(frozen=True)
class WhatIf:
    """The answer to "what would recipe R have done?".

    Attributes:
        recipe: R's label.
        steps, sampled_steps: sampled steps that figures are from, of how many there are.
        answers: one for each layer and operand.
        notes: what to know: what could not be told, why, and how to record it.
        headline: whether the recipe would have been better or worse, or that it cannot be told.
    """

    recipe: str
    steps: int
    sampled_steps: int
    answers: list[Answer]
    notes: list[str]
    headline: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def whatif(folder: Folder, recipe: str | Recipe, layer: str = "*", format: str | None = None) -> WhatIf:
    """What another recipe would have done to the operands of a run, from its folder alone.

    Per-tensor scales are exact where every code was counted, and between bounds where binades were; delayed scaling is
    replayed from the amaxes of every step; finer scales are exact where they were recorded beside the main recipe or
    the tensor was saved, and between bounds else. The first step is left out where there are others: scales are 1.

    Args:
        folder: an open run folder.
        recipe: the recipe, or its label ("delayed:history=16,margin=1").
        layer: glob of the layers wanted.
        format: a number format for all operands, instead of the recipe's.

    Raises:
        UsageError: unknown names, or a format for scales finer than a tensor.
        NothingRecordedError: nothing can be told; the message says what to record.
    """
    recipe, fmt = recipe_named(recipe), format_named(format) if format else None
    if fmt is not None and any(recipe.granularity(role) != "tensor" for role in OPERANDS):
        raise UsageError(f"Recipe {recipe} has formats of its own.", "Leave --format out, or give another recipe.")
    seen = ask(folder, "whatif_seen")
    layers = _chosen(folder, {row["layer"] for row in seen if row["layer"]}, layer)
    mine = [row for row in seen if row["layer"] in layers]
    steps, every = _spread(mine), sorted({s for row in mine for s in row["steps"] if s is not None})
    casting = Casting(recipe, fmt, scales_under(folder, recipe, layers, fmt))
    dumps = {(d.step, d.rank, d.layer, d.tensor): d for d in folder.dumps() if d.layer in layers}
    wanted = sorted({*steps, *(step for step, *_ in dumps if step in (every[1:] or every))})
    answers = [_answer(casting, list(rows), dumps) for rows in _tensors(folder, layers, wanted)]
    answers.sort(key=lambda a: (natural(a.layer), OPERANDS.index(a.tensor)))
    notes = _notes(folder, casting, answers, steps, every)
    if not any(a.basis or a.clipped.then is not None for a in answers):
        raise NothingRecordedError(f"What {recipe} would have done cannot be told from {folder.path}.", " ".join(notes))
    headline = conclusion(recipe.label, answers, _recording(casting, [a.tensor for a in answers]))
    return WhatIf(recipe.label, len(steps), len(every), answers, notes, headline)


def _chosen(folder: Folder, layers: set[str], glob: str) -> list[str]:
    if not layers:
        raise NothingRecordedError(
            f"No operand in {folder.path} was measured in full.", "Record with attach(every=100, histogram='codes')."
        )
    chosen = sorted(name for name in layers if name == glob or fnmatchcase(name, glob))
    if not chosen:
        raise UnknownNameError("layer", glob, list(layers))
    return chosen


def _spread(seen: list[Row]) -> list[int]:
    """Steps to look at: all, or evenly spread ones up to the last; without the first where there are others."""
    steps = sorted({step for row in seen for step in row["steps"] if step is not None})
    rows = sum(row["rows"] for row in seen)
    steps = steps[1:] or steps
    count = max(1, min(len(steps), int(MOST_ROWS * (len(steps) + 1) / max(rows, 1))))
    return [steps[-1 - i * len(steps) // count] for i in range(count)][::-1]


def _tensors(folder: Folder, layers: list[str], steps: list[int]) -> Iterator[Iterator[tuple[list[Row], Any]]]:
    """For each tensor its recorded places: the rows of one place, the one that is now first, and its values."""
    question = QUESTIONS["whatif_casts"]
    values = question.values({"layers": json.dumps(layers), "steps": json.dumps(steps)})
    table = folder.sql(question.sql, values).to_arrow_table()
    kept = Histograms(table["histogram"])
    rows = table.drop_columns(["histogram"]).to_pylist()
    tensor_of, place_of = itemgetter(*_TENSOR), itemgetter(*_PLACE)
    for _, of_tensor in groupby(enumerate(rows), key=lambda item: tensor_of(item[1])):
        yield (_place(list(group), kept) for _, group in groupby(of_tensor, key=lambda item: place_of(item[1])))


def _place(rows: list[tuple[int, Row]], kept: Histograms) -> tuple[list[Row], Any]:
    """What is now: the recipe in force; else the one beside which the values were kept."""
    values = {i: found for i, row in rows if (found := kept.values(i, row)) is not None}
    now = min(rows, key=lambda item: (item[1]["what_if"] is not None, item[0] not in values))
    others = [row for i, row in rows if i != now[0]]
    return [now[1], *others], next(iter(values.values()), None)


def _answer(casting: Casting, places: list[tuple[list[Row], Any]], dumps: dict[Any, Dump]) -> Answer:
    """One tensor: the best basis that all of its places have, or else its saved tensors, or else bounds."""
    found = [(rows[0], casting.cast(rows, values)) for rows, values in places]
    told = [(row, basis_cast) for row, basis_cast in found if basis_cast is not None]
    saved = _saved(casting, places, dumps) if not told or any(b == "bounds" for _, (b, _) in told) else []
    first = places[0][0][0]
    bases = {"dump"} if saved else {basis for _, (basis, _) in told}
    pairs = saved or [(row, cast) for row, (_, cast) in told]
    now, then = Tally(), Tally()
    for row, cast in pairs:
        then.add(row, cast)
        if (was := recorded(row)) is not None:
            now.add(row, was)
    clipped = casting.scales.clips(first["layer"], first["tensor"], first["format"], casting.recipe, casting.fmt)
    return Answer(
        first["layer"],
        first["tensor"],
        next((b for b in reversed(BASES) if b in bases), None),
        len({row["step"] for row, _ in pairs}),
        first["recipe"],
        first["what_if"] is None,
        now.figures(),
        then.figures(),
        clipped,
    )


def _saved(casting: Casting, places: list[tuple[list[Row], Any]], dumps: dict[Any, Dump]) -> list[tuple[Row, Cast]]:
    """From dumps: the first call of a step is the one that was saved."""
    pairs, done = [], set()
    for rows, _ in places:
        key = (rows[0]["step"], rows[0]["rank"], rows[0]["layer"], rows[0]["tensor"])
        if key in dumps and key not in done:
            done.add(key)
            cast = casting.dumped(rows[0], dumps[key])
            pairs += [(rows[0], cast)] if cast is not None else []
    return pairs


def _notes(folder: Folder, casting: Casting, answers: list[Answer], steps: list[int], every: list[int]) -> list[str]:
    notes = []
    if len(steps) < len(every) - 1:
        notes.append(f"The figures are from {len(steps)} of {len(every)} sampled steps, spread evenly.")
    untold = [a for a in answers if a.basis is None]
    if untold:
        notes.append(
            f"Nothing was kept that tells the figures of {len(untold)} of {len(answers)} tensors, "
            f"{untold[0].layer} {untold[0].tensor} first: {_remedy(casting, untold)}"
        )
    loose = [a for a in answers if a.basis == "bounds"]
    if loose:
        how = _recording(casting, [a.tensor for a in loose])
        notes.append(f"Bounds, for {len(loose)} of {len(answers)} tensors, are all that counts per binade give: {how}.")
    if casting.recipe.name == "delayed":
        notes += casting.scales.doubts()
    return notes


def _recording(casting: Casting, tensors: list[str]) -> str:
    """What makes the answer exact next time."""
    if all(casting.recipe.granularity(tensor) == "tensor" for tensor in tensors):
        return "attach(histogram='codes')"
    return f"attach(what_if=['{casting.recipe.label}']), or dump=['LAYER:TENSOR']"


def _remedy(casting: Casting, untold: list[Answer]) -> str:
    if casting.recipe.name == "delayed" and all(a.clipped.steps == 0 for a in untold):
        return "delayed scaling is replayed from the amax table, which holds no row of it; attach(layers=...) names it."
    if any(casting.recipe.granularity(a.tensor) != "tensor" for a in untold):
        return f"record with attach(what_if=['{casting.recipe.label}']), or save tensors with dump=['LAYER:TENSOR']."
    return "record with attach(histogram='codes'); 'binade' gives bounds."


__all__ = ["FIGURES", "Answer", "WhatIf", "whatif"]
