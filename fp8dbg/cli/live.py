"""Verbs around a training while it runs: demo, doctor, run, watch, control."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fp8dbg import output
from fp8dbg.cli.look import print_report, write_page
from fp8dbg.cli.shared import Json, Limits, RunFolder, TriggerDump, open_run
from fp8dbg.errors import UsageError, optional_library


def demo(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Run folder to write; new or empty.")] = Path("demo_run"),
    steps: Annotated[int, typer.Option(min=100, help="Training steps.")] = 300,
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
    with open_run(out) as run:
        summary = print_report(run, as_json=as_json)
        if not as_json:
            typer.echo("\nLoss on held-out text with the weights of the fault's first step, by what is kept in BF16:")
            output.print_table(["in_bf16", "loss"], held_out)
        write_page(run, summary, out / "report.html")


def _require_new(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder.", "Remove it or give another: fp8dbg demo OUT.")


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

    Every Python process below CMD that trains a PyTorch model records it. The exit code is CMD's own. A PLAN that names
    layers that CMD does not have ends it before its first step, with 2.
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
    raise typer.Exit(outcome.code or (UsageError.exit_code if outcome.missing else 0))


def _require_plan(path: Path) -> None:
    from fp8dbg.runs.plan import Plan

    try:
        Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}).", "Give the plan.json of a report.") from None


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
