"""The page's sections as HTML: everything in words is here; charts are drawn into it by the page's own script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8dbg.analysis.finding import Finding
from fp8dbg.render.curve import curve
from fp8dbg.render.markup import Heading, definitions, escaped, named, number, prose, section, table

if TYPE_CHECKING:
    from fp8dbg.analysis.plan import Plan
    from fp8dbg.analysis.recommend import Point


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the top of the page says.

    Attributes:
        headline: the verdict in one sentence.
        worst: the most pressing finding; None if there is none.
        plan: what to keep in BF16 or give another recipe.
        checked: sentences on what was looked at, for a run without findings.
        curve: what GEMM after GEMM in BF16 buys, in order; may be empty.
        healthy: whether a run without a pressing finding is to be called that.
    """

    headline: str
    worst: Finding | None
    plan: Plan
    checked: Sequence[str]
    curve: Sequence[Point] = ()
    healthy: bool = True


def verdict(said: Verdict, pairs: Sequence[tuple[str, str]]) -> str:
    """The banner: what, where, since when, what to do; the plan ready to be copied; the key facts (values are HTML)."""
    severity = said.worst.severity if said.worst else "fine" if said.healthy else "watch"
    body = _worst(said.worst) if said.worst else "".join(f"<p>{prose(line)}</p>" for line in said.checked)
    banner = f'<div class="verdict {severity}"><h1>{prose(said.headline, 420)}</h1>{body}</div>'
    return f'<section id="verdict">{banner}{_plan(said.plan)}{curve(said.curve)}{_facts(pairs)}</section>'


def _worst(finding: Finding) -> str:
    where = named(finding.layer) + "".join(f", {escaped(part)}" for part in (finding.tensor, finding.gemm) if part)
    return definitions(
        [
            ("Where", where),
            ("Since", f"step {number(finding.first_step)}" if finding.first_step is not None else ""),
            ("What to do", prose(finding.remedy)),
        ]
    )


def _plan(plan: Plan) -> str:
    if not plan:
        return ""
    rows = [
        {"layer": e.layer, "gemms": ", ".join(e.gemms), "recipe": e.recipe, "reason": prose(e.reason)}
        for e in plan.entries
    ]
    headings = (
        Heading("layer", "layer", form="name"),
        Heading("gemms", "GEMMs", form="text"),
        Heading("recipe", "recipe", form="text"),
        Heading("reason", "because", form="html"),
    )
    entries = [f" {_json(layer)}: {_json(gemms)}" for layer, gemms in plan.as_fallback().items()]
    fallback = "{\n" + ",\n".join(entries) + "\n}"
    return (
        '<div class="copy"><p class="note">Fallback plan: what to take out of the run\'s recipe, as '
        "<code>fp8dbg.simulate(model, fallback=...)</code> takes it.</p>"
        f'<div><pre id="fallback" tabindex="0">{escaped_lines(fallback)}</pre>'
        '<button type="button" data-copies="fallback">Copy</button></div></div>'
        f"<details><summary>Why each of them ({len(rows)})</summary>{table(headings, rows)}</details>"
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def escaped_lines(text: str) -> str:
    """Escaped text that keeps its line breaks."""
    return "\n".join(escaped(line) for line in text.split("\n"))


def _facts(pairs: Sequence[tuple[str, str]]) -> str:
    shown = "".join(f"<div><dt>{escaped(term)}</dt><dd>{value}</dd></div>" for term, value in pairs if value)
    return f'<dl class="facts">{shown}</dl>'


def tensor_link(layer: str, tensor: str, layers: Mapping[str, int]) -> str:
    """A layer's name as a link to one of its tensors in the explorer."""
    return f'<a href="#t/{layers[layer]}/{escaped(tensor)}">{named(layer)}</a>' if layer in layers else named(layer)


def timeline(note: str) -> str:
    """Where the timeline is drawn; without a note there is nothing to draw."""
    chart = '<div id="timeline-chart" class="chart" role="img" aria-label="Loss over the steps"></div>' if note else ""
    return section("timeline", "Timeline", f'{chart}<p class="note">{escaped(note or "No step was recorded.")}</p>')


def heat(any_layer: bool) -> str:
    """Where the heat maps are drawn, with their selectors."""
    if not any_layer:
        return section("heat", "Layers over steps", "<p>No tensor was recorded.</p>")
    controls = (
        '<div class="controls" id="heat-controls">'
        '<label>figure <select id="heat-figure"></select></label>'
        '<label>of <select id="heat-name"></select></label>'
        '<label>layers <select id="heat-rows"><option value="all">all, in the model\'s order</option>'
        '<option value="worst">the worst 40</option></select></label>'
        '<label>across <select id="heat-across"><option value="steps">steps</option></select></label></div>'
    )
    chart = (
        '<div id="heat-chart" class="chart" tabindex="0" role="application" '
        'data-without="No layer has this figure." '
        'aria-label="Heat map of layers over steps: arrow keys move, Enter opens the tensor"></div>'
    )
    readout = '<p id="heat-readout" class="readout" aria-live="polite"></p>'
    return section("heat", "Layers over steps", f'{controls}<p class="note" id="heat-note"></p>{chart}{readout}')


def explorer(any_layer: bool) -> str:
    """Where the tensor explorer is drawn."""
    if not any_layer:
        return section("explorer", "Tensor explorer", "<p>No tensor was recorded.</p>")
    aside = (
        '<aside><input type="search" id="find" placeholder="find a layer" aria-label="find a layer" autocomplete="off">'
        '<p class="note" id="find-count" aria-live="polite"></p><ul id="layer-list"></ul></aside>'
    )
    main = (
        '<div><h3 id="explorer-title" class="name" tabindex="-1"></h3>'
        '<nav class="tabs" id="tensor-tabs" aria-label="Tensors of this layer"></nav>'
        '<p class="note" id="explorer-facts"></p><div class="charts" id="explorer-charts"></div>'
        '<h3 id="gemm-heading" tabindex="-1">GEMMs of this layer: error, split by operand</h3>'
        '<div class="charts" id="gemm-charts"></div></div>'
    )
    return section("explorer", "Tensor explorer", f'<div class="explorer">{aside}{main}</div>', "long")


def unseen(sentences: Sequence[str]) -> str:
    """What was not seen, and so is not judged."""
    listed = "".join(f"<li>{prose(sentence)}</li>" for sentence in sentences)
    body = f'<ul class="unseen">{listed}</ul>' if listed else "<p>Nothing that fp8dbg knows of.</p>"
    return section("unseen", "What was not seen", body)


def fingerprint(groups: Mapping[str, Mapping[str, Any]]) -> str:
    """What the run was made with, one table per group."""
    tables = "".join(
        f"<div><h3>{escaped(name)}</h3>"
        + "<table>"
        + "".join(f"<tr><td>{escaped(k)}</td><td>{escaped(_short(v))}</td></tr>" for k, v in group.items())
        + "</table></div>"
        for name, group in groups.items()
        if group
    )
    return section("fingerprint", "Run fingerprint", f'<div class="print">{tables}</div>')


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 400 else text[:400] + "…"
