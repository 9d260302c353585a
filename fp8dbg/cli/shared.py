"""What several verbs need: their common arguments, and how a run folder is opened and its problems told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8dbg import output

if TYPE_CHECKING:
    from fp8dbg.analysis.run import Run
    from fp8dbg.runs.folder import Folder

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder that fp8dbg.attach wrote.")]
Limits = Annotated[
    list[str] | None, typer.Option(metavar="LIMIT", help="Measure what goes past it, as 'underflow_ratio > 0.5'.")
]
TriggerDump = Annotated[
    list[str] | None, typer.Option(metavar="LAYER:TENSOR", help="Save them whole around a loss spike, NaN or LIMIT.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
Layers = Annotated[str, typer.Option(metavar="GLOB", help="Only layers whose name matches.")]


def open_run(path: Path) -> Run:
    """An open run folder; what judges it is imported here, not before a verb needs it."""
    from fp8dbg.analysis.run import open_run

    return open_run(path)


def say_problems(run: Folder) -> None:
    """What could not be read, on stderr: an answer from the rest must not look like one from all."""
    for problem in run.problems[:5]:
        output.say(f"fp8dbg: {problem}")
    if len(run.problems) > 5:
        output.say(f"fp8dbg: {len(run.problems) - 5} more files are not as they should be: fp8dbg report {run.path}")
