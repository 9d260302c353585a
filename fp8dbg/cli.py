"""The command line: one short function per verb. Heavy libraries are imported inside the verbs, so --help is quick."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8dbg import __version__, output
from fp8dbg.errors import Fp8dbgError, NothingRecordedError, UsageError, optional_library

if TYPE_CHECKING:
    from fp8dbg.analysis.run import Run
    from fp8dbg.analysis.summary import Summary
    from fp8dbg.runs.folder import Folder

app = typer.Typer(
    help="Tells a team training in FP8 where the numbers break, why, and what to keep in BF16.",
    epilog="Exit codes: 0 fine, 1 a gate failed, 2 wrong usage or unreadable input, 3 nothing recorded.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder that fp8dbg.attach wrote.")]
Limits = Annotated[
    list[str] | None, typer.Option(metavar="LIMIT", help="Measure what goes past it, as 'underflow_ratio > 0.5'.")
]
TriggerDump = Annotated[
    list[str] | None, typer.Option(metavar="LAYER:TENSOR", help="Save them whole around a loss spike, NaN or LIMIT.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]


def main() -> None:
    """Run the command line: every error meant for a user is printed here, once, and becomes an exit code."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `fp8dbg query ... | head` ends quietly
    output.accept_any_text()
    try:
        app(prog_name="fp8dbg")
    except Exception as error:
        if os.environ.get("FP8DBG_DEBUG") == "1":
            raise
        # a Ctrl-C that reached DuckDB comes back as a RuntimeError
        if isinstance(error, RuntimeError) and str(error) == "Query interrupted":
            sys.exit(128 + signal.SIGINT)
        output.say(f"fp8dbg: {error if isinstance(error, Fp8dbgError) else _unforeseen(error)}")
        # Python's own exit code for an exception is 1, which here means that a gate failed
        sys.exit(getattr(error, "exit_code", Fp8dbgError.exit_code))


def _unforeseen(error: Exception) -> str:
    what = error.strerror or "" if isinstance(error, OSError) else ""
    name = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    said = f"{name}{what}" if what else f"{type(error).__name__}: {error}"
    return f"This could not be done ({' '.join(said.split()):.500}). FP8DBG_DEBUG=1 shows where."


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fp8dbg {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Run folder to write; new or empty.")] = Path("demo_run"),
    steps: Annotated[int, typer.Option(min=100, help="Training steps.")] = 500,
    as_json: Json = False,
) -> None:
    """Train a small model with a planted fault, and report it.

    A transformer of 0.9 million parameters learns the source of Python's standard library in simulated FP8.
    """
    _require_new(out)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads: on a busy machine five times faster
    from fp8dbg.demo.story import tell
    from fp8dbg.demo.training import Settings

    output.say(f"Training for {steps} steps, recorded in {out}; some hundred steps a minute on two cores.")
    with output.progress(steps, "training the demo") as advance:
        held_out = tell(out, Settings(steps=steps), advance)
    with _open(out) as run:
        summary = _print_report(run, as_json=as_json)
        if not as_json:
            typer.echo("\nLoss on held-out text with the weights of the fault's first step, by what is kept in BF16:")
            output.print_table(["in_bf16", "loss"], held_out)
        _write_page(run, summary, out / "report.html")


@app.command()
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
    with _open(run_folder) as run:
        summary = _print_report(run, as_json=as_json)
        if not no_html:
            # the page of a run that is read from afar goes to the current folder
            _write_page(run, summary, html or (run_folder if run_folder.is_dir() else Path()) / "report.html")
        if png:
            _write_pictures(run, summary, png)
    if any(finding.code == "nothing_recorded" for finding in summary.findings):
        raise typer.Exit(NothingRecordedError.exit_code)


def _print_report(run: Run, *, as_json: bool) -> Summary:
    from fp8dbg.analysis.summary import summarise
    from fp8dbg.render import terminal
    from fp8dbg.render.trends import trends

    summary = summarise(run)
    if as_json:
        typer.echo(output.json_text(summary.to_dict()))
    else:
        terminal.report(summary, output.console(), trends(run, summary.findings))
    return summary


def _write_pictures(run: Run, summary: Summary, folder: Path) -> None:
    optional_library("kaleido", "png")
    from fp8dbg.render.pictures import charts, write_pictures

    for path in write_pictures(charts(run, summary), folder):
        output.say(f"A figure is {path}")


