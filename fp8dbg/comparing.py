"""``fp8dbg compare``: open both sides, compare them, write the page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fp8dbg import output

if TYPE_CHECKING:
    from fp8dbg.analysis.compare import Comparison


def compared(a: str, b: str | None, ranks: str | None, html: Path | None) -> Comparison:
    """The comparison that a command line asks for; its page is written where ``html`` says.

    Raises:
        UsageError: the two sides are not named, or the page cannot be written.
        Fp8dbgError: as ``analysis.compare.compare`` raises it.
    """
    from fp8dbg.analysis.compare import compare
    from fp8dbg.analysis.sides import open_side, sides_of

    names = sides_of(a, b, ranks)
    with open_side(names[0]) as one, open_side(names[1]) as other:
        comparison = compare(one, other, names)
        if html is not None:
            from fp8dbg.render.compare_page import write_comparison

            output.say(f"The page is {write_comparison(one, other, comparison, html)}")
    return comparison
