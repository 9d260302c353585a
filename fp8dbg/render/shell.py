"""What every page is: one file that opens offline, with its own scripts and styles and nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from fp8dbg import __version__, reports
from fp8dbg.errors import UsageError
from fp8dbg.render.names import shorten, visible
from fp8dbg.render.palette import DARK, LIGHT, css_variables
from fp8dbg.runs.files import write_whole


def document(parts: Sequence[tuple[str, str, str]], payload: dict[str, Any], scripts: Sequence[str], name: str) -> str:
    """A page as text.

    Args:
        parts: its sections: anchor, title in the navigation, HTML.
        payload: what its scripts read.
        scripts: files of reports/, in order.
        name: of what the page is about; a path, mostly.
    """
    script = "\n".join(['"use strict";', *(reports.text(file) for file in scripts)])
    plotly = get_plotlyjs()
    return Template(reports.text("page.html")).substitute(
        policy=_policy(plotly, script),
        title=html.escape(f"fp8dbg: {shorten(name, 80)}"),
        style=_style(),
        navigation="".join(f'<a href="#{anchor}">{title}</a>' for anchor, title, _ in parts),
        sections="\n".join(text for _, _, text in parts),
        footer=html.escape(f"fp8dbg {__version__} · {visible(name)}"),
        data=_embedded(payload),
        plotly=plotly,
        script=script,
    )


def write_page(target: Path, text: str) -> Path:
    """Write a page, whole or not at all; returns its path.

    Raises:
        UsageError: it cannot be written there.
    """
    try:
        write_whole(target, lambda file: file.write(text.encode("utf-8", "replace")))
    except OSError as error:
        raise UsageError(f"Cannot write {target}: {error.strerror}.", "Give another file with --html.") from error
    return target


def _policy(*scripts: str) -> str:
    """Content security policy: these scripts, the page's own styles, and nothing from anywhere."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _style() -> str:
    light, dark = css_variables(LIGHT), css_variables(DARK)
    return (
        f":root{{color-scheme:light;{light}}}\n:root[data-shown=dark]{{color-scheme:dark;{dark}}}\n"
        f"@media print{{:root,:root[data-shown=dark]{{color-scheme:light;{light}}}}}\n{reports.text('page.css')}"
    )


def _embedded(payload: dict[str, Any]) -> str:
    """JSON that cannot end its script element, nor open a comment in it."""
    text = json.dumps(payload, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")
