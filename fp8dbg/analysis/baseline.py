"""A baseline: what a good run measured, small enough to be committed, and what is worse than it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fp8dbg import __version__
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.gate import Gate, Judged, nearest
from fp8dbg.analysis.rules import NEW_FINDING_RULE, NOT_WORSE_RULE
from fp8dbg.analysis.run import Run, open_run
from fp8dbg.analysis.wording import listed
from fp8dbg.errors import UsageError
from fp8dbg.runs.files import write_whole
from fp8dbg.runs.remote import as_url
from fp8dbg.runs.schema import GEMMS, SCHEMA_VERSION

VERSION = 1
DEFAULT_FILE = Path("fp8dbg-baseline.json")

SIGMAS = 8.0
ALLOWED = {"underflow": 0.02, "saturated": 0.01, "rel_l2": 0.0, "gain": 0.2}
"""What two seeds of one recipe do to a median; rel_l2 may double instead."""

LOSS_SIGMAS, LOSS_SHARE = 4.0, 0.03
"""The end of the loss may be higher by so many standard errors, and by this share of what was learned."""

Medians = dict[str, dict[str, dict[str, tuple[float, float]]]]


@dataclass(frozen=True)
class Baseline:
    """What a run measured.

    Attributes:
        layers: names of the layers with figures.
        recipes: recipes in force.
        findings: code, layer, tensor and GEMM of each finding to act on or to watch.
        figures: by layer, by tensor or GEMM, by figure: median and median absolute deviation over the run.
        loss: its mean over the last fifth, the standard error of that, and how far it fell; None without a loss.
    """

    layers: list[str]
    recipes: list[str]
    findings: list[tuple[str | None, ...]]
    figures: Medians
    loss: tuple[float, float, float] | None = field(default=None)

    def to_json(self) -> str:
        """The file's text: a line for each tensor, so that a changed baseline reads well in a diff."""
        head = {
            "fp8dbg_baseline": VERSION,
            "schema_version": SCHEMA_VERSION,
            "fp8dbg": __version__,
            "recipes": self.recipes,
            "findings": self.findings,
            "loss": self.loss and [_short(x) for x in self.loss],
        }
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        layers = ",\n".join(
            f"  {json.dumps(layer)}: {{\n"
            + ",\n".join(f"   {json.dumps(n)}: {json.dumps(f)}" for n, f in of.items())
            + "}"
            for layer, of in self.figures.items()
        )
        return "{\n" + ",\n".join(lines) + ',\n "layers": {\n' + layers + "}\n}\n"


