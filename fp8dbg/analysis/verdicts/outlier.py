"""A few values so large that the rest of their tensor is lost to zero.

Sign: underflow_ratio far above its usual value although the scale fits amax; peak_to_median beyond 10,000. cosine and
rel_l2 look perfect, or even improve: the outlier dominates both norms.
Cause: channels that grow together (SwiGLU's up and down, query and key, embeddings), or a weight that was rescaled;
the per-tensor scale serves the outlier and nothing else.
Remedy: keep the GEMMs that read the tensor in BF16, or scale more finely than the outlier (row, block, MXFP8).
False alarm when: what is flushed was never used, as in rows of an embedding that no token reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Suspect
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.verdicts import wrong_format
from fp8dbg.analysis.verdicts.shared import (
    BULK,
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
EXPLAINS = frozenset({"underflow", "saturation", "stale_scale", "gain_error"})

PEAK = 1e4
"""peak_to_median of an outlier: Gaussian data have 7, trained activations 100 to 1,000."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    """Findings for tensors whose bulk a few values push below the format's reach."""
    for suspect in flushed(evidence):
        if has_outlier(suspect) and not wrong_format.too_narrow(suspect):
            yield _finding(evidence, suspect)


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
        severity=severity(evidence, row, "act" if ratio >= BULK and lasting(suspect) else "watch"),
        summary=f"{percent(ratio)} of {row['tensor']} {verb} flushed to zero{under(row)} {when(evidence, suspect)}: "
        f"its largest value is {factor(stretch['usual_peak_to_median'])} the median.",
        remedy=f"Keep {' and '.join(gemms)} of {row['layer']} in BF16, or scale it by row or block.",
        action="bf16",
        gemms=gemms,
        harm=harm_of(evidence, suspect, ratio),
    )
