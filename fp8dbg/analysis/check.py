"""Gates on a run, for continuous integration: defaults that need no configuration, rules of one's own, a baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fp8dbg.analysis.baseline import Baseline, new_findings, not_worse
from fp8dbg.analysis.default_gates import default_gate
from fp8dbg.analysis.evidence import Row, natural
from fp8dbg.analysis.gate import Gate, Judged, nearest
from fp8dbg.analysis.rules import AGAINST_BASELINE, DEFAULTS, NEW_FINDING_RULE, Rule, Rules
from fp8dbg.analysis.run import Run
from fp8dbg.analysis.wording import listed
from fp8dbg.errors import UsageError
from fp8dbg.numerics.formats import FORMATS, gemm_noise
from fp8dbg.runs.schema import GEMMS

FLOOR_FACTOR = 2.0
"""``floor`` allows this many times the error that the format has on Gaussian data: trained tensors are not Gaussian."""


@dataclass(frozen=True)
class Checked:
    """A run against its gates.

    Attributes:
        run: its path.
        gates: in the order of their rules, defaults first.
        recorded: whether there was anything to judge.
        notes: what a reader should know besides: another recipe than the baseline's, files that could not be read.
    """

    run: str
    gates: list[Gate]
    recorded: bool
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Whether every gate passes."""
        return all(gate.passed for gate in self.gates)

    @property
    def failed(self) -> list[Gate]:
        """The gates that do not."""
        return [gate for gate in self.gates if not gate.passed]

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        if self.passed:
            return f"All {len(self.gates)} gates pass."
        return f"{len(self.failed)} of {len(self.gates)} gates fail."

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the stable form of ``fp8dbg check --json``."""
        gates = [gate.to_dict() | {"distance": gate.distance} for gate in self.gates]
        return {"run": self.run, "passed": self.passed, "headline": self.headline, "gates": gates, "notes": self.notes}


def check(run: Run, rules: Rules | None = None, baseline: Baseline | None = None) -> Checked:
    """Judge a run by the default gates, a rules file's own, and against a baseline.

    Args:
        run: an open run.
        rules: of a file; none by default.
        baseline: of the same model; see ``baseline.require_same_model``.

    Raises:
        UsageError: a rule needs a baseline and none was given.
    """
    rules = rules or Rules()
    wanted = dict.fromkeys([*DEFAULTS, *(AGAINST_BASELINE if baseline else ()), *rules.phrases])
    gates = [_named(rule, run, baseline) for rule in wanted if rule not in rules.skip]
    gates += [_judged(rule, run) for rule in rules.rules]
    return Checked(str(run.path), gates, bool(run.evidence.tensors), list(_notes(run, baseline)))


def _named(rule: str, run: Run, baseline: Baseline | None) -> Gate:
    if rule not in AGAINST_BASELINE:
        return default_gate(rule, run)
    if baseline is None:
        raise UsageError(f"The rule {rule!r} needs a baseline.", "Give one with --baseline.")
    return new_findings(baseline, run) if rule == NEW_FINDING_RULE else not_worse(baseline, run)


def _judged(rule: Rule, run: Run) -> Gate:
    """A rule of one's own. It fails where the figure is missing on a step, or nothing matches."""
    if not rule.of:
        return _of_run(rule, run)
    known = {row["layer"] for row in run.evidence.tensors}
    if known and not any(fnmatchcase(layer, glob) for layer in known for glob in rule.layers):
        globs, there = listed([repr(glob) for glob in rule.layers]), listed(sorted(known, key=natural))
        told = f"No layer matches {globs}; there are {there}."
        return Gate(rule.text, False, told, "missing data fails", line=rule.line)
    question = "gate_gemms" if rule.of in GEMMS else "gate_tensors"
    asked = run.evidence.ask(question, figure=rule.figure, from_step=rule.from_step, to_step=rule.to_step)
    rows = [r for r in asked if r["name"] == rule.of and any(fnmatchcase(r["layer"], g) for g in rule.layers)]
    missing = [row for row in rows if row["missing"] or not row["steps"]]
    if missing:
        row = missing[0]
        told = f"{rule.figure} of {row['layer']} {row['name']} is missing on {_missed(row)}."
        place = {"layer": row["layer"], "name": row["name"], "step": row["first_missing"], "failing": len(missing)}
        return Gate(rule.text, False, told, "missing data fails", line=rule.line, **place)
    return nearest(rule.text, [_against(rule, row, run) for row in rows], what=rule.figure, line=rule.line)


def _missed(row: Row) -> str:
    if not row["steps"]:
        return "all sampled steps"
    if row["missing"] == 1:
        return f"step {row['first_missing']}"
    return f"{row['missing']} sampled steps, step {row['first_missing']} first"


def _against(rule: Rule, row: Row, run: Run) -> Judged:
    limit, basis = _limit(rule, row, run) if rule.floor else (rule.limit, rule.because or "the rules file")
    if rule.over == "median":
        return Judged(row, row["usual"], limit, rule.below, None, basis)
    end = "highest" if rule.below else "lowest"
    return Judged(row, row[end], limit, rule.below, row[f"{end}_step"], basis)


def _limit(rule: Rule, row: Row, run: Run) -> tuple[float, str]:
    """A multiple of the format's floor; 0 for a format without one, which no error is below."""
    error = _floor(row, run) * FLOOR_FACTOR * rule.limit
    basis = f"{FLOOR_FACTOR * rule.limit:g} times the error of healthy casts on Gaussian data"
    if rule.figure == "rel_l2":
        return error, basis
    if rule.figure == "sqnr_db":
        return (-math.inf if error == 0 else -20 * math.log10(error)), basis
    return 1 - min(error, 1.0) ** 2 / 2, basis


def _floor(row: Row, run: Run) -> float:
    if "format" in row:
        fmt = FORMATS.get(row["format"] or "")
        return fmt.noise.rel_l2 if fmt and fmt.noise else 0.0
    formats = {r["name"]: r["format"] for r in run.evidence.ask("gate_tensors") if r["layer"] == row["layer"]}
    a, b = (FORMATS.get(formats.get(role) or "") for role in GEMMS[row["name"]])
    noise = gemm_noise(a, b) if a and b else None
    return noise.rel_l2 if noise else 0.0


def _of_run(rule: Rule, run: Run) -> Gate:
    rows = [r for r in run.evidence.ask("losses") if rule.from_step <= r["step"] <= rule.to_step]
    known = [(r[rule.figure], r["step"]) for r in rows if r[rule.figure] is not None]
    if not known or len(known) < len(rows):
        told = f"{len(rows) - len(known)} of {len(rows)} steps have no {rule.figure}."
        return Gate(rule.text, False, told, "missing data fails", line=rule.line)
    value, step = max(known) if rule.below else min(known)
    if rule.over == "median":
        value, step = sorted(known)[len(known) // 2][0], None
    row = {"layer": "the", "name": "run"}
    judged = Judged(row, value, rule.limit, rule.below, step, rule.because or "the rules file")
    return nearest(rule.text, [judged], what=rule.figure, line=rule.line)


def _notes(run: Run, baseline: Baseline | None) -> Iterator[str]:
    yield from run.problems
    if run.state in ("killed", "stopped"):
        yield f"The run was {run.state}: steps after the last recorded one are not judged."
    recipes = list(run.evidence.run["recipes"] or [])
    if baseline and baseline.recipes != recipes:
        yield f"The baseline was recorded under {', '.join(baseline.recipes)}, this run under {', '.join(recipes)}."
