"""The answer of ``fp8dbg whatif`` as rows of a table: each figure as it was and as it would have been."""

from __future__ import annotations

from fp8dbg.analysis.whatif import Answer, WhatIf
from fp8dbg.analysis.whatif_tally import Between
from fp8dbg.analysis.wording import percent

COLUMNS = (
    "layer",
    "tensor",
    "basis",
    "steps",
    "recipe",
    "underflow",
    "saturated",
    "rel_l2",
    "sqnr_db",
    "clipped_steps",
)


def table(found: WhatIf) -> list[dict[str, str | int]]:
    """A row of ``COLUMNS`` for each answer: "now → then", "now → lower..upper" where bounds are all that is known.

    ``recipe`` is what the left side is; in brackets where it was not in force but compared with.
    """
    return [_row(answer) for answer in found.answers]


def _row(answer: Answer) -> dict[str, str | int]:
    recipe = answer.recipe or "-"
    clipped = [("-" if n is None else str(n)) for n in (answer.clipped.now, answer.clipped.then)]
    return {
        "layer": answer.layer,
        "tensor": answer.tensor,
        "basis": answer.basis or "-",
        "steps": answer.steps,
        "recipe": recipe if answer.in_force else f"({recipe})",
        "underflow": _change(answer, "underflow_ratio"),
        "saturated": _change(answer, "saturated_ratio"),
        "rel_l2": _change(answer, "rel_l2"),
        "sqnr_db": _change(answer, "sqnr_db"),
        "clipped_steps": f"{clipped[0]} → {clipped[1]} of {answer.clipped.steps}",
    }


def _change(answer: Answer, figure: str) -> str:
    return f"{_text(answer.now[figure], figure)} → {_text(answer.then[figure], figure)}"


def _text(value: Between | None, figure: str) -> str:
    if value is None:
        return "-"
    low, high = (_number(end, figure) for end in value)
    return low if low == high else f"{low}..{high}"


def _number(value: float, figure: str) -> str:
    if figure.endswith("_ratio"):
        return percent(value).replace(" %", "%")
    return f"{value:.1f}" if figure == "sqnr_db" else f"{value:.3g}"
