"""What each GEMM behind a fault costs the loss, as predicted from the record, and which faults hide one another."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from fp8dbg.analysis.evidence import Evidence, Row
from fp8dbg.analysis.finding import Finding
from fp8dbg.runs.schema import GEMMS

BEYOND = 3.0
"""Times its usual figure that a GEMM's harm or error must reach to be the fault's and not the format's."""

HEALTHY_FPROP = 0.0375
"""rel_l2 of a healthy fprop of two E4M3 operands (Gaussian data)."""

HIDDEN = 0.3
"""Share of a product that must be lost before a small harm is not believed: what reaches the loss of it is then
decided by another fault (a broken GEMM made the impact of the next one 20 times smaller in experiments)."""

DOUBT = 2.0
"""Standard errors by which the pace of learning is in doubt. A lost dgrad is given the benefit of them, as it misleads
all layers before its own (in small models it cost up to 0.005 of loss beside a repaired fprop). A lost wgrad is not,
where fprop suffers too: only its own layer learns less, and the others make up for it (less than 0.001)."""

LEADING = 0.2
"""Share of the weights' gradient (numel times rms) from which a layer leads the learning: the others do not make up
for it. In a small language model the head has 0.28, and its lost wgrad costs 0.004; the next, 0.17, costs nothing."""

EARLY_STEPS = 8
"""Steps with a loss that the run's progress is told from, at least."""


@dataclass(frozen=True)
class GemmHarm:
    """One GEMM that reads a faulty tensor.

    Attributes:
        layer, gemm: which.
        operands: the faulty tensors that it reads.
        harm: what ranks it, in units of the loss (HarmModel); None where nothing was measured.
        lost: share of its product that is error, at most 1; None where nothing was measured.
        hidden: whether another fault hides its harm, so that the figure is that one's.
        flops: its share of the FLOPs of all GEMMs recorded.
        leads: whether it is lost and is the weight gradient of a layer that does so much of the learning that no other
            makes up for it.
    """

    layer: str
    gemm: str
    operands: tuple[str, ...]
    harm: float | None
    lost: float | None
    hidden: bool
    flops: float
    leads: bool = False


@dataclass(frozen=True)
class Fault:
    """GEMMs that only work again together: those of one finding, and of what it hides.

    Attributes:
        findings: what is wrong, first in execution order first.
        gemms: fprop GEMMs first, then by harm.
    """

    findings: tuple[Finding, ...]
    gemms: tuple[GemmHarm, ...]

    @property
    def harm(self) -> float:
        """What all of it adds to the loss; a chain of hidden GEMMs counts once."""
        forward = max((g.harm or 0.0 for g in self.gemms if g.gemm == "fprop"), default=0.0)
        return forward + sum(g.harm or 0.0 for g in self.gemms if g.gemm != "fprop")

    @property
    def measured(self) -> bool:
        """Whether the harm is known well enough to leave any of its GEMMs out.

        Forward errors must show where a faulty tensor is read forward: if they do not, the figures contradict each
        other, and nothing is left out on their word. Nor where only gradients suffer and the loss hardly fell before.
        """
        forward = [g for g in self.gemms if g.gemm == "fprop"]
        return all(g.harm is not None for g in self.gemms) and any(g.harm for g in forward or self.gemms)


