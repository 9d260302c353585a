"""The report in a terminal: one screen, from 80 columns, worst first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.spikes import worst_of
from fp8dbg.analysis.wording import listed, percent
from fp8dbg.render.names import clipped, shorten
from fp8dbg.render.trends import NOT_FINITE

if TYPE_CHECKING:
    from fp8dbg.analysis.summary import Summary

FEWEST_LINES, MOST_LINES = 24, 40
WIDE = 110
"""Columns from which a finding is told by its sentence, not by its title."""
STYLES = {"act": "bold red", "watch": "yellow", "info": "dim", "fine": "bold green"}
MOST_OF_A_SENTENCE = 4
"""Lines that a sentence on what was not seen may take."""
_BELOW = 2
"""Lines below the report: where the page is, and the prompt."""


@dataclass(frozen=True, slots=True)
class Room:
    """How many lines each part may take on this screen."""

    findings: int
    plan: int
    unseen: int


def report(summary: Summary, console: Console, trends: Sequence[str] = ()) -> None:
    """Print a summary so that it fits one screen.

    Args:
        summary: what ``summarise`` says.
        console: where to; its width and height decide how much is shown: 80 x 24 to 120 x 40. Into a file, as much as
            on the larger. Colours are the console's business: none where it has none or NO_COLOR is set.
        trends: a sparkline for each finding, as ``trends.trends`` makes them; without them the column is left out.
    """
    width = max(40, console.width)
    lines = console.height if console.is_terminal else MOST_LINES
    top, spikes = [*_headline(summary, width), *_facts(summary, width)], _spikes(summary, width)
    taken = len(top) + len(spikes) + _BELOW
    room = _room(summary, width, min(max(lines, FEWEST_LINES), MOST_LINES) - taken)
    for line in (
        *top,
        *_findings(summary.findings, trends, width, room.findings),
        *spikes,
        *_plan(summary, width, room.plan),
        *_unseen(summary, width, room.unseen),
    ):
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True, highlight=False)


def _room(summary: Summary, width: int, lines: int) -> Room:
    """Shares out the lines that are left, after the headings of the parts that there are."""
    sentences = _unseen_sentences(summary)
    lines -= 3 * bool(summary.findings) + 2 * bool(summary.plan) + bool(sentences)
    plan = min(len(summary.plan.entries), max(3, lines // 3))
    least = min(len(summary.findings), 3)
    wanted = sum(len(_wrapped(sentence, width, MOST_OF_A_SENTENCE)) for sentence in sentences)
    unseen = min(wanted, max(1, lines - plan - least))
    return Room(max(3, lines - plan - unseen), plan, unseen)


def _headline(summary: Summary, width: int) -> list[Text]:
    """At most three lines."""
    otherwise = "fine" if summary.healthy else "watch"
    pressing = next((f.severity for f in summary.findings if f.severity != "info"), otherwise)
    told = clipped(summary.headline, 3 * width - 12)
    wrapped = Text(told, style=STYLES[pressing]).wrap(_measuring(width), width)
    for line in wrapped:
        line.rstrip()
    return [*wrapped[:3], Text("")]


def _wrapped(sentence: str, width: int, lines: int, indent: str = "") -> list[Text]:
    """A sentence on as many lines as it needs, at most ``lines``: what is more is cut."""
    room = width - len(indent)
    told = Text(clipped(sentence, lines * room - 12)).wrap(_measuring(width), room)[:lines]
    for line in told:
        line.rstrip()
    return [Text(indent).append(line) for line in told]


def _measuring(width: int) -> Console:
    """A console that only measures."""
    return Console(width=width, no_color=True, quiet=True)


def _facts(summary: Summary, width: int) -> list[Text]:
    """What was run: on one line where it fits."""
    run = summary.run
    steps = "no step" if run.first_step is None else f"steps {run.first_step} to {run.last_step}"
    ranks = [f"{len(run.ranks)} ranks"] if len(run.ranks) > 1 else []
    recipe = run.recipes or [f"compared with {name}" for name in run.what_if]
    cost = [] if run.overhead_share is None else [f"cost {percent(run.overhead_share)}"]
    said = [steps, f"{run.sampled_steps} sampled", f"{run.layers} layers", *ranks, ", ".join(recipe), *cost]
    told = " · ".join(shorten(part, 40) for part in said if part)
    path = f"{shorten(run.path, width - 12)} · {run.state}"
    lines = [f"{path} · {told}"] if cell_len(path) + cell_len(told) + 3 <= width else [path, clipped(told, width)]
    return [Text(line, style="dim") for line in lines]


def _findings(findings: Sequence[Finding], trends: Sequence[str], width: int, room: int) -> list[Text]:
    """A line each, one that counts the rest, and where the verdicts are explained."""
    if not findings:
        return []
    shown = findings if len(findings) <= room else findings[: room - 1]
    columns = _columns(shown, trends, width)
    padded = [*trends, *([""] * len(shown))]
    rows = [_row(finding, trend, columns) for finding, trend in zip(shown, padded, strict=False)]
    more = len(findings) - len(shown)
    rest = [Text(f"and {more} more; report.html and --json have them all", style="dim")] if more else []
    codes = ", ".join(dict.fromkeys(finding.code for finding in shown))
    broken = f"{NOT_FINITE} is NaN or Inf; " if any(NOT_FINITE in trend for trend in trends) else ""
    legend = Text(clipped(f"{broken}docs/verdicts.md explains {codes}", width), style="dim")
    return [Text(""), _heading(columns), *rows, *rest, legend]


@dataclass(frozen=True, slots=True)
class Columns:
    """Widths of the table's columns in terminal cells; 0 leaves the trend out."""

    layer: int
    tensor: int
    trend: int
    what: int
    told: bool