def _write_page(run: Run, summary: Summary, path: Path) -> None:
    """Write the page and say where it is. A run folder that cannot be written spoils nothing else: it is only said."""
    from fp8dbg.render.html import write_report

    try:
        output.say(f"The page is {write_report(run, summary, path)}")
    except UsageError as error:
        if path != run.path / "report.html":
            raise
        output.say(f"fp8dbg: {error}")


@app.command()
def recommend(
    run_folder: RunFolder,
    host: Annotated[str | None, typer.Option("--for", metavar="HOST", help="Write this host's configuration.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the files go; RUN by default.")] = None,
    as_json: Json = False,
) -> None:
    """What to keep in BF16, as the host's own configuration.

    The smallest plan that takes away the harm, the whole curve beside it, and what to do where BF16 is not the answer.
    """
    from fp8dbg.recommending import require_host, write_plan
    from fp8dbg.render.advice import advise

    if host is not None:
        require_host(host)
    with _open(run_folder) as run:
        found = run.recommendation()
        _say_problems(run)
    if as_json:
        typer.echo(output.json_text(found.to_dict()))
    else:
        advise(found, output.console())
    for path in write_plan(found.plan, host, out or run_folder):
        output.say(f"Written: {path}")


@app.command()
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
        _say_problems(run)
        if as_json:
            output.print_json_rows(rows)
        elif as_csv:
            output.print_csv(columns, rows)
        else:
            output.print_table(columns, rows)


@app.command()
def tensors(
    run_folder: RunFolder,
    layer: Annotated[str, typer.Option(metavar="GLOB", help="Only layers whose name matches.")] = "*",
    as_json: Json = False,
) -> None:
    """Which tensors were recorded, when, and which were saved whole."""
    from fp8dbg.listing import recorded_and_saved

    with _open(run_folder) as run:
        recorded, saved = recorded_and_saved(run, layer)
        _say_problems(run)
    if as_json:
        typer.echo(output.json_text({"recorded": recorded, "saved": saved}))
        return
    if recorded:
        output.print_table(
            ["layer", "tensor", "recipe", "first_step", "last_step", "sampled_steps", "amax_rows"], recorded
        )
    if saved:
        output.print_table(list(saved[0]), saved)


@app.command()
def whatif(
    run_folder: RunFolder,
    recipe: Annotated[str, typer.Option(help="The recipe asked about, as 'delayed:history=16,margin=1'.")],
    layer: Annotated[str, typer.Option(metavar="GLOB", help="Only layers whose name matches.")] = "*",
    number_format: Annotated[str | None, typer.Option("--format", help="This format for every operand.")] = None,
    as_json: Json = False,
) -> None:
    """What another recipe would have done, from recorded data alone.

    Exact where every code was counted (attach(histogram='codes')), between bounds where binades were.
    """
    from fp8dbg.analysis.whatif import whatif as answer
    from fp8dbg.render.whatif import COLUMNS, table

    with _open(run_folder) as run:
        found = answer(run, recipe, layer, number_format)
        _say_problems(run)
    typer.echo(output.json_text(found.to_dict())) if as_json else output.print_table(COLUMNS, table(found))
    for note in () if as_json else found.notes:
        output.say(note)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD ...", help="What to run: python, torchrun, a script.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Run folder to write; one that exists is continued.")] = Path(
        "run_dir"
    ),
    every: Annotated[int, typer.Option(help="Measure everything on every n-th step; 0: never.")] = 100,
    recipe: Annotated[str, typer.Option(help="What BF16 layers are compared with.")] = "delayed",
    layers: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Layers to record; may be repeated.")] = None,
    fallback: Annotated[Path | None, typer.Option(metavar="PLAN", help="Plan (JSON) to apply to the model.")] = None,
    first_step: Annotated[int, typer.Option(metavar="N", help="Number of the first step, for a resumed training.")] = 0,
    limit: Limits = None,
    trigger_dump: TriggerDump = None,
    as_json: Annotated[bool, typer.Option("--json", help="After CMD's own output print how it ended as JSON.")] = False,
) -> None:
    """Run a program, unmodified, and record what it trains.

    Every Python process below CMD that trains a PyTorch model records it. The exit code is CMD's own.
    """
    from fp8dbg.recording.launch import Options, launch

    if fallback is not None:
        _require_plan(fallback)
    if (out / "run.json").exists():
        output.say(f"{out} holds a run already: this one continues it. --out gives another folder.")
    triggers = tuple(limit or ()), tuple(trigger_dump or ())
    options = Options(out, every, recipe, tuple(layers or ["*"]), fallback, first_step, *triggers)
    outcome = launch(command, options)
    for folder in outcome.folders:
        output.say(f"Recorded in {folder}: fp8dbg report {folder}")
    if outcome.detail:
        output.say(f"fp8dbg: {outcome.detail}")
    if as_json:
        typer.echo(output.json_text(asdict(outcome)))
    raise typer.Exit(outcome.code)