class HarmModel:
    """Predicts harm, in units of the loss, from what a run recorded.

    Forward: the larger of ``impact`` (first order) and tokens / 2 times ``sensitivity`` (the Fisher form, for a loss
    that is a mean over tokens), less the same before the fault; at most the largest loss of the run, as no prediction
    of that kind holds further. Backward: every dgrad and wgrad carries an equal part of what the run learns, and loses
    the share 1 - ``grad_alignment`` of it, or of its operand's values, for as many steps as the fault lasted. How much
    is learned can be told to within ``DOUBT`` alone.

    Args:
        evidence: of the run.
        findings: those to act on by keeping GEMMs in BF16.
    """

    def __init__(self, evidence: Evidence, findings: Sequence[Finding]) -> None:
        self._evidence = evidence
        self._by_layer: dict[str, list[Finding]] = {}
        for finding in findings:
            self._by_layer.setdefault(finding.layer or "", []).append(finding)

    def faults(self) -> list[Fault]:
        """The faults, worst first."""
        order = self._evidence.layer_order
        layers = sorted(self._by_layer, key=lambda name: (order.get(name, 0), name))
        groups: list[tuple[list[Finding], list[GemmHarm]]] = []
        for layer in layers:
            gemms = self._gemms(layer)
            host = self._hiding(layer, gemms, groups)
            if host is None:
                groups.append((list(self._by_layer[layer]), gemms))
            else:
                worst = max(g.harm or 0.0 for g in host[1])
                host[0].extend(self._by_layer[layer])
                host[1].extend(_hidden(g, worst) if g.gemm == "fprop" else g for g in gemms)
        made = [Fault(tuple(found), _ranked(gemms)) for found, gemms in groups]
        return sorted(made, key=lambda fault: -fault.harm)

    def _hiding(
        self, layer: str, gemms: list[GemmHarm], groups: list[tuple[list[Finding], list[GemmHarm]]]
    ) -> tuple[list[Finding], list[GemmHarm]] | None:
        """The nearest fault before this layer that is worse and began no later, if this one's harm is not its own."""
        forward = next((g for g in gemms if g.gemm == "fprop"), None)
        if forward is None or forward.harm is None or not self._is_lost(layer, forward):
            return None
        since = min(f.first_step or 0 for f in self._by_layer[layer])
        for group in reversed(groups):
            began = min(f.first_step or 0 for f in group[0])
            worst = max((g.harm or 0.0 for g in group[1] if g.gemm == "fprop"), default=0.0)
            if began <= since and worst > forward.harm:
                return group
        return None

    def _is_lost(self, layer: str, forward: GemmHarm) -> bool:
        emptied = any(row.get("figure") == "zero_ratio" for f in self._by_layer[layer] for row in f.evidence)
        return emptied or (forward.lost or 0.0) > HIDDEN

    def _gemms(self, layer: str) -> list[GemmHarm]:
        found = self._by_layer[layer]
        read = {gemm for f in found for gemm in f.gemms}
        return [self._gemm(layer, gemm, found) for gemm in GEMMS if gemm in read]

    def _gemm(self, layer: str, gemm: str, found: Sequence[Finding]) -> GemmHarm:
        operands = tuple(f.tensor for f in found if f.tensor and gemm in f.gemms)
        row = self._rows.get((layer, gemm))
        harm, lost, leads = None, None, False
        if row is not None and gemm == "fprop":
            harm, lost = self._forward(row), min(1.0, row["rel_l2"]) if row["rel_l2"] is not None else None
        elif row is not None:
            lost = self._backward_lost(row, [f for f in found if gemm in f.gemms])
            leads = gemm == "wgrad" and lost > HIDDEN and self._shares.get(layer, 0.0) >= LEADING
            small = gemm == "wgrad" and not leads and any("fprop" in f.gemms for f in found)
            harm = lost * self._learning(found, -DOUBT if small else DOUBT) / max(1, self._backward_gemms)
        return GemmHarm(layer, gemm, operands, harm, lost, False, self._flops.get((layer, gemm), 0.0), leads)

    @cached_property
    def _shares(self) -> dict[str, float]:
        first = min((f.first_step or 0 for found in self._by_layer.values() for f in found), default=0)
        rows = self._evidence.ask("learning_shares", before=first)
        return {row["layer"]: row["share"] for row in rows if row["share"] is not None}

    def _forward(self, row: Row) -> float | None:
        now, usual = _loss_change(row, ""), _loss_change(row, "usual_") or 0.0
        if now is None:
            return None
        shows = now > BEYOND * usual or (row["rel_l2"] or 0.0) > BEYOND * HEALTHY_FPROP
        return min(max(0.0, now - usual), self._worst_loss) if shows else 0.0

    def _backward_lost(self, row: Row, found: Sequence[Finding]) -> float:
        """Share lost of a gradient: what an outlier dominates looks aligned, so the share of flushed values counts."""
        aligned = 1.0 if row["grad_alignment"] is None else row["grad_alignment"]
        flushed = (
            r["worst"] for f in found for r in f.evidence if r.get("figure") in ("underflow_ratio", "zero_ratio")
        )
        return float(min(1.0, max([abs(1.0 - aligned), *flushed])))

    @cached_property
    def _rows(self) -> dict[tuple[str, str], Row]:
        faults = [
            {
                "layer": layer,
                "first_step": min(f.first_step or 0 for f in found),
                "last_step": max(f.last_step if f.last_step is not None else self._evidence.end or 0 for f in found),
            }
            for layer, found in self._by_layer.items()
        ]
        rows = self._evidence.ask("gemm_harm", faults=json.dumps(faults)) if faults else []
        return {(row["layer"], row["gemm"]): row for row in rows if row["steps"]}

    @cached_property
    def _flops(self) -> Mapping[tuple[str, str], float]:
        work = {
            (g["layer"], g["gemm"]): 2.0 * (g["m"] or 0) * (g["n"] or 0) * (g["k"] or 0) for g in self._evidence.gemms
        }
        total = sum(work.values()) or 1.0
        return {key: value / total for key, value in work.items()}

    @cached_property
    def _backward_gemms(self) -> int:
        return sum(g["gemm"] != "fprop" for g in self._evidence.gemms)

    @cached_property
    def _losses(self) -> list[tuple[int, float]]:
        return [(row["step"], row["loss"]) for row in self._evidence.ask("losses") if row["loss"] is not None]

    @cached_property
    def _worst_loss(self) -> float:
        return max((abs(loss) for _, loss in self._losses), default=float("inf"))

    def _learning(self, found: Sequence[Finding], doubt: float) -> float:
        """How far the loss would have fallen while the fault lasted, at the pace of the steps right before it."""
        first = min(f.first_step or 0 for f in found)
        start = self._evidence.healthy_window[0]
        before = [(step, loss) for step, loss in self._losses if start <= step < first] or self._losses
        if len(before) < EARLY_STEPS:
            return 0.0
        pace = _fell([loss for _, loss in before], doubt) / max(1, (before[-1][0] - before[0][0]) / 3)
        last = max(f.last_step if f.last_step is not None else self._evidence.end or 0 for f in found)
        return float(min(pace * (last - first + 1), self._worst_loss))


