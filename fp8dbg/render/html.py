"""report.html: one file that opens offline, with everything the run folder knows, worst first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8dbg.analysis.spikes import worst_of
from fp8dbg.errors import NothingRecordedError
from fp8dbg.render import cards, figures, sections
from fp8dbg.render.heatmap import MEANINGS, catalogue, heat_map
from fp8dbg.render.names import common_prefix, initials, shorten
from fp8dbg.render.page_data import PageData
from fp8dbg.render.page_words import checked, coverage, false_alarm, fingerprint, key_facts, marks, worst_table
from fp8dbg.render.palette import PALETTES
from fp8dbg.render.shell import document, write_page
from fp8dbg.render.timeline import timeline
from fp8dbg.runs.queries import ask
from fp8dbg.runs.schema import GEMMS

if TYPE_CHECKING:
    from fp8dbg.analysis.recommend import Point
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
    return write_page(Path(path) if path is not None else run.path / "report.html", page(run, summary))


def page(run: Run, summary: Summary) -> str:
    """The page as text."""
    named = dict.fromkeys(f.layer for f in summary.findings if f.layer is not None)
    moments = dict.fromkeys(at for at in map(cards.moment, summary.findings) if at is not None)
    data = PageData(run, list(named), list(moments))
    return document(_parts(run, summary, data), _payload(run, summary, data), SCRIPTS, str(run.path))


def _parts(run: Run, summary: Summary, data: PageData) -> list[tuple[str, str, str]]:
    """The sections: anchor, title in the navigation, HTML."""
    numbers = {layer: i for i, layer in enumerate(data.layers)}
    return [
        ("verdict", "Verdict", sections.verdict(_verdict(run, summary), key_facts(summary))),
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


def _verdict(run: Run, summary: Summary) -> sections.Verdict:
    pressing = next((f for f in summary.findings if f.severity != "info"), None)
    return sections.Verdict(summary.headline, pressing, summary.plan, checked(summary), _curve(run), summary.healthy)


def _curve(run: Run) -> Sequence[Point]:
    """The recommendation's; empty where too little was recorded for one."""
    try:
        return run.recommendation().curve
    except NothingRecordedError:
        return ()


def _timeline_note(summary: Summary) -> str:
    if not summary.run.steps:
        return ""
    marked = "Blue ticks: steps sampled in full. Orange: where findings begin, by number. "
    spike = worst_of(summary.spikes) if summary.spikes else None
    moved = f" Loss spike on step {spike.step}: {spike.first_move(lambda name: shorten(name, 60))}." if spike else ""
    return f"{marked}Press a step to mark it in every chart.{moved}"


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
            "brief": initials(name[prefix:], 15),
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
