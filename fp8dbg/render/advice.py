"""A recommendation in a terminal: the plan with its reasons, the curve, what to do instead, what stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from fp8dbg.analysis.wording import percent
from fp8dbg.render.names import shorten

if TYPE_CHECKING:
    from fp8dbg.analysis.recommend import Point, Recommendation

MOST = 30
"""Rows of the curve and sentences of each part that are shown; --json has all."""


def advise(found: Recommendation, console: Console) -> None:
    """Print a recommendation; lines are wrapped at the console's width."""
    console.print(Text(found.headline, style="bold"))
    for line in _lines(found):
        console.print(Text(line), soft_wrap=False)


def _lines(found: Recommendation) -> Iterator[str]:
    if found.plan:
        yield "\nThe plan:"
        for entry in found.plan.entries:
            yield f"  {shorten(entry.layer, 72)}: {', '.join(entry.gemms)} in {entry.recipe}. {entry.reason}"
    if found.curve:
        yield "\nGEMM by GEMM, * in the plan (harm removed, FP8 FLOPs given up, all so far)."
        yield "Harm is in units of the loss; it ranks GEMMs and does not forecast the loss:"
        yield from (_point(point) for point in found.curve[:MOST])
    if found.instead:
        yield "\nInstead of BF16:"
        for action in found.instead[:MOST]:
            recipe = f" ({action.recipe})" if action.recipe else ""
            yield f"  {action.kind.capitalize()}{recipe}, {action.layer or 'the run'}: {action.why} {action.how}"
    for title, sentences in (("What this does not change:", found.not_fixed), ("Notes:", found.notes)):
        if sentences:
            yield f"\n{title}"
            yield from (f"  {sentence}" for sentence in sentences[:MOST])


def _point(point: Point) -> str:
    removed = "not measured" if point.harm_removed is None else percent(point.harm_removed)
    mark = "*" if point.in_plan else " "
    where = f"{shorten(point.layer, 60)} {point.gemm}"
    return f"  {mark} {where}: {removed}, {percent(point.flops_given_up)}; {point.reason}"
