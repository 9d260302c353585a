"""The facts that verdicts judge: answers to the questions of reports/, asked once and kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fp8dbg.analysis.limits import Limit
from fp8dbg.errors import UsageError
from fp8dbg.numerics.formats import FORMATS
from fp8dbg.numerics.recipes import Recipe
from fp8dbg.runs.folder import Folder
from fp8dbg.runs.queries import ask
from fp8dbg.runs.schema import OPERANDS

Row = dict[str, Any]

PRINCIPAL_SHARE = 0.5
"""The onset is the first stretch that reaches this share of the figure's worst: a blip before it is not the onset."""


@dataclass(frozen=True)
class Suspect:
    """A tensor whose figure went beyond its limit, and the stretch of steps in which it first did in earnest.

    Attributes:
        facts: its row of tensor_facts (or gemm_facts).
        figure: the figure.
        limit: the limit, with its basis.
        stretch: the row of onset (or gemm_onset) of that stretch.
        last_step: last sampled step beyond the limit, in this stretch or a later one.
        steps: sampled steps beyond the limit from the onset on.
        share: of the sampled steps since the onset, the share beyond the limit.
    """

    facts: Row
    figure: str
    limit: Limit
    stretch: Row
    last_step: int
    steps: int
    share: float

    @property
    def first_step(self) -> int:
        """First sampled step beyond the limit."""
        return int(self.stretch["first_step"])


