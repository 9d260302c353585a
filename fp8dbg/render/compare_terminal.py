"""A comparison in a terminal: the verdict, the first differences, figures side by side, what was made differently."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from fp8dbg.analysis.compare import SAME, Comparison
from fp8dbg.analysis.differences import Difference, Row
from fp8dbg.render.names import clipped, shorten, visible

MOST = 8
"""Differences, and changes of the fingerprint, that are listed."""


def report(comparison: Comparison, console: Console) -> None:
    """Print it; from 80 columns."""
    width = max(60, console.width)
    style = "bold green" if comparison.verdict == SAME else "bold red"
    console.print(Text(clipped(visible(comparison.headline), 3 * width), style=style), soft_wrap=False)
    console.print(Text(f"A {shorten(comparison.a, width - 4)}\nB {shorten(comparison.b, width - 4)}", style="dim"))
    for lines in (_differences(comparison, width), _side_by_side(comparison), _fingerprint(comparison, width)):
        if lines:
            console.print()
        for line in lines:
            console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
    for note in comparison.notes:
        console.print(Text(f"Note: {visible(note)}", style="dim"))


def _differences(comparison: Comparison, width: int) -> list[Text]:
    found = comparison.figures.found
    if not found:
        return []
    head = Text("First to differ, in order of execution:", style="bold")
    rest = [Text(f"  and {len(found) - MOST} more; --html and --json have them all", style="dim")]
    return [head, *(_difference(d, width) for d in found[:MOST]), *(rest if len(found) > MOST else [])]


def _difference(found: Difference, width: int) -> Text:
    layer = shorten(found.layer, max(16, width - 62))
    return Text(f"  {found.first_step:>7} {layer} {found.name}: {found.title} {found.a:.3g} -> {found.b:.3g}")


def _side_by_side(comparison: Comparison) -> list[Text]:
    rows = [row for row in comparison.figures.side_by_side if row.figure != "non_finite" or row.differing]
    if not rows:
        return []
    worst = sorted(rows, key=lambda r: -abs(r.largest) / (r.threshold or 1e-9))[:MOST]
    head = Text(f"{'figure, over all layers':36} {'A':>9} {'B':>9} {'largest gap':>12} {'noise':>9}", style="dim")
    return [head, *map(_row, worst)]


def _row(row: Row) -> Text:
    unit = " log2" if row.log2 else ""
    name = f"{row.title} of {row.name}{unit}"
    line = f"{name:36} {row.a:>9.3g} {row.b:>9.3g} {row.largest:>12.3g} {row.threshold:>9.3g}"
    return Text(line, style="bold" if row.differing else "")


def _fingerprint(comparison: Comparison, width: int) -> list[Text]:
    changes = comparison.fingerprint
    if not changes:
        return [Text("Made alike: nothing in run.json differs.", style="dim")]
    each = max(12, (width - 30) // 2)
    lines = [Text(f"  {shorten(c.key, 24):24} {_value(c.a, each):{each}} {_value(c.b, each)}") for c in changes[:MOST]]
    rest = [Text(f"  and {len(changes) - MOST} more", style="dim")] if len(changes) > MOST else []
    return [Text("Made differently:", style="bold"), *lines, *rest]


def _value(value: object, width: int) -> str:
    if isinstance(value, list):
        value = "; ".join(map(str, value)) or "nothing"
    return "-" if value is None else shorten(visible(str(value)), width)
