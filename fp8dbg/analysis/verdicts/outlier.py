"""A few values so large that the rest of their tensor is lost to zero.

Sign: underflow_ratio far above its usual value although the scale fits amax; peak_to_median beyond 10,000. cosine and
rel_l2 look perfect, or even improve: the outlier dominates both norms. Or, behind another layer's outlier, most of the
tensor has become zero while its largest value is out of reach of its former median: what would be flushed is masked.
Cause: channels that grow together (SwiGLU's up and down, query and key, embeddings), or a weight that was rescaled;
the per-tensor scale serves the outlier and nothing else.
Remedy: keep the GEMMs that read the tensor in BF16, or scale more finely than the outlier (row, block, MXFP8). In the
input of the first layer it may be the data's: normalise that feature.
False alarm when: what is flushed was never used, as in rows of an embedding that no token reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Row, Suspect
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.limits import Limit
from fp8dbg.analysis.scales import reach
from fp8dbg.analysis.verdicts import wrong_format
from fp8dbg.analysis.verdicts.shared import (
    BULK,
    dated,
    finding_about,
    flushed,
    harm_of,
    lasting,
    readers,
    scale_too_small,
    severity,
    under,
    when,
)
from fp8dbg.analysis.wording import factor, percent

CODE = "outlier"
EXPLAINS = frozenset({"underflow", "saturation", "stale_scale", "gain_error", "dead_tensor"})

PEAK = 1e4
"""peak_to_median of an outlier: Gaussian data have 7, trained activations 100 to 1,000."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    """Findings for tensors whose bulk a few values push below the format's reach."""
    drowned = [s for s in flushed(evidence) if has_outlier(s) and not wrong_format.too_narrow(s)]
    for suspect in dated(evidence, drowned):
        yield _finding(evidence, suspect)
    for suspect in dated(evidence, _masked(evidence)):
        yield _masked_finding(evidence, suspect)


def _drowns(suspect: Suspect) -> bool:
    """Whether it lasts and the bulk is lost: of the tensor, or of the blocks that hold the outlier."""
    peak = suspect.stretch["usual_peak_to_median"]
    return lasting(suspect) and (suspect.stretch["worst"] >= BULK or peak >= reach(suspect.facts))


def _masked(evidence: Evidence) -> list[Suspect]:
    """Tensors that an upstream fault emptied, and whose own outlier would drown what it took."""
    limits = []
    for row in evidence.operands:
        usual = row["usual_zero_ratio"]
        if usual is None or row["worst_zero_ratio"] < usual + BULK or not _out_of_reach(row):
            continue
        limits.append((row, Limit(usual + BULK, f"its healthy window: {percent(usual)} zeros")))
    return evidence.suspects("zero_ratio", limits)


def _out_of_reach(row: Row) -> bool:
    """Whether the format cannot hold the run's largest value and the healthy window's median at once."""
    if not (row["usual_amax"] and row["usual_peak_to_median"]):
        return False
    return bool(row["worst_amax"] * row["usual_peak_to_median"] / row["usual_amax"] > reach(row))


def has_outlier(suspect: Suspect) -> bool:
    """Whether the tensor's own largest values, not its scale, flush the rest."""
    peak = suspect.stretch["usual_peak_to_median"]
    return peak is not None and peak >= PEAK and not scale_too_small(suspect)


def _finding(evidence: Evidence, suspect: Suspect) -> Finding:
    row, stretch = suspect.facts, suspect.stretch
    ratio = stretch["worst"]
    gemms = readers(row["tensor"])
    verb = "would be" if row["what_if"] else "is"
    return finding_about(
        suspect,
        code=CODE,
        title="Outlier drowns its tensor",
        severity=severity(evidence, row, "act" if _drowns(suspect) else "watch"),
        summary=f"{percent(ratio)} of {row['tensor']} {verb} flushed to zero{under(row)} {when(evidence, suspect)}: "
        f"its largest value is {factor(stretch['usual_peak_to_median'])} the median.",
        remedy=f"Keep {' and '.join(gemms)} of {row['layer']} in BF16, or scale it by row or block"
        f"{_feature(evidence, row)}.",
        action="bf16",
        gemms=gemms,
        harm=harm_of(evidence, suspect, ratio),
    )


def _feature(evidence: Evidence, row: Row) -> str:
    """What else to look at where no layer comes before."""
    first = row["tensor"] == "input" and evidence.layer_order.get(row["layer"]) == 0
    return "; where the data feed it, look at them too and normalise the feature that is so large" if first else ""


def _masked_finding(evidence: Evidence, suspect: Suspect) -> Finding:
    row = suspect.facts
    gemms = readers(row["tensor"])
    ratio = suspect.stretch["worst"]
    grown = row["worst_amax"] / row["usual_amax"]
    return finding_about(
        suspect,
        code=CODE,
        title="Outlier drowns its tensor",
        severity=severity(evidence, row, "act" if lasting(suspect) else "watch"),
        summary=f"{percent(ratio)} of {row['tensor']} has become zero {when(evidence, suspect)}, upstream of its own "
        f"cast; with those values back, its largest, which grew {factor(grown)}, would flush them.",
        remedy=f"Keep {' and '.join(gemms)} of {row['layer']} in BF16 together with the layer that feeds it.",
        action="bf16",
        gemms=gemms,
        harm=harm_of(evidence, suspect, 0.9 * ratio),
    )
