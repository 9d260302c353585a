"""report.html: one file that opens offline, with everything the run folder knows, worst first."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from plotly.offline import get_plotlyjs

from fp8dbg import __version__, reports
from fp8dbg.errors import UsageError
from fp8dbg.render import cards, figures, sections
from fp8dbg.render.heatmap import MEANINGS, catalogue, heat_map
from fp8dbg.render.names import common_prefix, shorten, visible
from fp8dbg.render.page_data import PageData
from fp8dbg.render.page_words import checked, coverage, false_alarm, fingerprint, key_facts, marks, worst_table
from fp8dbg.render.palette import DARK, LIGHT, PALETTES, css_variables
from fp8dbg.render.timeline import timeline
from fp8dbg.runs.files import write_whole
from fp8dbg.runs.queries import ask
from fp8dbg.runs.schema import GEMMS

if TYPE_CHECKING:
    from fp8dbg.analysis.run import Run
    from fp8dbg.analysis.summary import Summary

SCRIPTS = ("page_store.js", "page_charts.js", "page_heat.js", "page_explorer.js", "page.js")
FIRST_FIGURE = {"saturation": "saturated_ratio", "stale_scale": "scale_delta", "frozen_scale": "scale_delta"} | {
    "non_finite": "nonfinite_ratio",
    "outlier": "peak_to_median",
    "gain_error": "excess_db",
    "rank_disagreement": "scale_delta",
}
"""The heat map that opens first, by the worst finding's code; underflow for every other."""


def write_report(run: Run, summary: Summary, path: Path | None = None) -> Path:
    """Write the page of a run.

    Args:
        run: an open run.
        summary: what ``summarise`` says about it.
        path: the file to write; ``report.html`` in the run folder by default.

    Returns:
        The file's path. The file appears whole or not at all.

    Raises:
        UsageError: the file cannot be written there.
    """
    target = Path(path) if path is not None else run.path / "report.html"
    text = page(run, summary)
    try:
        write_whole(target, lambda file: file.write(text.encode("utf-8", "replace")))
    except OSError as error:
        raise UsageError(f"Cannot write {target}: {error.strerror}.", "Give another file with --html.") from error
    return target


def page(run: Run, summary: Summary) -> str:
    """The page as text."""
    named = dict.fromkeys(f.layer for f in summary.findings if f.layer is not None)
    moments = dict.fromkeys(at for at in map(cards.moment, summary.findings) if at is not None)
    data = PageData(run, list(named), list(moments))
    script = "\n".join(['"use strict";', *(reports.text(name) for name in SCRIPTS)])
    plotly = get_plotlyjs()
    body, navigation = _body(run, summary, data)
    return Template(reports.text("page.html")).substitute(
        policy=_policy(plotly, script),
        title=html.escape(f"fp8dbg: {shorten(str(run.path), 80)}"),
        style=_style(),
        navigation=navigation,
        sections=body,
        footer=html.escape(f"fp8dbg {__version__} · {visible(str(run.path))}"),
        data=_embedded(_payload(run, summary, data)),
        plotly=plotly,
        script=script,
    )


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


def _body(run: Run, summary: Summary, data: PageData) -> tuple[str, str]:
    """The sections, and the links to them."""
    numbers = {layer: i for i, layer in enumerate(data.layers)}
    parts = [
        ("verdict", "Verdict", sections.verdict(_verdict(summary), key_facts(summary))),
        ("timeline", "Timeline", sections.timeline(_timeline_note(summary))),
        (
            "findings",
            "Findings",
            cards.findings(summary.findings, numbers, {f.code: false_alarm(f.code) for f in summary.findings}),
        ),
        ("heat", "Layers", sections.heat(bool(numbers))),
        ("explorer", "Explorer", sections.explorer(bool(numbers))),
        ("worst", "Worst tensors", worst_table(summary, numbers)),
        ("unseen", "Not seen", sections.unseen(coverage(summary, data))),
        ("fingerprint", "Fingerprint", sections.fingerprint(fingerprint(summary))),
    ]
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title, _ in parts)
    return "\n".join(text for _, _, text in parts), links


def _verdict(summary: Summary) -> sections.Verdict:
    pressing = [f for f in summary.findings if f.severity != "info"]
    return sections.Verdict(summary.headline, pressing[0] if pressing else None, summary.plan, checked(summary))


def _timeline_note(summary: Summary) -> str:
    marked = "Blue ticks: steps sampled in full. Orange: where findings begin, by number. "
    return marked + "Press a step to mark it in every chart." if summary.run.steps else ""


def _payload(run: Run, summary: Summary, data: PageData) -> dict[str, Any]:
    """Everything the page's script reads."""
    worst = summary.findings[0] if summary.findings else None
    numbers = {layer: i for i, layer in enumerate(data.layers)}
    return {
        **data.plain(),
        "layers": _layers(data.layers, summary),
        "charts": charts(),
        "titles": cards.CHART_TITLES,
        "meanings": catalogue(),
        "heat": [heat_map(meaning) for meaning in MEANINGS],
        "palettes": PALETTES,
        "timeline": timeline(ask(run, "page_steps"), marks(run, summary, data)),
        "first_figure": FIRST_FIGURE.get(worst.code if worst else "", "underflow_ratio"),
        "first_tensor": _first_tensor(summary, numbers),
    }


def _first_tensor(summary: Summary, numbers: dict[str, int]) -> list[Any] | None:
    """What the explorer opens with: the worst finding's tensor."""
    placed = (f for f in summary.findings if f.layer in numbers and f.tensor)
    return next(([numbers[f.layer or ""], f.tensor] for f in placed), None)


def _layers(layers: list[str], summary: Summary) -> list[dict[str, str]]:
    """Each layer's name in three lengths, and the severity of the worst finding about it."""
    prefix = len(common_prefix(layers))
    severity: dict[str | None, str] = {}
    for finding in summary.findings:
        severity.setdefault(finding.layer, finding.severity)
    return [
        {
            "short": shorten(name, 60),
            "tick": shorten(name, 46),
            "brief": shorten(name[prefix:], 15),
            "title": shorten(name, 1000),
            "severity": severity.get(name, ""),
        }
        for name in layers
    ]


def charts() -> dict[str, figures.Chart]:
    """The explorer's charts by name, empty: the page fills them with any tensor's figures."""
    made = {
        "lost": figures.lost_values(),
        "scales": figures.scales(),
        "histogram": figures.histogram(),
        "noise": figures.noise(),
        "magnitudes": figures.magnitudes(),
        "outliers": figures.outliers(),
        "gain": figures.gain(),
        "nonfinite": figures.not_finite(),
    }
    return made | {gemm: figures.blame(gemm, operands) for gemm, operands in GEMMS.items()}
