"""What the live view shows: the loss of late, and now and then the findings and the worst tensors.

Reading is rationed: each kind of look waits until it has taken no more than its share of the time since the last, so
that watching a run costs the same small part of a core whatever its size.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.run import open_run
from fp8dbg.analysis.summary import summarise
from fp8dbg.runs.folder import open_folder
from fp8dbg.runs.queries import ask

LIGHT_SHARE, HEAVY_SHARE = 0.01, 0.02
"""Of one core: for the loss, and for findings and worst tensors."""

LIGHT_SECONDS, HEAVY_SECONDS = 2.0, 5.0
"""The least time between two looks."""

SHOWN = 400
"""Steps of loss that are kept."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """How a run goes: its state, its last step, loss and gradient norm of late, and what it is told."""

    path: str
    state: str
    step: int | None
    sampled_step: int | None
    losses: list[float | None]
    grad_norms: list[float | None]
    events: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is wrong with a run so far: headline, findings and tensors, worst first."""

    headline: str
    findings: list[Finding] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Ration:
    """Says when to look again, so that looking takes its share of one core at most.

    Args:
        share: of one core.
        seconds: the least time between two looks.
    """

    def __init__(self, share: float, seconds: float) -> None:
        self.share, self.seconds = share, seconds
        self._next = 0.0

    def is_due(self) -> bool:
        """Whether the time has come."""
        return time.monotonic() >= self._next

    def spent(self, cpu_seconds: float) -> None:
        """Say what a look took, in CPU seconds over all threads."""
        self._next = time.monotonic() + max(self.seconds, cpu_seconds / self.share)


def pulse(folder: Path) -> Pulse:
    """How a run goes; raises as `open_folder`."""
    with open_folder(folder) as run:
        late = ask(run, "late_steps", at_most=SHOWN)
        sampled = [row["step"] for row in late if row["sampled"]]
        return Pulse(
            str(folder),
            run.state,
            late[-1]["step"] if late else None,
            sampled[-1] if sampled else None,
            [row["loss"] for row in late],
            [row["grad_norm"] for row in late],
            ask(run, "events")[-20:],
        )


def judgement(folder: Path) -> Judgement:
    """What is wrong with a run so far; raises as `open_run`."""
    with open_run(folder) as run:
        summary = summarise(run)
        return Judgement(summary.headline, summary.findings, summary.worst, run.problems)


def changed(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What tells a folder's content now from its content before: its journals and run.json files, by size and time."""
    files = [*folder.glob("journal/*.arrows"), *folder.glob("run*.json")]
    return tuple(sorted((path.name, found.st_size, found.st_mtime_ns) for path in files if (found := _stat(path))))


def _stat(path: Path) -> Any:
    try:
        return path.stat()
    except OSError:
        return None


def snapshot(folder: Path) -> dict[str, Any]:
    """Pulse and judgement at once, as plain data."""
    now = judgement(folder)
    return {
        "pulse": asdict(pulse(folder)),
        "headline": now.headline,
        "findings": [finding.to_dict() for finding in now.findings],
        "worst": now.worst,
    }