class Evidence:
    """What a run folder holds, for verdicts.

    Args:
        folder: an open run folder.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._answers: dict[str, list[Row]] = {}

    def ask(self, question: str, **parameters: Any) -> list[Row]:
        """The answer to a question of reports/, kept for the next time."""
        key = json.dumps([question, parameters], sort_keys=True)
        if key not in self._answers:
            self._answers[key] = ask(self.folder, question, **parameters)
        return self._answers[key]

    @cached_property
    def run(self) -> Row:
        """The row of run_facts."""
        return self.ask("run_facts")[0]

    @property
    def end(self) -> int | None:
        """Last sampled step."""
        last = self.run["last_sampled"]
        return None if last is None else int(last)

    @property
    def interval(self) -> int:
        """Steps from one sampled step to the next, on average; 1 at least."""
        first, last = self.run["first_sampled"] or 0, self.run["last_sampled"] or 0
        return int(max(1, round((last - first) / max(1, self.run["sampled_steps"] - 1))))

    @cached_property
    def healthy_window(self) -> tuple[int, int]:
        """First and last step of the run's own window of usual values: from 5 % to 40 % of its sampled steps.

        A fault inside it does no harm: a window that is itself beyond the format's limits is not believed (limits).
        """
        first, last = self.run["first_sampled"] or 0, self.run["last_sampled"] or 0
        return first + max(1, round(0.05 * (last - first))), first + round(0.4 * (last - first))

    @cached_property
    def tensors(self) -> list[Row]:
        """tensor_facts of every tensor, results included."""
        start, end = self.healthy_window
        return _placed(self.ask("tensor_facts", healthy_from=start, healthy_to=end))

    @cached_property
    def operands(self) -> list[Row]:
        """tensor_facts of the tensors that a recipe casts to a format fp8dbg knows, one row for each layer and tensor.

        The recipe in force; where none is, the one that the run compares with. Further what-if recipes are not judged:
        nobody asked to use them.
        """
        rows: dict[tuple[str, str], list[Row]] = {}
        for row in self.tensors:
            if row["recipe"] and row["tensor"] in OPERANDS and row["format"] in FORMATS:
                rows.setdefault((row["layer"], row["tensor"]), []).append(row)
        return [min(found, key=self._distance) for found in rows.values()]

    def _distance(self, row: Row) -> tuple[int, str]:
        """How far a row's recipe is from what the layer really does."""
        if row["what_if"] is None:
            return 0, ""
        return (1 if row["what_if"] == self._compared_with else 2), row["what_if"]

    @cached_property
    def _compared_with(self) -> str:
        recipe = self.folder.meta.get("recipe")
        try:
            return Recipe.from_dict(recipe).label if isinstance(recipe, Mapping) else str(recipe)
        except (UsageError, KeyError):
            return ""

    @cached_property
    def gemms(self) -> list[Row]:
        """gemm_facts of every GEMM."""
        start, end = self.healthy_window
        return _placed(self.ask("gemm_facts", healthy_from=start, healthy_to=end))

    @cached_property
    def amax(self) -> list[Row]:
        """amax_facts of every operand with a scale; percentiles from about 500 steps, which is plenty."""
        return _placed(self.ask("amax_facts", every=max(1, (self.run["steps"] or 0) // 500)))

    @cached_property
    def in_force(self) -> bool:
        """Whether any layer of the run computes in FP8; if none does, the run asks what FP8 would do to it."""
        return any(row["what_if"] is None for row in self.operands)

    def suspects(self, figure: str, limits: Iterable[tuple[Row, Limit]]) -> list[Suspect]:
        """The tensors among ``limits`` whose figure went beyond its limit.

        Args:
            figure: as reports/onset.sql names them.
            limits: rows of tensor_facts, each with its limit.
        """
        pairs = {(r["layer"], r["tensor"], r["what_if"]): (r, limit) for r, limit in limits}
        asked = [
            {"layer": k[0], "tensor": k[1], "what_if": k[2], "figure": figure, "limit": limit.value}
            for k, (_, limit) in pairs.items()
        ]
        stretches = self._stretches("onset", asked, ("layer", "tensor", "what_if"))
        return [_suspect(*pairs[key], figure, found) for key, found in stretches.items()]

    def gemm_suspects(self, figure: str, limits: Iterable[tuple[Row, Limit]]) -> list[Suspect]:
        """The same for GEMMs: rows of gemm_facts and figures of reports/gemm_onset.sql."""
        pairs = {(r["layer"], r["gemm"]): (r, limit) for r, limit in limits}
        asked = [
            {"layer": k[0], "gemm": k[1], "figure": figure, "limit": limit.value} for k, (_, limit) in pairs.items()
        ]
        stretches = self._stretches("gemm_onset", asked, ("layer", "gemm"))
        return [_suspect(*pairs[key], figure, found) for key, found in stretches.items()]

    def _stretches(self, question: str, asked: list[Row], keys: tuple[str, ...]) -> dict[tuple[Any, ...], list[Row]]:
        found: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.ask(question, limits=json.dumps(asked)) if asked else ():
            found.setdefault(tuple(row[k] for k in keys), []).append(row)
        return found

    @cached_property
    def layer_order(self) -> dict[str, int]:
        """Place of each layer in the order of execution, as run.json lists them; unknown ones follow by number."""
        known = [str(e.get("layer") if isinstance(e, Mapping) else e) for e in self.folder.meta.get("layers") or []]
        others = sorted({row["layer"] for row in self.tensors} - set(known), key=natural)
        return {name: i for i, name in enumerate(dict.fromkeys([*known, *others]))}


def _suspect(facts: Row, limit: Limit, figure: str, stretches: list[Row]) -> Suspect:
    enough = PRINCIPAL_SHARE * max(s["worst"] for s in stretches)
    start = next(i for i, s in enumerate(stretches) if s["worst"] >= enough)
    first, rest = stretches[start], stretches[start:]
    steps = sum(s["steps"] for s in rest)
    share = steps / (first["total_steps"] - first["position"] + 1)
    return Suspect(facts, figure, limit, first, int(rest[-1]["last_step"]), int(steps), share)


def _placed(rows: list[Row]) -> list[Row]:
    """Without rows that a stranger's file has of no layer, tensor or GEMM: there is nothing to say of them."""
    return [row for row in rows if all(row.get(key, "") is not None for key in ("layer", "tensor", "gemm"))]


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts layers.2 before layers.10."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", name) if p]
