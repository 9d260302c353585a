"""What a notebook shows of a run: its headline, its facts and its findings, as a small piece of HTML."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8dbg.analysis.summary import Summary

SHOWN = 10
"""Findings in the table."""


def html_of(summary: Summary) -> str:
    """The summary as HTML; every name is escaped, and it brings no script."""
    run = summary.run
    facts = f"{run.path} · {run.state} · {run.steps} steps, {run.sampled_steps} sampled · {run.layers} layers"
    rows = "".join(
        f"<tr><td>{escape(f.severity)}</td><td>{escape(f.layer or '')}</td><td>{escape(f.tensor or f.gemm or '')}</td>"
        f"<td>{'' if f.first_step is None else f.first_step}</td><td>{escape(f.summary)}</td></tr>"
        for f in summary.findings[:SHOWN]
    )
    head = "<tr><th></th><th>layer</th><th>tensor</th><th>since</th><th>what</th></tr>"
    more = len(summary.findings) - SHOWN
    return (
        f"<div><p><b>{escape(summary.headline)}</b></p><p>{escape(facts)}</p>"
        f"{f'<table>{head}{rows}</table>' if rows else ''}{f'<p>and {more} more</p>' if more > 0 else ''}</div>"
    )
