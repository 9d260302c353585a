"""The gates that need no configuration: a healthy run of every recipe passes them, and nothing that is missing does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean, median

from fp8dbg.analysis.evidence import Evidence, Row
from fp8dbg.analysis.gate import Gate, Judged, nearest
from fp8dbg.analysis.limits import Rule, noise_floor
from fp8dbg.analysis.rules import (
    ERROR_RULE,
    FIGURES_RULE,
    FINDING_RULE,
    FINITE_RULE,
    FP8_RULE,
    GAIN_RULE,
    LEAP_RULE,
    LOSS_END_RULE,
    LOSS_RULE,
    SATURATED_RULE,
    SPIKE_RULE,
    TABLES_RULE,
    UNDERFLOW_RULE,
    UNEXPLAINED_RULE,
)
from fp8dbg.analysis.run import Run
from fp8dbg.analysis.scales import reach
from fp8dbg.analysis.spikes import LONE_SCORE, RISE, SCORE, find_spikes
from fp8dbg.analysis.verdicts import shared
from fp8dbg.numerics.formats import FORMATS
from fp8dbg.runs.schema import OPERANDS

ERROR_FACTOR_EVEN = 8.0
"""For INT8, whose steps are even: its error grows with amax over rms, which trained tensors have several times more of
than Gaussian ones."""

LOST, LOST_SIGMAS = 0.25, 6.0
"""Share of what was learned, and standard errors, by which the loss may end above its best tenth."""

LEAP = 1000.0
"""Times by which gradients may be larger, or smaller, at once and from then on: the smallest of five steps over the
largest of five just before. It is below 2 in 25 healthy trainings under five recipes and below 10 in the demo's; a
learning rate that jumps twentyfold makes it 11, activations sixteen times louder 43. Beyond a thousand a loss scale was
lost, or a state restored to another one."""

CLIPPED_FINE = 0.05
"""Share of values that scales finer than a tensor may clip: OCP MX's floor clips 2 % of Gaussian data by design."""


def tables(evidence: Evidence) -> Gate:
    """Every table that is always written has rows."""
    facts = evidence.ask("gate_run")[0]
    names = {"steps": "step_rows", "amax": "amax_rows", "tensors": "tensor_rows", "gemms": "gemm_rows"}
    empty = [name for name, column in names.items() if not facts[column]]
    said = f"Nothing in {', '.join(empty)}: what is not recorded cannot pass." if empty else "All four have rows."
    return Gate(TABLES_RULE, not empty, said, "missing data fails", failing=len(empty))


def fp8(evidence: Evidence) -> Gate:
    """At least one layer computes in FP8: a run that fell back to BF16 everywhere says nothing about FP8."""
    layers = evidence.ask("gate_run")[0]["fp8_layers"]
    said = f"{layers} layers do." if layers else "None does: every figure is of BF16 layers, or of what FP8 would do."
    return Gate(FP8_RULE, bool(layers), said, "a run without FP8 is no evidence about FP8")


def figures(evidence: Evidence) -> Gate:
    """No operand lacks the figures of its cast."""
    facts = evidence.ask("gate_run")[0]
    lacking, layer, name = (facts[f"without_figures{end}"] for end in ("", "_layer", "_tensor"))
    said = f"{lacking} tensors lack some, first {layer} {name} on step {facts['first_without_figures']}."
    return Gate(
        FIGURES_RULE,
        not lacking,
        said if lacking else "None lacks any.",
        "a figure that could not be measured is NULL, and missing data fails",
        layer=layer,
        name=name,
        step=facts["first_without_figures"],
        failing=lacking,
    )


def finite(evidence: Evidence) -> Gate:
    """No tensor holds a NaN or an infinite element on any step."""
    facts = evidence.ask("gate_run")[0]
    layer, name, step = facts["non_finite_layer"], facts["non_finite_tensor"], facts["first_non_finite"]
    said = f"{facts['non_finite']} tensors hold some, first {layer} {name} on step {step}."
    return Gate(
        FINITE_RULE,
        not facts["non_finite"],
        said if facts["non_finite"] else "Every recorded element is finite.",
        "a single NaN ends a run",
        layer=layer,
        name=name,
        step=step,
        failing=facts["non_finite"],
    )


