"""Verbs that look at a run: report, tensors, query, whatif, compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8dbg import output
from fp8dbg.cli.shared import Json, Layers, RunFolder, open_run, say_problems
from fp8dbg.errors import NothingRecordedError, UsageError, optional_library

if TYPE_CHECKING:
    from fp8dbg.analysis.run import Run
    from fp8dbg.analysis.summary import Summary


def report(
    run_folder: RunFolder,
    as_json: Json = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the page goes; RUN/report.html.")] = None,
    no_html: Annotated[bool, typer.Option("--no-html", help="Write no page.")] = False,
    png: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the figures as PNG files, too.")] = None,
) -> None:
    """What happened, where, why, what to do; also as a page.

    The page is RUN/report.html, one file that opens offline.
    """
    if html and no_html:
        raise UsageError("--html and --no-html exclude each other.", "Give one of them.")
    with open_run(run_folder) as run:
        summary = print_report(run, as_json=as_json)
        if not no_html:
            # the page of a run that is read from afar goes to the current folder
            write_page(run, summary, html or (run_folder if run_folder.is_dir() else Path()) / "report.html")
        if png:
            _write_pictures(run, summary, png)
    if any(finding.code == "nothing_recorded" for finding in summary.findings):
        raise typer.Exit(NothingRecordedError.exit_code)


def print_report(run: Run, *, as_json: bool) -> Summary:
    """Print what happened, as text or JSON; the summary it was made from."""
    from fp8dbg.analysis.summary import summarise
    from fp8dbg.render import terminal
    from fp8dbg.render.trends import trends

    summary = summarise(run)
    if as_json:
        typer.echo(output.json_text(summary.to_dict()))
    else:
        terminal.report(summary, output.console(), trends(run, summary.findings))
    return summary


def write_page(run: Run, summary: Summary, path: Path) -> None:
    """Write the page and say where it is. A run folder that cannot be written spoils nothing else: it is only said."""
    from fp8dbg.render.html import write_report

    try:
        output.say(f"The page is {write_report(run, summary, path)}")
    except UsageError as error:
        if path != run.path / "report.html":
            raise
        output.say(f"fp8dbg: {error}")


def _write_pictures(run: Run, summary: Summary, folder: Path) -> None:
    optional_library("kaleido", "png")
    from fp8dbg.render.pictures import charts, write_pictures

    for path in write_pictures(charts(run, summary), folder):
        output.say(f"A figure is {path}")


def tensors(
    run_folder: RunFolder,
    layer: Layers = "*",
    as_json: Json = False,
) -> None:
    """Which tensors were recorded, when, and which were saved whole."""
    from fp8dbg.listing import recorded_and_saved

    with open_run(run_folder) as run:
        recorded, saved = recorded_and_saved(run, layer)
        say_problems(run)
    if as_json:
        typer.echo(output.json_text({"recorded": recorded, "saved": saved}))
        return
    if recorded:
        output.print_table(
            ["layer", "tensor", "recipe", "first_step", "last_step", "sampled_steps", "amax_rows"], recorded
        )
    if saved:
        output.print_table(list(saved[0]), saved)


def query(
    run_folder: RunFolder,
    sql: Annotated[str, typer.Argument(metavar="SQL", help='One SELECT, as "select step, loss from steps".')],
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of row objects.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
) -> None:
    """Ask a run folder anything in SQL.

    Its tables are steps, amax, tensors, gemms and events; tensor_ratios is tensors with ratios formed of its counts.
    """
    if as_json and as_csv:
        raise UsageError("--json and --csv exclude each other.", "Give one of them.")
    from fp8dbg.runs.folder import open_folder  # no judgement is needed: this starts in half the time

    with open_folder(run_folder) as run:
        columns, rows = output.rows_of(run.sql(sql))
        say_problems(run)
        if as_json:
            output.print_json_rows(rows)
        elif as_csv:
            output.print_csv(columns, rows)
        else:
            output.print_table(columns, rows)


def whatif(
    run_folder: RunFolder,
    recipe: Annotated[str, typer.Option(help="The recipe asked about, as 'delayed:history=16,margin=1'.")],
    layer: Layers = "*",
    number_format: Annotated[str | None, typer.Option("--format", help="This format for every operand.")] = None,
    as_json: Json = False,
) -> None:
    """What another recipe would have done, from recorded data alone.

    Exact where every code was counted (attach(histogram='codes')), between bounds where binades were.
    """
    from fp8dbg.analysis.whatif import whatif as answer
    from fp8dbg.render.whatif import COLUMNS, table

    with open_run(run_folder) as run:
        found = answer(run, recipe, layer, number_format)
        say_problems(run)
    if as_json:
        typer.echo(output.json_text(found.to_dict()))
        return
    output.print_table(COLUMNS, table(found))
    for note in found.notes:
        output.say(note)
    typer.echo(f"\n{found.headline}")


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A run folder; RUN:3 is rank 3 of it.")],
    b: Annotated[str | None, typer.Argument(metavar="[B]", help="What to compare it with.")] = None,
    ranks: Annotated[str | None, typer.Option(metavar="N,M", help="Compare two ranks of A instead.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the comparison as a page.")] = None,
    as_json: Json = False,
) -> None:
    """Two runs: the same within noise, different from the start, or drifting since which step and layer.

    FP8 against BF16, two recipes, before and after a fallback, two ranks, trainer against rollout. Runs that never
    learned are refused: that they agree is no evidence.
    """
    from fp8dbg.comparing import compared

    comparison = compared(a, b, ranks, html)
    if as_json:
        typer.echo(output.json_text(comparison.to_dict()))
        return
    from fp8dbg.render import compare_terminal

    compare_terminal.report(comparison, output.console())
