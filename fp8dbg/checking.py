"""``fp8dbg check``: read rules and baseline, judge the run, write what machines read."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fp8dbg import output
from fp8dbg.errors import UsageError

if TYPE_CHECKING:
    from fp8dbg.analysis.baseline import Baseline
    from fp8dbg.analysis.check import Checked
    from fp8dbg.analysis.run import Run


@dataclass(frozen=True)
class Outputs:
    """What is written besides: JUnit XML and Markdown to files, GitHub's annotations to stderr."""

    junit: Path | None = None
    markdown: Path | None = None
    annotations: bool = False


def checked(
    run_folder: Path, baseline: Path | None, rules: Path | None, *, update: bool = False, outputs: Outputs | None = None
) -> Checked:
    """Judge a run as a command line asks.

    Args:
        run_folder: the run.
        baseline: a run folder or a baseline's file; None: neither is compared with.
        rules: a rules file; None: the defaults alone.
        update: write the run's figures to ``baseline`` and judge without it.
        outputs: what is written besides.

    Raises:
        Fp8dbgError: something cannot be read or written, is of another schema or model, or names what does not exist.
    """
    from fp8dbg.analysis.check import check
    from fp8dbg.analysis.rules import Rules, read_rules
    from fp8dbg.analysis.run import open_run

    read = read_rules(rules) if rules else Rules()
    with open_run(run_folder) as run:
        against = None if update else _baseline(baseline, run)
        found = check(run, read, against)
        if update:
            _update(run, baseline, found)
    _write(found, outputs or Outputs(), read.path)
    return found


def _baseline(path: Path | None, run: Run) -> Baseline | None:
    if path is None:
        return None
    from fp8dbg.analysis.baseline import read_baseline, require_same_model

    found = read_baseline(path)
    require_same_model(found, run, str(path))
    return found


def _update(run: Run, path: Path | None, found: Checked) -> None:
    from fp8dbg.analysis.baseline import DEFAULT_FILE, baseline_of, write_baseline

    target = path or DEFAULT_FILE
    if target.is_dir():
        raise UsageError(f"{target} is a run folder.", "Give --baseline the file to write, or leave it out.")
    write_baseline(baseline_of(run), target)
    if found.passed:
        output.say(f"The baseline is {target}: commit it.")
    else:
        output.say(f"fp8dbg: WARNING: the run that {target} was written from fails {len(found.failed)} of its gates.")
        output.say("Later runs may be as bad as it and no worse: its findings are accepted. Take a good run instead.")


def _write(found: Checked, outputs: Outputs, rules_file: str) -> None:
    from fp8dbg.render import gates

    if outputs.junit:
        _to(outputs.junit, gates.junit(found), "w")
    if outputs.markdown:
        _to(outputs.markdown, gates.markdown(found), "a")  # a job's summary is one file for all its steps
    if outputs.annotations:
        sys.stderr.write(gates.workflow_commands(found, rules_file))


def _to(path: Path, text: str, mode: str) -> None:
    try:
        with path.open(mode, encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror}.", "Give another file.") from error