def loss(evidence: Evidence) -> Gate:
    """Every step has a loss, and it is finite."""
    facts = evidence.ask("gate_run")[0]
    without, steps = facts["steps_without_loss"], evidence.run["steps"]
    said = (
        f"{without} of {steps} steps have none (not logged, or not finite), the first is {facts['first_without_loss']}."
        if without
        else f"All {steps} steps have one."
    )
    return Gate(
        LOSS_RULE,
        bool(steps) and not without,
        said,
        "a loss that is NaN is recorded as none, so a missing one fails",
        step=facts["first_without_loss"],
        failing=without,
    )


def loss_end(evidence: Evidence) -> Gate:
    """The loss ends near the best it has been: what was learned is not lost again."""
    known = [float(row["loss"]) for row in evidence.ask("losses") if row["loss"] is not None]
    basis = "the last tenth against the best tenth; a quarter of what was learned, and noise, are allowed"
    width = len(known) // 10
    if width < 2:
        return Gate(LOSS_END_RULE, True, f"{len(known)} steps have a loss: too few to say.", basis)
    means = [fmean(known[i * width : (i + 1) * width]) for i in range(10)]
    end, best, change = fmean(known[-width:]), min(means), [abs(b - a) for a, b in pairwise(known)]
    noise = LOST_SIGMAS * 1.05 * median(change) / sqrt(width)
    limit = best + max(LOST * max(0.0, median(known[:3]) - best), noise)
    row = {"layer": "the", "name": "run"}
    return nearest(LOSS_END_RULE, [Judged(row, end, limit, True, None, basis)], what="the last tenth's loss")


def spikes(evidence: Evidence) -> Gate:
    """The loss never spikes: FP8 may have no part in it, but the run is not what it was meant to be."""
    found = find_spikes(evidence)
    lone = f"{LONE_SCORE:g} where none came near"
    basis = f"{SCORE:g} robust deviations above the steps before ({lone}), and {100 * RISE:.0f} %"
    if not found:
        return Gate(SPIKE_RULE, True, "None.", basis)
    worst = max(found, key=lambda spike: spike.score if spike.score is not None else inf)
    loss = "not finite" if worst.loss is None else f"{worst.loss:.3g}"
    told = f"{len(found)}, the worst on step {worst.step}, where the loss was {loss}."
    return Gate(SPIKE_RULE, False, told, basis, step=worst.step, failing=len(found))


def leaps(evidence: Evidence) -> Gate:
    """Gradients do not become a thousand times larger or smaller at once: scales follow, and little else shows it."""
    basis = (
        "at most 10 times in healthy trainings, 11 where the learning rate jumps twentyfold; a lost loss scale, more"
    )
    judged = [Judged(row, row["leap"], LEAP, True, row["step"], basis) for row in evidence.ask("gate_leaps")]
    if not judged and evidence.run["steps"]:
        return Gate(LEAP_RULE, True, "Too few steps with gradients in FP8 to say.", basis)
    return nearest(LEAP_RULE, judged, what="leap of amax")


def findings(run: Run) -> Gate:
    """No verdict asks to act or to watch."""
    pressing = [f for f in run.findings() if f.severity in ("act", "watch")]
    if not pressing:
        return Gate(FINDING_RULE, True, "None to act on or to watch.", "each verdict states its own limit")
    worst = pressing[0]
    more = f" And {len(pressing) - 1} more." if len(pressing) > 1 else ""
    return Gate(
        FINDING_RULE,
        False,
        f"{worst.code.replace('_', ' ')}, {worst.where}: {worst.summary}{more}",
        worst.basis,
        layer=worst.layer,
        name=worst.tensor or worst.gemm,
        step=worst.first_step,
        failing=len(pressing),
    )