def _fell(losses: Sequence[float], doubt: float) -> float:
    """How far losses fell from their second third to their last, and ``doubt`` standard errors of that.

    The first third is the steep start, which tells nothing of the pace since. The error is that of the difference of
    two medians: 1.25 deviations over the root of the number each, the deviation from the median absolute one (1.48 of
    it in Gaussian data), so that a spike counts for little.
    """
    third = len(losses) // 3
    parts = losses[-2 * third : -third], losses[-third:]
    middles = [median(part) for part in parts]
    scatter = [1.48 * median(abs(loss - middle) for loss in part) for part, middle in zip(parts, middles, strict=True)]
    error = 1.25 * math.hypot(*scatter) / math.sqrt(third)
    return max(0.0, middles[0] - middles[1] + doubt * error)


def _loss_change(row: Row, prefix: str) -> float | None:
    impact, sensitivity = row[f"{prefix}impact"], row[f"{prefix}sensitivity"]
    if impact is None and sensitivity is None:
        return None
    return float(max(impact or 0.0, 0.5 * (row["m"] or 0) * (sensitivity or 0.0)))


def _hidden(gemm: GemmHarm, worst: float) -> GemmHarm:
    share = 1.0 if gemm.lost is None else gemm.lost
    harm = max(gemm.harm or 0.0, worst * share)
    return GemmHarm(gemm.layer, gemm.gemm, gemm.operands, harm, gemm.lost, True, gemm.flops)


def _ranked(gemms: Sequence[GemmHarm]) -> tuple[GemmHarm, ...]:
    """fprop first: what a broken forward pass costs is not to be had back by better gradients."""
    return tuple(sorted(gemms, key=lambda g: (g.gemm != "fprop", -(g.harm or 0.0), g.flops)))