def _columns(findings: Sequence[Finding], trends: Sequence[str], width: int) -> Columns:
    tensor = max([6, *(cell_len(_tensor(f)) for f in findings)])
    trend = max((len(trend) for trend in trends), default=0)
    left = width - 5 - tensor - 7 - (trend + 1 if trend else 0) - 4
    longest = max(cell_len(shorten(f.layer or "the run", 60)) for f in findings)
    layer = max(5, min(longest, left // 2 if width < WIDE else left // 3))
    return Columns(layer, tensor, trend, left - layer, width >= WIDE)


def _heading(columns: Columns) -> Text:
    trend = f"{'trend':<{columns.trend}} " if columns.trend else ""
    return Text(f"{'':5} {'layer':<{columns.layer}} {'tensor':<{columns.tensor}} {'since':>7} {trend}what", style="dim")


def _row(finding: Finding, trend: str, columns: Columns) -> Text:
    since = "" if finding.first_step is None else str(finding.first_step)
    trend = f"{trend:<{columns.trend}} " if columns.trend else ""
    what = clipped(finding.summary if columns.told else finding.title, columns.what)
    return Text.assemble(
        (f"{finding.severity:<5}", STYLES[finding.severity]),
        f" {_padded(shorten(finding.layer or 'the run', columns.layer), columns.layer)}",
        f" {_padded(_tensor(finding), columns.tensor)} {since:>7} {trend}",
        what,
    )


def _tensor(finding: Finding) -> str:
    return shorten(finding.tensor or finding.gemm or "", 12)


def _padded(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))


def _spikes(summary: Summary, width: int) -> list[Text]:
    """The spikes, and what moved first at the worst of them."""
    if not summary.spikes:
        return []
    steps = listed([str(spike.step) for spike in summary.spikes], 4)
    told = f"Loss spike{'s' if len(summary.spikes) > 1 else ''} at step {steps}"
    first = worst_of(summary.spikes).first_move(lambda name: shorten(name, 40))
    return [Text(""), Text(told), *_wrapped(f"{first}.", width, 2, "  ")]


def _plan(summary: Summary, width: int, room: int) -> list[Text]:
    """The fallback list, a line per layer."""
    entries = summary.plan.entries
    if not entries:
        return []
    shown = entries if len(entries) <= room else entries[: room - 1]
    names = [shorten(entry.layer, width - 40) for entry in shown]
    longest = max(map(cell_len, names))
    rows = [
        Text(
            f"  {_padded(name, longest)}  {', '.join(entry.gemms)}"
            + ("" if entry.recipe == "bf16" else f" -> {entry.recipe}")
        )
        for name, entry in zip(names, shown, strict=True)
    ]
    more = len(entries) - len(shown)
    rest = [Text(f"  and {more} more", style="dim")] if more else []
    what = "Keep in BF16" if all(entry.recipe == "bf16" for entry in entries) else "Keep in BF16, or as said"
    return [Text(""), Text(f"{what} (fallback plan):", style="bold"), *rows, *rest]


def _unseen(summary: Summary, width: int, room: int) -> list[Text]:
    """Whole sentences, on as many lines as they need, and one line that counts the rest."""
    told = [_wrapped(sentence, width, MOST_OF_A_SENTENCE) for sentence in _unseen_sentences(summary)]
    if not told:
        return []
    whole = sum(map(len, told)) <= room
    shown: list[Text] = []
    count = 0
    while count < len(told) and len(shown) + len(told[count]) <= room - (not whole):
        shown += told[count]
        count += 1
    left = len(told) - count
    rest = f"and {left} more" if count else f"Not seen: {left} things"
    return [Text(""), *shown, *([] if whole else [Text(f"{rest}; report.html lists them", style="dim")])]


def _unseen_sentences(summary: Summary) -> list[str]:
    seen = summary.coverage
    names = [shorten(layer, 40) for layer in seen.unseen_layers]
    layers = [f"{len(names)} layers: {listed(names)}"] if names else []
    missed = [*layers, *seen.problems, *(str(event["detail"]) for event in seen.events)]
    return [*(f"Not seen: {sentence}" for sentence in missed), *seen.notes]