def underflow(evidence: Evidence) -> Gate:
    """What a tensor usually loses to zero is within its format's reach."""
    judged = _medians(evidence, "underflow", lambda row: (_flushed(row).cap, _flushed(row).why))
    return nearest(UNDERFLOW_RULE, judged, what="median underflow")


def _flushed(row: Row) -> Rule:
    if reach(row) < shared.COARSE:
        return shared.FLUSHED_COARSE
    if row["name"] != "grad_output":
        return shared.FLUSHED
    return shared.FLUSHED_NARROW if row["format"] in shared.NARROW else shared.FLUSHED_WIDE


def saturated(evidence: Evidence) -> Gate:
    """What a tensor usually clips does no harm."""
    judged = _medians(
        evidence,
        "saturated",
        lambda row: (shared.CLIPPED.cap if row["granularity"] == "tensor" else CLIPPED_FINE, shared.CLIPPED.why),
    )
    return nearest(SATURATED_RULE, judged, what="median saturation")


def error(evidence: Evidence) -> Gate:
    """A tensor's usual relative error is near its format's floor."""

    def limit(row: Row) -> tuple[float, str]:
        factor = shared.ERROR_FACTOR if row["granularity"] == "tensor" else shared.ERROR_FACTOR_FINE
        factor = ERROR_FACTOR_EVEN if row["format"] == "int8" else factor
        floor = noise_floor(row) or 0.0
        return factor * floor, f"{factor:g} times what {row['format']} does to Gaussian data ({floor:.3g})"

    return nearest(ERROR_RULE, _medians(evidence, "rel_l2", limit), what="median rel_l2")


def gain(evidence: Evidence) -> Gate:
    """A cast leaves a tensor's norm about where it was."""
    judged = _medians(evidence, "gain", lambda row: (shared.GAIN.cap, f"log2: {shared.GAIN.why}"))
    return nearest(GAIN_RULE, judged, what="median gain")


def unexplained(evidence: Evidence) -> Gate:
    """A GEMM's real output is what its quantised operands give."""
    rows = [row for row in evidence.ask("gate_gemms", figure="error_unexplained") if row["steps"]]
    if not rows and evidence.gemms:
        return Gate(UNEXPLAINED_RULE, True, "No host gave its real output to compare.", shared.UNEXPLAINED.why)
    judged = [Judged(r, r["usual"], shared.UNEXPLAINED.cap, True, None, shared.UNEXPLAINED.why) for r in rows]
    return nearest(UNEXPLAINED_RULE, judged, what="median error_unexplained")


def _medians(evidence: Evidence, figure: str, limit: Callable[[Row], tuple[float, str]]) -> Iterator[Judged]:
    """The medians of a figure over the run, of operands in a format whose floor is known.

    Where some layer computes in FP8, what FP8 would do to those that do not is no harm: a fallback plan is such.
    """
    for row in evidence.ask("gate_tensors", figure=figure):
        known = row["format"] in FORMATS and FORMATS[row["format"]].noise is not None
        judged = row["what_if"] is None or not evidence.in_force
        if row["name"] in OPERANDS and row["recipe"] and known and judged and row["usual"] is not None:
            value, basis = limit(row)
            yield Judged(row, row["usual"], value, True, None, basis)


EVIDENCE_GATES = {
    TABLES_RULE: tables,
    FP8_RULE: fp8,
    FIGURES_RULE: figures,
    FINITE_RULE: finite,
    LOSS_RULE: loss,
    LOSS_END_RULE: loss_end,
    SPIKE_RULE: spikes,
    LEAP_RULE: leaps,
    UNDERFLOW_RULE: underflow,
    SATURATED_RULE: saturated,
    ERROR_RULE: error,
    GAIN_RULE: gain,
    UNEXPLAINED_RULE: unexplained,
}
"""Each default gate that judges the facts; ``FINDING_RULE`` judges the run's findings."""


def default_gate(rule: str, run: Run) -> Gate:
    """A default gate, judged on a run."""
    return findings(run) if rule == FINDING_RULE else EVIDENCE_GATES[rule](run.evidence)
