"""Verbs that do something with a run's files: export, compact."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fp8dbg import output
from fp8dbg.cli.shared import Json, RunFolder, open_run, say_problems


def export(
    run_folder: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; new or empty.")],
    to: Annotated[str, typer.Option(help="csv, parquet, tensorboard, wandb or mlflow.")],
    as_json: Json = False,
) -> None:
    """Write a run for other programs: tables as CSV or Parquet, curves for a tracker, offline.

    tensorboard, wandb and mlflow each need their library: pip install 'fp8dbg[tensorboard]'.
    """
    from fp8dbg.render.exports import export

    with open_run(run_folder) as run:
        done = export(run, to, out)
        say_problems(run)
    rows = f"{done.rows:,} {'rows' if to in ('csv', 'parquet') else 'values'} written to {done.path}. {done.next}"
    typer.echo(output.json_text(asdict(done)) if as_json else rows)


def compact(run_folder: RunFolder, as_json: Json = False) -> None:
    """Make few large files of a run's many small ones.

    Nothing is lost if it is killed; who reads meanwhile sees every row once. A rank that is being recorded is left.
    """
    from fp8dbg.runs.compact import compact

    done = compact(run_folder)
    for sentence in done.left:
        output.say(f"fp8dbg: {sentence}")
    if as_json:
        typer.echo(output.json_text(asdict(done)))
    else:
        parts, size = (done.parts_before, done.parts_after), (done.bytes_before / 1e6, done.bytes_after / 1e6)
        typer.echo(f"{parts[0]:,} parts are {parts[1]:,} now; {size[0]:.1f} MB are {size[1]:.1f} MB.")
