"""The page's findings: a card for each, with its evidence, its reasons and the charts that show it best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8dbg.analysis.finding import Finding
from fp8dbg.render.evidence_table import evidence_table
from fp8dbg.render.markup import definitions, escaped, named, number, prose, section

_MOST_FINDINGS = 40
_OPEN_FINDINGS = 3

CHART_TITLES = {
    "lost": "Values lost by the cast",
    "scales": "Scale in force and scale wanted",
    "histogram": "Values against the format's range (light shade: subnormal)",
    "noise": "Signal over quantisation noise (SQNR)",
    "magnitudes": "Magnitudes",
    "outliers": "Outliers",
    "gain": "Gain of the cast (norm ratio)",
    "nonfinite": "NaN and Inf",
    "fprop": "Error of fprop, by operand",
    "dgrad": "Error of dgrad, by operand",
    "wgrad": "Error of wgrad, by operand",
}

CHARTS_OF = {
    "underflow": ("lost", "histogram"),
    "wrong_format": ("lost", "histogram"),
    "outlier": ("outliers", "histogram"),
    "saturation": ("scales", "lost", "magnitudes"),
    "stale_scale": ("scales", "lost"),
    "frozen_scale": ("scales", "magnitudes"),
    "non_finite": ("nonfinite", "magnitudes"),
    "dead_tensor": ("lost", "magnitudes"),
    "gain_error": ("gain", "noise"),
    "rank_disagreement": ("scales", "magnitudes"),
}
"""The charts that show a verdict best; others get ``_OTHERWISE``, GEMMs their own."""
_OTHERWISE = ("noise", "lost")


def findings(found: Sequence[Finding], layers: Mapping[str, int], false_alarms: Mapping[str, str]) -> str:
    """A card per finding, worst first.

    Args:
        found: the findings.
        layers: number of each layer that the explorer knows.
        false_alarms: for each code, when the verdict is wrong.
    """
    if not found:
        return section("findings", "Findings", "<p>None.</p>")
    cards = "".join(_card(i, f, layers, false_alarms) for i, f in enumerate(found[:_MOST_FINDINGS], 1))
    more = len(found) - _MOST_FINDINGS
    rest = f'<p class="note">{more} more findings: fp8dbg report RUN --json lists them all.</p>' if more > 0 else ""
    return section("findings", f"Findings ({len(found)})", cards + rest, "long")


def _card(number_: int, finding: Finding, layers: Mapping[str, int], false_alarms: Mapping[str, str]) -> str:
    where = named(finding.layer) + (f" · {escaped(finding.tensor or finding.gemm)}" if finding.layer else "")
    since = (
        f' <span class="since">since step {number(finding.first_step)}</span>' if finding.first_step is not None else ""
    )
    head = (
        f'<span class="number">{number_}</span><span class="severity {finding.severity}">{finding.severity}</span>'
        f'<span class="line"><strong>{escaped(finding.title)}</strong>{since}<span class="where">{where}</span></span>'
    )
    number_of = layers.get(finding.layer or "")
    body = _words(finding, number_of, false_alarms.get(finding.code, "")) + _charts(finding, number_of)
    opened = " open" if number_ <= _OPEN_FINDINGS else ""
    return (
        f'<details class="finding" id="finding-{number_}"{opened}><summary>{head}</summary>'
        f'<div class="body">{body}</div></details>'
    )


def _words(finding: Finding, layer: int | None, false_alarm: str) -> str:
    name = finding.tensor or finding.gemm
    link = f'<a class="explore" href="#t/{layer}/{name}">Explore this tensor</a>' if layer is not None and name else ""
    said = definitions([("What", prose(finding.summary)), ("What to do", prose(finding.remedy)), ("", link)])
    reasons = [("Why this limit", prose(finding.basis)), ("False alarm when", escaped(false_alarm))]
    why = definitions([*reasons, ("Verdict", f"{escaped(finding.code)}, in docs/verdicts.md")])
    return f"<div>{said}</div><div>{why}</div>{evidence_table(finding)}"


def _charts(finding: Finding, layer: int | None) -> str:
    if layer is None or not (finding.tensor or finding.gemm):
        return ""
    names = CHARTS_OF.get(finding.code, _OTHERWISE) if finding.tensor else (finding.gemm or "",)
    at = moment(finding)
    step = "" if at is None else f' data-step="{at}"'
    recipe = "" if finding.what_if is None else f' data-recipe="{escaped(finding.what_if)}"'
    place = f'data-layer="{layer}" data-tensor="{escaped(finding.tensor or "")}"{step}{recipe}'
    return "".join(_chart(name, CHART_TITLES.get(name, name), place) for name in names)


def moment(finding: Finding) -> int | None:
    """The step whose histogram shows a finding: the end of what lasted, the step of what passed at once."""
    return finding.first_step if finding.last_step is None else finding.last_step


def _chart(name: str, title: str, place: str) -> str:
    label = escaped(title)
    chart = f'<div class="chart" role="img" aria-label="{label}" data-chart="{escaped(name)}" {place}></div>'
    return f'<figure class="box"><figcaption>{label}</figcaption>{chart}</figure>'
