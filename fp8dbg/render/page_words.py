"""What the page says in words about one run: from a summary and a run folder to the texts of ``sections``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8dbg.analysis.verdicts import VERDICTS
from fp8dbg.analysis.wording import listed, percent
from fp8dbg.render import sections
from fp8dbg.render.markup import Heading, escaped, number, section, table
from fp8dbg.render.page_data import PageData
from fp8dbg.render.timeline import Marks
from fp8dbg.runs.queries import ask

if TYPE_CHECKING:
    from fp8dbg.analysis.run import Run
    from fp8dbg.analysis.summary import Summary

EVENTS = 30
"""Events listed, at most."""


def key_facts(summary: Summary) -> list[tuple[str, str]]:
    """Term and value (HTML) of what a reader wants to know first."""
    run = summary.run
    return [
        ("Steps", "none" if run.first_step is None else f"{number(run.first_step)} to {number(run.last_step)}"),
        ("Sampled in full", f"{number(run.sampled_steps)} steps"),
        ("Loss", f"{number(run.first_loss, 4)} → {number(run.last_loss, 4)}"),
        ("Layers", number(run.layers)),
        ("Recipe", escaped(recipes(summary))),
        ("Formats", escaped(", ".join(run.formats))),
        ("Host", escaped(", ".join(run.hosts))),
        ("Ranks", number(len(run.ranks)) if len(run.ranks) > 1 else ""),
        ("State", escaped(run.state)),
        ("Cost of fp8dbg", f"{percent(run.overhead_share)} of wall time" if run.overhead_share is not None else ""),
    ]


def recipes(summary: Summary) -> str:
    """The recipes in force, and those only compared with."""
    said = [", ".join(summary.run.recipes)] if summary.run.recipes else []
    if summary.run.what_if:
        said.append(f"{', '.join(summary.run.what_if)} (compared with, not in force)")
    return "; ".join(said)


def checked(summary: Summary) -> list[str]:
    """What a run without pressing findings was checked for."""
    run, codes = summary.run, [verdict.CODE.replace("_", " ") for verdict in VERDICTS]
    if not run.sampled_steps:
        return []
    return [
        f"Checked {len(codes)} kinds of trouble on {run.sampled_steps} sampled steps of {run.layers} layers: "
        f"{', '.join(codes)}. What was not seen is said below."
    ]


def marks(run: Run, summary: Summary, data: PageData) -> Marks:
    """What the timeline marks."""
    onsets = [(f.first_step, i) for i, f in enumerate(summary.findings, 1) if f.first_step is not None]
    return Marks(
        onsets=onsets,
        spikes=[spike.step for spike in summary.spikes],
        sampled=[(bucket.first_step, bucket.last_step) for bucket in data.grid.buckets],
        gaps=_steps(run, "gap"),
        triggers=_steps(run, "trigger"),
    )


def _steps(run: Run, kind: str) -> list[int]:
    """Steps with events of a kind."""
    rows = ask(run, "events", kind=kind)
    return list(dict.fromkeys(row["step"] for row in rows if row["step"] is not None))


def worst_table(summary: Summary, numbers: dict[str, int]) -> str:
    """The tensors that fared worst, sortable."""
    headings = [
        Heading("link", "layer", form="html"),
        Heading("tensor", "tensor", form="text"),
        Heading("format", "format", form="text"),
        Heading("underflow_ratio", "underflow", "%", "percent"),
        Heading("saturated_ratio", "saturated", "%", "percent"),
        Heading("rel_l2", "rel_l2"),
        Heading("scale_delta", "scale_delta", "log2"),
        Heading("norm_ratio", "norm_ratio"),
        Heading("peak_to_median", "amax/median"),
        Heading("worst_step", "worst at step"),
    ]
    rows = [row | {"link": sections.tensor_link(row["layer"], row["tensor"], numbers)} for row in summary.worst]
    note = (
        f'<p class="note">The {len(rows)} tensors that lost most, each figure at its worst over the run. '
        "Press a heading to sort.</p>"
    )
    body = note + table(headings, rows, sortable=True) if rows else "<p>No tensor was recorded.</p>"
    return section("worst", "Worst tensors", body, "long")


def false_alarm(code: str) -> str:
    """When the verdict of this code is wrong, from its own documentation; "" for an unknown code."""
    texts = [verdict.__doc__ or "" for verdict in VERDICTS if code == verdict.CODE]
    return " ".join("".join(texts).partition("False alarm when:")[2].split("\n\n")[0].split())


def coverage(summary: Summary, data: PageData) -> list[str]:
    """What was not seen by the recorder, could not be read, or is not on the page."""
    seen = summary.coverage
    events = [f"Step {row['step']}: {row['detail']}" for row in seen.events[:EVENTS]]
    if len(seen.events) > EVENTS:
        events.append("More events: fp8dbg query RUN 'from events' lists them all.")
    unseen = [f"No figures of {listed(seen.unseen_layers, 12)}."] if seen.unseen_layers else []
    return [*unseen, *seen.notes, *seen.problems, *events, *_thinned(data)]


def _thinned(data: PageData) -> list[str]:
    """What the page itself leaves out."""
    widest = max((bucket.sampled for bucket in data.grid.buckets), default=1)
    said = []
    if widest > 1:
        said.append(
            f"On this page up to {widest} sampled steps share one point or cell, which shows the worst of them; the "
            "run folder holds every one."
        )
    if data.close is not None:
        said.append(f"The {len(data.close_layers)} layers that findings name are drawn at a finer resolution.")
    if data.histogram_steps:
        said.append(f"Histograms are on this page for steps {', '.join(map(str, data.histogram_steps))} only.")
    return said


def fingerprint(summary: Summary) -> dict[str, dict[str, Any]]:
    """run.json by groups: what is nested is a group of its own.

    Its recipe is what ``attach`` was asked to compare BF16 layers with; what FP8 layers compute by is beside it.
    """
    facts = dict(summary.run.fingerprint)
    compared = {"compared with": facts.pop("recipe")} if "recipe" in facts else {}
    compared |= {"in force": {"recipes": summary.run.recipes}} if summary.run.recipes else {}
    facts |= compared
    groups = {k: v for k, v in facts.items() if isinstance(v, dict)}
    plain = {k: v for k, v in facts.items() if k not in groups and v is not None}
    return {"run": plain, **groups}
