"""``fp8dbg bisect``: short reruns of a program with different fallback plans; each a run folder, all resumable.

The out folder holds ``bisect.json`` (what was asked and every finished trial), ``trials/NNNN`` (run folders),
``trials/NNNN.log`` (what the program printed), ``trials/NNNN.json`` (its plan) and at the end ``plan.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fp8dbg.analysis.bisect import SPACES, Criterion, Found, Unit, plan_of, search
from fp8dbg.errors import NothingRecordedError, RunFolderError, UnknownNameError, UsageError
from fp8dbg.recording.launch import Options, launch
from fp8dbg.runs.files import write_whole
from fp8dbg.runs.folder import open_folder
from fp8dbg.runs.queries import ask
from fp8dbg.runs.schema import GEMMS

STATE = "bisect.json"
VERSION = 1

_FIRST_STEP = 1 << 40
"""A cadence of which step 0 alone is measured in full: it says which layers compute in FP8."""

Tell = Callable[[int, str], None]
"""Told how many trials are done, and the last one in a few words."""


@dataclass(frozen=True)
class Asked:
    """What is asked; a folder that was begun with other answers is not continued.

    Args:
        command: the program; deterministic reruns from one checkpoint, and short.
        space: one of ``analysis.bisect.SPACES``.
        last: steps at the end of a trial whose mean loss counts.
        repeats: trials with everything in BF16, and with nothing, that the noise is taken from. The program finds the
            number of a repeat in the variable FP8DBG_REPEAT, to draw other batches by.

    Raises:
        UsageError: something does not fit.
    """

    command: tuple[str, ...]
    space: str = "gemms"
    last: int = 20
    repeats: int = 2

    def __post_init__(self) -> None:
        if self.space not in SPACES:
            raise UnknownNameError("plan space", self.space, list(SPACES))
        if self.last < 1 or self.repeats < 1:
            raise UsageError(
                "A loss is a mean over at least one step and one repeat.", "Give --last and --repeats from 1."
            )


@dataclass(frozen=True)
class Trial:
    """One finished rerun.

    Attributes:
        folder: its run folder, below ``trials/``.
        in_bf16: the plan: GEMMs by layer.
        repeat: which repeat.
        loss: mean of the last losses; None where one was not finite or none was recorded.
        code: the program's exit code.
        unplanned: what was not done as planned, in a sentence; then it is no trial of this plan, and has no loss.
    """

    folder: str
    in_bf16: dict[str, list[str]]
    repeat: int
    loss: float | None
    code: int
    unplanned: str = ""


@dataclass
class Bisection:
    """The trials of one out folder.

    Args:
        out: the folder; made, or continued.
        asked: what is asked.
        tell: see ``Tell``.

    Raises:
        UsageError: the folder was begun with another question.
        RunFolderError: it cannot be written, or holds something else.
    """

    out: Path
    asked: Asked
    tell: Tell = lambda done, words: None
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        state = self._read()
        if state is None:
            return
        asked = json.loads(json.dumps(asdict(self.asked)))
        if state.get("asked") != asked:
            raise UsageError(
                f"{self.out} was begun with another question: {json.dumps(state.get('asked')):.300}.",
                "Ask the same, or give another folder: fp8dbg bisect --out DIR.",
            )
        self.trials = [Trial(**trial) for trial in state["trials"]]

    def run(self) -> Found:
        """Try until the smallest set is known; write ``plan.json``.

        Raises:
            NothingRecordedError: no layer computes in FP8, or no loss was recorded.
            UsageError: the program cannot be started, or not put in BF16 as a whole.
        """
        self.tell(len(self.trials), "")
        fp8 = [self._loss([], repeat) for repeat in range(self.asked.repeats)]
        units = self._units()
        bf16 = [self._loss(units, repeat) for repeat in range(self.asked.repeats)]
        if wrong := next((t.unplanned for t in self.trials if t.in_bf16 == _by_layer(units) and t.unplanned), ""):
            raise UsageError(f"Not everything can be put in BF16: {wrong}", "Without that trial nothing can be judged.")
        found = search(units, self.asked.space, Criterion.from_repeats(bf16, fp8), lambda some: self._loss(some, 0))
        write_whole(self.out / "plan.json", lambda file: file.write(found.plan.to_json().encode()))
        return found

    def _units(self) -> list[Unit]:
        """Every GEMM of the first trial that is not in BF16 already, layers in the order of run.json."""
        with open_folder(self.out / "trials" / self.trials[0].folder) as opened:
            layers = [entry for entry in opened.meta.get("layers") or [] if isinstance(entry, Mapping)]
            in_fp8 = {row["layer"] for row in ask(opened, "coverage") if row["in_force"]}
        known = [entry for entry in layers if entry.get("recipe") or entry.get("layer") in in_fp8]
        units = [(str(e["layer"]), g) for e in known for g in GEMMS if not e.get("recipe") or g not in e["bf16_gemms"]]
        if not units:
            raise NothingRecordedError(
                f"No layer of {self.asked.command[0]} computes in FP8, so there is nothing to keep in BF16.",
                "Give a program that trains in FP8, or wrap its model in fp8dbg.simulate.",
            )
        return units

    def _loss(self, units: Sequence[Unit], repeat: int) -> float:
        """The loss of a trial, which is run unless it has been."""
        wanted = _by_layer(units)
        done = next((t for t in self.trials if t.in_bf16 == wanted and t.repeat == repeat), None)
        if done is None:
            done = self._try(units, wanted, repeat)
            self.trials.append(done)
            self._write()
        self.tell(len(self.trials), _words(done))
        return math.inf if done.loss is None else done.loss

    def _try(self, units: Sequence[Unit], wanted: dict[str, list[str]], repeat: int) -> Trial:
        path = self._free()
        plan, log = path.with_suffix(".json"), path.with_suffix(".log")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            plan.write_text(plan_of(units).to_json(), encoding="utf-8")
        except OSError as error:
            raise RunFolderError(
                f"{path.parent} cannot be written: {error.strerror}.", "Give another --out."
            ) from error
        options = Options(path, every=_FIRST_STEP, fallback=plan if units else None)
        outcome = launch(self.asked.command, options, log, {"FP8DBG_REPEAT": str(repeat)})
        if not outcome.folders:
            raise NothingRecordedError(outcome.detail, f"What the program printed is in {log}.")
        unplanned = " ".join([*(f"No model has {layer}." for layer in outcome.missing[:1]), *outcome.unplanned[:1]])
        loss = None if unplanned else _last_loss(path, self.asked.last)
        return Trial(path.name, wanted, repeat, loss, outcome.code, unplanned)

    def _free(self) -> Path:
        """A name that no trial has had: one that was killed stays beside its repetition."""
        number = len(self.trials)
        while (path := self.out / "trials" / f"{number:04d}").exists():
            number += 1
        return path

    def _read(self) -> dict[str, Any] | None:
        try:
            state = json.loads((self.out / STATE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            if self.out.exists() and (not self.out.is_dir() or (any(self.out.iterdir()) and not self._begun())):
                raise UsageError(f"{self.out} holds something else.", "Give a new folder: --out DIR.") from None
            return None
        except (OSError, ValueError) as error:
            raise RunFolderError(
                f"{self.out / STATE} cannot be read ({error}).", "Give a new folder: --out DIR."
            ) from None
        if not isinstance(state, dict) or state.get("version") != VERSION:
            raise RunFolderError(f"{self.out / STATE} is of another version.", "Give a new folder: --out DIR.")
        return state

    def _begun(self) -> bool:
        """Whether a bisection was killed here before its first trial was over."""
        return {path.name for path in self.out.iterdir()} == {"trials"}

    def _write(self) -> None:
        state = {"version": VERSION, "asked": asdict(self.asked), "trials": [asdict(trial) for trial in self.trials]}
        write_whole(self.out / STATE, lambda file: file.write(json.dumps(state, indent=1).encode()))


def _by_layer(units: Sequence[Unit]) -> dict[str, list[str]]:
    return {entry.layer: list(entry.gemms) for entry in plan_of(units).entries}


def _last_loss(path: Path, last: int) -> float | None:
    """Mean of a run's last losses; None where one of them is missing or not finite."""
    with open_folder(path) as folder:
        losses = [row["loss"] for row in ask(folder, "losses")][-last:]
    return None if not losses or None in losses else sum(losses) / len(losses)


def _words(trial: Trial) -> str:
    gemms = sum(map(len, trial.in_bf16.values()))
    loss = trial.unplanned or ("no loss" if trial.loss is None else f"loss {trial.loss:.5g}")
    return f"{gemms} GEMMs in BF16: {loss}"


def table(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The trials as rows of a table."""
    return [
        {
            "trial": trial.folder,
            "layers": len(trial.in_bf16),
            "gemms": sum(map(len, trial.in_bf16.values())),
            "in_bf16": _sets(trial.in_bf16),
            "loss": trial.loss,
            "code": trial.code,
            "unplanned": trial.unplanned,
        }
        for trial in trials
    ]


def _sets(in_bf16: Mapping[str, Sequence[str]]) -> str:
    names = [name if len(gemms) == len(GEMMS) else f"{name}:{'+'.join(gemms)}" for name, gemms in in_bf16.items()]
    return " ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "nothing"
