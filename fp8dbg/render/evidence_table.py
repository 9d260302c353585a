"""The rows that a finding rests on, as a table of its card: columns that say something, under names that say what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8dbg.analysis.finding import Finding
from fp8dbg.render.markup import Heading, table

_MOST_ROWS, _MOST_COLUMNS = 12, 14

TITLES = {
    "rows": ("amaxes recorded", ""),
    "rows_at_one": ("amaxes under a scale of 1", ""),
    "last_at_one": ("last step under 1", ""),
    "first_not_at_one": ("first step not under 1", ""),
    "back_at_one": ("back at 1 since step", ""),
    "amax_at_one": ("largest amax under 1", ""),
    "high_reach": ("usual scale x amax", "log2"),
    "highest_reach": ("largest scale x amax", "log2"),
    "highest_at": ("largest at step", ""),
    "rows_infinite": ("infinite amaxes", ""),
    "first_infinite": ("first infinite at step", ""),
    "margin_needed": ("margin that holds it", ""),
    "before": ("last step without it", ""),
    "worst_scale_delta": ("worst scale delta", "log2"),
    "usual_scale_delta": ("usual scale delta", "log2"),
}
"""Column -> its title and unit, where the column's own name does not tell."""

HIDDEN = frozenset({"position", "total_steps"})
"""What the verdicts reckon with, and nobody reads."""

OF_A_FROZEN_SCALE = frozenset(
    {"first_step", "last_step", "rows", "rows_at_one", "last_at_one", "first_not_at_one", "back_at_one", "amax_at_one"}
)
"""What the history of an amax, whose steps are those of the record, tells of a scale that stands still alone."""


def evidence_table(finding: Finding) -> str:
    """The table; "" where no column says more than the card does."""
    told = [row for row in finding.evidence if "figure" in row] or finding.evidence
    rows = [{k: v for k, v in row.items() if _plain(v)} for row in told[:_MOST_ROWS]]
    keys = [k for k in dict.fromkeys(k for row in rows for k in row) if _tells(k, rows, finding)]
    if not keys:
        return ""
    headings = [Heading(k, *TITLES.get(k, (k.replace("_", " "), "")), _form(k, rows)) for k in keys[:_MOST_COLUMNS]]
    return f'<div class="wide">{table(headings, rows)}</div>'


def _tells(key: str, rows: Sequence[Mapping[str, Any]], finding: Finding) -> bool:
    """Whether a column says what the card does not say already."""
    history = any("rows_at_one" in row for row in rows)
    if key in HIDDEN or (history and finding.code != "frozen_scale" and key in OF_A_FROZEN_SCALE):
        return False
    values = {row.get(key) for row in rows}
    known = {None, getattr(finding, key, None)} if key in ("layer", "tensor", "gemm", "what_if") else {None}
    return not values <= known


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _form(key: str, rows: Sequence[Mapping[str, Any]]) -> str:
    return "number" if any(isinstance(row.get(key), (int, float)) for row in rows) else "text"
