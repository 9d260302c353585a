"""Small pieces of HTML: every text that goes in is escaped here, and only here."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8dbg.render.names import shorten, visible

SHOWN, HOVERED = 72, 1000
"""Characters of a name that are written out, and that its hover text holds."""


def escaped(text: object) -> str:
    """Text as HTML, quotes and control characters included; long text is kept whole."""
    return html.escape(visible(str(text)), quote=True)


def prose(text: str | None, width: int = 700) -> str:
    """A sentence as HTML; one made endless by the names in it is cut in its middle."""
    return html.escape(shorten(text or "", width))


def named(name: str | None, width: int = SHOWN) -> str:
    """A layer or tensor name: cut in its middle to ``width`` characters, more of it on hover."""
    if name is None:
        return '<span class="muted">the run</span>'
    shown, hovered = shorten(name, width), shorten(name, HOVERED)
    title = f' title="{html.escape(hovered)}"' if hovered != shown else ""
    return f'<span class="name"{title}>{html.escape(shown)}</span>'


def number(value: object, digits: int = 3) -> str:
    """A figure with so many significant digits; thousands grouped; an en dash where there is none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return escaped(value)
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    if value and not 1e-4 <= abs(value) < 1e5:
        return f"{value:.{digits - 1}e}".replace("-", "−")
    return (f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}").replace("-", "−")


def definitions(pairs: Iterable[tuple[str, str]], css: str = "") -> str:
    """A list of terms (plain text) with their values (HTML); empty values are left out."""
    rows = "".join(f"<dt>{escaped(term)}</dt><dd>{value}</dd>" for term, value in pairs if value)
    return f'<dl class="{css}">{rows}</dl>' if css else f"<dl>{rows}</dl>"


def section(anchor: str, title: str, body: str, css: str = "") -> str:
    """One section of the page; its heading is where the navigation leads."""
    return f'<section id="{anchor}" class="{css}"><h2>{escaped(title)}</h2>{body}</section>'


@dataclass(frozen=True, slots=True)
class Heading:
    """A table's column: key of the row, title, unit, form of its values: text, name, number, percent, html."""

    key: str
    title: str
    unit: str = ""
    form: str = "number"


def table(headings: Sequence[Heading], rows: Sequence[Mapping[str, Any]], *, sortable: bool = False) -> str:
    """A table that scrolls in itself. A cell that is missing is an en dash; ``percent`` takes a ratio."""
    head = "".join(_heading(heading, sortable) for heading in headings)
    body = "".join("<tr>" + "".join(_cell(h, row.get(h.key)) for h in headings) + "</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _heading(heading: Heading, sortable: bool) -> str:
    title = escaped(heading.title) + (f' <span class="unit">{escaped(heading.unit)}</span>' if heading.unit else "")
    shown = '<button type="button">' + title + "</button>" if sortable else title
    numeric = heading.form in ("number", "percent")
    return f'<th class="n">{shown}</th>' if numeric else f"<th>{shown}</th>"


def _cell(heading: Heading, value: Any) -> str:
    if heading.form == "html":
        return f"<td>{value or ''}</td>"
    if heading.form == "name":
        return f"<td>{named(value) if value is not None else '–'}</td>"
    if heading.form == "text":
        css = ' class="wrap"' if len(str(value)) > 40 else ""
        return f"<td{css}>{escaped(value) if value is not None else '–'}</td>"
    usable = isinstance(value, (int, float)) and math.isfinite(value)
    shown = number(100 * value if usable and heading.form == "percent" else value)
    return f'<td class="n" data-value="{value if usable else ""}">{shown}</td>'