def baseline_of(run: Run) -> Baseline:
    """The baseline that a run is."""
    figures: Medians = {}
    asked = [("gate_tensors", figure) for figure in ALLOWED] + [("gate_gemms", "rel_l2")]
    for question, figure in asked:
        for row in run.evidence.ask(question, figure=figure):
            if row["usual"] is not None:
                of = figures.setdefault(row["layer"], {}).setdefault(row["name"], {})
                of[figure] = (_short(row["usual"]), _short(row["spread"] or 0.0))
    return Baseline(
        layers=sorted(figures),
        recipes=list(run.evidence.run["recipes"] or []),
        findings=sorted({_key(f) for f in run.findings() if f.severity in ("act", "watch")}, key=str),
        figures=figures,
        loss=_loss(run),
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _key(finding: Finding) -> tuple[str | None, ...]:
    return finding.code, finding.layer, finding.tensor, finding.gemm


def _loss(run: Run) -> tuple[float, float, float] | None:
    known = np.array([row["loss"] for row in run.evidence.ask("losses") if row["loss"] is not None], np.float64)
    if len(known) < 10:
        return None
    tail = known[-max(5, len(known) // 5) :]
    noise = 1.4826 / math.sqrt(2) * float(np.median(np.abs(np.diff(known) - np.median(np.diff(known)))))
    return float(tail.mean()), noise / math.sqrt(len(tail)), max(0.0, float(np.median(known[:3]) - tail.mean()))


def write_baseline(baseline: Baseline, path: Path) -> None:
    """Write the file, whole or not at all.

    Raises:
        UsageError: it cannot be written there.
    """
    try:
        write_whole(path, lambda file: file.write(baseline.to_json().encode()))
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror}.", "Give another file with --baseline.") from error


def read_baseline(path: Path) -> Baseline:
    """A baseline from its file, or from a run folder.

    Raises:
        UsageError: there is no such file, or it is no baseline, or of another version or schema.
        RunFolderError: the folder is none.
    """
    if not path.exists() and as_url(path) is None:
        raise UsageError(
            f"There is no baseline {path}.",
            f"Write it from a good run: fp8dbg check GOOD_RUN --update-baseline --baseline {path}. "
            "The folder of a good run serves, too.",
        )
    if path.is_dir() or as_url(path) is not None:
        with open_run(path) as run:
            return baseline_of(run)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no baseline ({error}).", "Make one: fp8dbg check RUN --update-baseline.") from None
    if not isinstance(data, dict) or "fp8dbg_baseline" not in data:
        raise UsageError(f"{path} is no baseline of fp8dbg.", "Make one: fp8dbg check RUN --update-baseline.")
    for key, mine in (("fp8dbg_baseline", VERSION), ("schema_version", SCHEMA_VERSION)):
        if data.get(key) != mine:
            raise UsageError(
                f"The baseline {path} has {key} {data.get(key)!r:.40}; this fp8dbg has {mine}.",
                "Make it anew from a good run: fp8dbg check RUN --update-baseline.",
            )
    try:
        return _parsed(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"The baseline {path} is damaged ({error!r:.100}).", "Make it anew.") from None


def _parsed(data: Mapping[str, Any]) -> Baseline:
    figures: Medians = {
        layer: {n: {f: (float(v[0]), float(v[1])) for f, v in of.items()} for n, of in names.items()}
        for layer, names in data["layers"].items()
    }
    loss = data["loss"] and (float(data["loss"][0]), float(data["loss"][1]), float(data["loss"][2]))
    known = [tuple(found) for found in data["findings"]]
    return Baseline(sorted(figures), list(data["recipes"]), known, figures, loss)


def require_same_model(baseline: Baseline, run: Run, name: str) -> None:
    """Refuse a baseline of another model.

    Raises:
        UsageError: the layers are not the same; the message says which are missing.
    """
    mine, theirs = {row["layer"] for row in run.evidence.tensors}, set(baseline.layers)
    if mine == theirs or not mine:
        return
    parts = [
        f"{who} {listed(sorted(names))}"
        for who, names in (("only it has", theirs - mine), ("it lacks", mine - theirs))
        if names
    ]
    raise UsageError(
        f"The baseline {name} is of another model: {'; '.join(parts)}.",
        "Make it anew from a good run of this model: fp8dbg check RUN --update-baseline.",
    )


def new_findings(baseline: Baseline, run: Run) -> Gate:
    """The gate that no finding is new: same code, layer, tensor and GEMM are not."""
    pressing = [f for f in run.findings() if f.severity in ("act", "watch")]
    new = [f for f in pressing if _key(f) not in baseline.findings]
    said = f"{len(pressing)} findings, all known to the baseline." if pressing else "No finding."
    worst = new[0] if new else None
    return Gate(
        NEW_FINDING_RULE,
        not new,
        f"{worst.code.replace('_', ' ')}, {worst.where}: {worst.summary}" if worst else said,
        "the baseline's own findings are accepted",
        layer=worst.layer if worst else None,
        name=(worst.tensor or worst.gemm) if worst else None,
        step=worst.first_step if worst else None,
        failing=len(new),
    )


def not_worse(baseline: Baseline, run: Run) -> Gate:
    """The gate that no figure's median, and not the end of the loss, is above the baseline's by more than noise."""
    mine = baseline_of(run)
    gone = [
        f"{figure} of {layer} {name}"
        for layer, names in baseline.figures.items()
        for name, of in names.items()
        for figure in of
        if figure not in mine.figures.get(layer, {}).get(name, {})
    ] + (["the loss"] if baseline.loss and not mine.loss else [])
    if gone:
        return Gate(NOT_WORSE_RULE, False, f"The baseline has {listed(gone)}, this run has not.", "missing data fails")
    judged = [
        _against(layer, name, f, then, mine)
        for layer, of in baseline.figures.items()
        for name, fs in of.items()
        for f, then in fs.items()
    ]
    if baseline.loss and mine.loss:
        (then, error, fell), (now, mine_error, _) = baseline.loss, mine.loss
        limit = then + max(LOSS_SIGMAS * math.hypot(error, mine_error), LOSS_SHARE * fell)
        basis = f"the baseline ends at {then:.4g}; four standard errors, and 3 % of what it learned, are noise"
        judged.append(Judged({"layer": "the run's", "name": "loss"}, now, limit, True, None, basis))
    return nearest(NOT_WORSE_RULE, judged, what="median or end")


def _against(layer: str, name: str, figure: str, then: tuple[float, float], mine: Baseline) -> Judged:
    now, spread = mine.figures[layer][name][figure]
    allowed = then[0] if figure == "rel_l2" else ALLOWED[figure]
    limit = then[0] + max(SIGMAS * 1.4826 * max(then[1], spread), allowed)
    kind = "GEMM" if name in GEMMS else "tensor"
    basis = (
        f"{figure} of this {kind} in the baseline: median {then[0]:.3g}; eight deviations and what seeds do are noise"
    )
    return Judged({"layer": layer, "name": f"{name} ({figure})"}, now, limit, True, None, basis)