@app.command(context_settings={"allow_interspersed_args": False})
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
        output.print_table(["trial", "layers", "gemms", "in_bf16", "loss", "code"], table(trials.trials))
        typer.echo(f"\n{found.detail} {out / 'plan.json'} is the plan.")


@app.command()
def control(
    run_folder: RunFolder,
    every: Annotated[int | None, typer.Option(help="Measure everything on every n-th step; 0: never.")] = None,
    layers: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Layers to measure in full.")] = None,
    dump: Annotated[list[str] | None, typer.Option(metavar="LAYER:TENSOR", help="Save them whole, once, now.")] = None,
    limit: Limits = None,
    trigger_dump: TriggerDump = None,
    stop: Annotated[bool | None, typer.Option("--stop/--go", help="Record nothing; record again.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Forget what control said before.")] = False,
    as_json: Json = False,
) -> None:
    """Change what a live run measures; without options, show what is in force.

    A run looks at its control.toml between steps, at most once a second. GLOB and LAYER:TENSOR may be repeated.
    """
    from fp8dbg.recording.control import Control

    asked = {"every": every, "layers": layers, "dump": dump, "stop": stop}
    asked |= {"limits": limit, "trigger_dump": trigger_dump}
    changes = {name: value for name, value in asked.items() if value is not None}
    live = Control(run_folder)
    if reset:
        live.reset()
    if changes:
        live.change(changes)
    settings = live.in_force()
    if as_json:
        typer.echo(output.json_text({"finished": live.finished, "settings": settings}))
    else:
        output.print_table(["setting", "value", "set_by"], settings)
    if live.finished and (changes or reset):
        output.say(f"{run_folder} is finished: the next session that records into it will read this.")


@app.command()
def watch(
    run_folder: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print what it would show now, once, as JSON.")] = False,
) -> None:
    """A live run in the terminal: loss, findings, worst tensors.

    Keys make it measure more or less often, or save the tensor under the cursor. Works over ssh; takes 3 % of a core.
    """
    if as_json:
        from fp8dbg.render.live import snapshot

        typer.echo(output.json_text(snapshot(run_folder)))
        return
    optional_library("textual", "watch")
    from fp8dbg.watching import watch

    watch(run_folder)


@app.command()
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


@app.command()
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

    with _open(run_folder) as run:
        done = export(run, to, out)
        _say_problems(run)
    rows = f"{done.rows:,} {'rows' if to in ('csv', 'parquet') else 'values'} written to {done.path}. {done.next}"
    typer.echo(output.json_text(asdict(done)) if as_json else rows)


@app.command(context_settings={"allow_interspersed_args": False})
def doctor(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD ...", help="What will be run: its options are looked at.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Linear layers of the model.")] = 224,
    every: Annotated[int, typer.Option(min=0, help="Every how many steps everything is measured; 0: never.")] = 100,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the training run.")] = 10_000,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches per step.")] = 1,
    ranks: Annotated[int, typer.Option(min=1, help="Processes that record.")] = 1,
    as_json: Json = False,
) -> None:
    """What is installed, which recipe will run, what goes wrong in silence, folder growth.

    CMD is not run: of Megatron's options, those that do nothing or are refused are named.
    """
    from fp8dbg import doctor

    found = doctor.examine(doctor.PlannedRun(layers, every, steps, microbatches, ranks), command or ())
    typer.echo(output.json_text(found.to_dict()) if as_json else found.text())


@app.command()
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


@app.command()
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


def _say_problems(run: Folder) -> None:
    """What could not be read, on stderr: an answer from the rest must not look like one from all."""
    for problem in run.problems[:5]:
        output.say(f"fp8dbg: {problem}")
    if len(run.problems) > 5:
        output.say(f"fp8dbg: {len(run.problems) - 5} more files are not as they should be: fp8dbg report {run.path}")


def _open(path: Path) -> Run:
    from fp8dbg.analysis.run import open_run

    return open_run(path)


def _require_plan(path: Path) -> None:
    from fp8dbg.runs.plan import Plan

    try:
        Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}).", "Give the plan.json of a report.") from None


def _require_new(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder.", "Remove it or give another: fp8dbg demo OUT.")
