"""The recommendation's curve as a drawing: what each GEMM more in BF16 buys, against the FP8 work it gives up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8dbg.analysis.wording import percent
from fp8dbg.render.markup import escaped
from fp8dbg.render.names import shorten

if TYPE_CHECKING:
    from fp8dbg.analysis.recommend import Point

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 26, 12, 40
"""Margins."""

MOST = 200
"""Points that are drawn."""


def curve(points: Sequence[Point]) -> str:
    """SVG in a figure; "" where fewer than two points were measured. Colours are the page's, so it follows its theme.

    Args:
        points: of a recommendation, in order; those without a measured harm are left out.
    """
    measured = [p for p in points if p.harm_removed is not None][:MOST]
    if len(measured) < 2:
        return ""
    widest = max(p.flops_given_up for p in measured) or 1.0
    places = [(_across(p.flops_given_up / widest), _down(p.harm_removed or 0.0)) for p in measured]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(_across(0.0), _down(0.0)), *places])
    dots = "".join(_dot(p, *place) for p, place in zip(measured, places, strict=True))
    caption = "Harm removed by keeping GEMM after GEMM in BF16, against the FP8 work given up; filled: in the plan. "
    caption += "Harm ranks GEMMs; it does not forecast the loss."
    return (
        '<figure class="curve" style="margin:12px 0">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(caption)}" '
        f'style="max-width:500px;width:100%" font-size="11" fill="var(--muted)">{_axes(widest)}'
        f'<polyline points="{line}" fill="none" stroke="var(--blue)" stroke-width="1.5"/>{dots}</svg>'
        f'<figcaption class="note">{escaped(caption)}</figcaption></figure>'
    )


def _across(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _down(share: float) -> float:
    return TOP + (1.0 - min(max(share, 0.0), 1.0)) * (HEIGHT - TOP - BOTTOM)


def _dot(point: Point, x: float, y: float) -> str:
    """A circle that says what it is when pointed at."""
    fill = "var(--blue)" if point.in_plan else "var(--paper)"
    told = f"{shorten(point.layer, 80)} {point.gemm}: {percent(point.harm_removed or 0.0)} of the harm is gone"
    told += f" for {percent(point.flops_given_up)} of the FP8 FLOPs"
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" stroke="var(--blue)" stroke-width="1.5">'
    return f"{circle}<title>{escaped(told)}</title></circle>"


def _axes(widest: float) -> str:
    rows = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_down(share):.1f}" y2="{_down(share):.1f}" stroke="var(--grid)"/>'
        f'<text x="{LEFT - 6}" y="{_down(share) + 4:.1f}" text-anchor="end">{percent(share)}</text>'
        for share in (0.0, 0.5, 1.0)
    )
    columns = "".join(
        f'<text x="{_across(share):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">'
        f"{percent(share * widest)}</text>"
        for share in (0.0, 0.5, 1.0)
    )
    title = f'<text x="{_across(0.5):.1f}" y="{HEIGHT - 4}" text-anchor="middle">FP8 FLOPs given up</text>'
    return rows + columns + title
