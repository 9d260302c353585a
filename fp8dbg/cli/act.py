"""Verbs that act on a run: recommend, bisect, check."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fp8dbg import output
from fp8dbg.cli.shared import Json, RunFolder, open_run, say_problems
from fp8dbg.errors import NothingRecordedError


def recommend(
    run_folder: RunFolder,
    host: Annotated[str | None, typer.Option("--for", metavar="HOST", help="Write this host's configuration.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the files go; RUN by default.")] = None,
    as_json: Json = False,
) -> None:
    """What to keep in BF16, as the host's own configuration.

    The smallest plan that takes away the harm, the whole curve beside it, and what to do where BF16 is not the answer.
    """
    from fp8dbg.recommending import recipe_of, require_host, write_plan
    from fp8dbg.render.advice import advise

    if host is not None:
        require_host(host)
    with open_run(run_folder) as run:
        found, recipe = run.recommendation(), recipe_of(run)
        say_problems(run)
    if as_json:
        typer.echo(output.json_text(found.to_dict()))
    else:
        advise(found, output.console())
    for path in write_plan(found.plan, host, out or run_folder, recipe):
        output.say(f"Written: {path}")


def bisect(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD ...", help="A short training run in FP8.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the trials; an old one is continued.")] = Path(
        "bisect_dir"
    ),
    plan_space: Annotated[str, typer.Option(help="What is told apart: gemms, layers or kinds.")] = "gemms",
    last: Annotated[int, typer.Option(help="Steps at the end whose mean loss counts.")] = 20,
    repeats: Annotated[int, typer.Option(help="Trials all in BF16, and none, for the noise.")] = 2,
    as_json: Json = False,
) -> None:
    """Find the smallest set to keep in BF16 by short reruns of CMD.

    CMD starts from one checkpoint each time; FP8DBG_REPEAT is the number of a repeat, to seed it by. Every trial is a
    run folder below DIR/trials; DIR/plan.json is the answer.
    """
    from fp8dbg.bisecting import Asked, Bisection, table

    with output.progress(None, "trials") as advance:
        trials = Bisection(out, Asked(tuple(command), plan_space, last, repeats), advance)
        found = trials.run()
    if as_json:
        typer.echo(output.json_text({"found": asdict(found), "trials": [asdict(trial) for trial in trials.trials]}))
    else:
        told = ["unplanned"] if any(trial.unplanned for trial in trials.trials) else []
        output.print_table(["trial", "layers", "gemms", "in_bf16", "loss", "code", *told], table(trials.trials))
        typer.echo(f"\n{found.detail} {out / 'plan.json'} is the plan.")


def check(
    run_folder: RunFolder,
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A good run, or the file that --update-baseline wrote.")
    ] = None,
    rules: Annotated[Path | None, typer.Option(metavar="FILE", help="Rules of your own, as fp8dbg.toml.")] = None,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write RUN's figures to --baseline (fp8dbg-baseline.json).")
    ] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Append Markdown, for a pull request.")] = None,
    annotations: Annotated[bool, typer.Option("--annotations", help="Print GitHub annotations as well.")] = False,
    as_json: Json = False,
) -> None:
    """Gates for continuous integration; exit code 1 when one fails.

    Without options: tables are complete and finite, no finding, figures near what their formats can do. A rules file
    holds [[gate]] tables with rule = "underflow.grad_output < 1 %" and maybe layer, from_step, to_step, over, because.
    """
    from fp8dbg.checking import Outputs, checked

    found = checked(run_folder, baseline, rules, update=update_baseline, outputs=Outputs(junit, markdown, annotations))
    if as_json:
        typer.echo(output.json_text(found.to_dict()))
    else:
        from fp8dbg.render import gates

        gates.report(found, output.console())
    if not found.passed:
        raise typer.Exit(1 if found.recorded else NothingRecordedError.exit_code)
