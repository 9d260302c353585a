"""Run against run: the same within noise, different from the start, or drifting since a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8dbg.analysis.differences import Difference, Differences, Row, differences
from fp8dbg.analysis.loss_gap import FEWEST, Floats, LossGap, has_learned, loss_gap
from fp8dbg.analysis.run import Run
from fp8dbg.analysis.wording import listed
from fp8dbg.errors import NothingRecordedError, UsageError

SAME, FROM_START, DRIFTING = "same", "different from the start", "drifting"
"""The three verdicts."""

VOLATILE = ("created", "ended", "rank", "ranks", "sessions", "finished", "stopped", "layers", "schema_version")
"""Entries of run.json that say nothing about how a run was made."""

BASIS = (
    "Steps are paired. A figure differs where it is beyond eight robust deviations of its role's differences over all "
    "layers and steps, and beyond what two seeds of one recipe do to it, on two sampled steps in a row. The loss "
    "differs where its gap leaves six standard errors (four for the mean of the tail), widened for the correlation of "
    "steps, and 6 % (3 %) of what was learned."
)


class NotLearnedError(UsageError):
    """Runs that never learned: that they agree is no evidence of anything."""


@dataclass(frozen=True)
class Change:
    """One entry of the fingerprint that the runs do not share; None where one has none."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Comparison:
    """Two runs, compared.

    Attributes:
        a, b: their paths.
        verdict: ``SAME``, ``FROM_START`` or ``DRIFTING``.
        since: for ``DRIFTING`` the first step of the difference.
        headline: all of it in one sentence.
        first: the earliest figure that differs, in order of execution; None if none does.
        loss: the loss's gap; None where too few steps have a loss in both runs.
        figures: differences and figures side by side.
        fingerprint: what the runs were made with, where it differs.
        notes: what was not compared, and why.
        losses: [step, loss of A, loss of B] of each common step, for drawing.
    """

    a: str
    b: str
    verdict: str
    since: int | None
    headline: str
    first: Difference | None
    loss: LossGap | None
    figures: Differences
    fingerprint: list[Change]
    notes: list[str]
    losses: list[tuple[int, float | None, float | None]]

    @property
    def same(self) -> bool:
        """Whether nothing differs beyond noise."""
        return self.verdict == SAME

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the stable form of ``fp8dbg compare --json``."""
        return {
            "a": self.a,
            "b": self.b,
            "verdict": self.verdict,
            "since": self.since,
            "headline": self.headline,
            "basis": BASIS,
            "first": self.first.to_dict() if self.first else None,
            "loss": self.loss.to_dict() if self.loss else None,
            "common_sampled_steps": len(self.figures.steps),
            "common_layers": len(self.figures.layers),
            "differences": [d.to_dict() for d in self.figures.found],
            "side_by_side": [row.to_dict() for row in self.figures.side_by_side],
            "fingerprint": [{"key": c.key, "a": c.a, "b": c.b} for c in self.fingerprint],
            "notes": self.notes,
        }


def compare(a: Run, b: Run, names: tuple[str, str] | None = None) -> Comparison:
    """Compare two opened runs.

    Args:
        a, b: the runs; "B is higher" means that b's figure is.
        names: what to call them; their paths by default.

    Raises:
        NothingRecordedError: they have no sampled step, or no layer, in common.
        NotLearnedError: neither run's loss ever fell, or they agree while one's did not.
    """
    names = names or (str(a.path), str(b.path))
    figures = differences(a, b, a.evidence.layer_order)
    if not figures.steps:
        raise NothingRecordedError(_nothing(a, b, names), "Record both on the same steps: attach(..., every=...).")
    steps, losses = _losses(a, b)
    gap = loss_gap(steps, *losses, interval=a.evidence.interval) if steps else None
    learned = [has_learned(loss) for loss in _own_losses(a, b)]
    if not any(learned):
        raise _not_learned(names, _own_losses(a, b))
    since, from_start = _onset(figures, gap)
    if since is None and not all(learned) and all(len(loss) for loss in _own_losses(a, b)):
        raise _not_learned((names[learned.index(False)],), _own_losses(a, b))
    verdict = SAME if since is None else FROM_START if from_start else DRIFTING
    first = next(iter(figures.found), None)
    return Comparison(
        a=names[0],
        b=names[1],
        verdict=verdict,
        since=since,
        headline=_headline(verdict, since, first, gap, figures),
        first=first,
        loss=gap,
        figures=figures,
        fingerprint=_changes(a, b),
        notes=_notes(a, b, figures, gap),
        losses=[(s, _plain(x), _plain(y)) for s, x, y in zip(steps, *losses, strict=True)],
    )


def _plain(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _curve(run: Run) -> dict[int, float]:
    """Loss by step; NaN where a step has none. Empty where no step has one."""
    rows = run.evidence.ask("losses")
    if all(row["loss"] is None for row in rows):
        return {}
    return {int(r["step"]): np.nan if r["loss"] is None else r["loss"] for r in rows}


def _own_losses(a: Run, b: Run) -> list[Floats]:
    return [np.array(list(_curve(run).values()), np.float64) for run in (a, b)]


def _losses(a: Run, b: Run) -> tuple[list[int], tuple[Floats, Floats]]:
    """The common steps, and both losses on them."""
    one, other = _curve(a), _curve(b)
    steps = sorted(one.keys() & other.keys())
    return steps, (np.array([one[s] for s in steps]), np.array([other[s] for s in steps]))


def _onset(figures: Differences, gap: LossGap | None) -> tuple[int | None, bool]:
    """The first step of any difference, and whether it was there from the start."""
    early = figures.steps[min(1, len(figures.steps) - 1)]
    onsets = [(d.first_step, d.from_start) for d in figures.found[:1]]
    if gap is not None and gap.differs:
        step = gap.opening.step if gap.opening else gap.tail_from
        onsets.append((step, step <= early))
    elif gap is not None and gap.drifts:
        onsets.append((gap.tail_from, False))
    if not onsets:
        return None, False
    return min(onsets)[0], any(start for step, start in onsets if step == min(onsets)[0])


def _headline(
    verdict: str, since: int | None, first: Difference | None, gap: LossGap | None, figures: Differences
) -> str:
    count = f"{len(figures.layers)} layers on {len(figures.steps)} sampled steps"
    if verdict == SAME:
        return f"Same within noise: {count}{_loss_words(gap)}."
    start = "Different from the start" if verdict == FROM_START else f"Drifting since step {since}"
    if first is None:
        return f"{start}: the loss, and no figure of any layer{_loss_words(gap)}."
    differing = list(dict.fromkeys(d.layer for d in figures.found))
    more = f", {len(differing)} of {len(figures.layers)} layers in all" if len(differing) > 1 else ""
    loss = f"the loss; of the layers, since step {first.first_step}, " if first.first_step != since else ""
    return f"{start}: {loss}first {first.title} of {first.layer} {first.name} ({_pair(first)}){more}{_loss_words(gap)}."


def _pair(difference: Difference) -> str:
    return f"{difference.a:.3g} in A, {difference.b:.3g} in B on step {difference.worst_step}"


def _loss_words(gap: LossGap | None) -> str:
    if gap is None:
        return "; the loss was not compared"
    if gap.tail_gap is None:
        return "; one run's loss is not finite"
    side = "higher" if gap.tail_gap > 0 else "lower"
    noise = "beyond" if abs(gap.tail_gap) > gap.tail_band else "within"
    return f"; B's loss ends {abs(gap.tail_gap):.3g} {side}, {noise} its noise of {gap.tail_band:.3g}"


def _nothing(a: Run, b: Run, names: tuple[str, str]) -> str:
    for run, name in zip((a, b), names, strict=True):
        if not run.evidence.tensors:
            return f"{name} holds no figures: nothing can be compared."
    if not {r["layer"] for r in a.evidence.tensors} & {r["layer"] for r in b.evidence.tensors}:
        return f"{names[0]} and {names[1]} have no layer in common."
    return f"{names[0]} and {names[1]} have no sampled step in common."


def _not_learned(names: tuple[str, ...], losses: list[Floats]) -> NotLearnedError:
    if not any(len(loss) for loss in losses):
        return NotLearnedError(
            f"Neither {names[0]} nor {names[-1]} has a loss, so that either may have learned nothing.",
            "Log it: run.log(loss=...).",
        )
    who = "Neither run's loss" if len(names) == 2 else f"The loss of {names[0]}"
    return NotLearnedError(
        f"{who} ever fell beyond its noise (it takes {FEWEST} steps to say so): that runs agree which learned nothing "
        "is no evidence.",
        "Compare runs whose loss falls: train longer, or look for what keeps it flat.",
    )


def _changes(a: Run, b: Run) -> list[Change]:
    one, other = _flat(a.meta), _flat(b.meta)
    found = [Change(key, one.get(key), other.get(key)) for key in sorted(one.keys() | other.keys())]
    return [change for change in found if change.a != change.b]


def _flat(meta: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in meta.items():
        if above or key not in VOLATILE:
            flat |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return flat | ({} if above else {"kept in BF16": _kept(meta)})


def _kept(meta: Mapping[str, Any]) -> list[str]:
    """Layers with GEMMs that a fallback keeps in BF16."""
    layers = [entry for entry in meta.get("layers") or [] if isinstance(entry, Mapping)]
    return [f"{e.get('layer')}: {', '.join(e['bf16_gemms'])}" for e in layers if e.get("bf16_gemms")]


def _notes(a: Run, b: Run, figures: Differences, gap: LossGap | None) -> list[str]:
    notes = [figures.other_casts] if figures.other_casts else []
    for name, names in (("A", figures.only_a), ("B", figures.only_b)):
        if names:
            notes.append(f"Only {name} has {listed(names)}: not compared.")
    if gap is None:
        notes.append(f"Fewer than {FEWEST} common steps have a loss in both runs: only figures are compared.")
    elif gap.drifts:
        notes.append(f"The gap of the loss still changes at the end, by {gap.tail_slope:.2g} a step.")
    return notes + [f"A: {p}" for p in a.problems] + [f"B: {p}" for p in b.problems]


__all__ = ["Comparison", "Difference", "Differences", "NotLearnedError", "Row", "compare"]
