"""What a verdict says about a run: one finding, and how findings are ordered and folded into their causes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

SEVERITIES = ("act", "watch", "info")
"""act: the run is being harmed and there is something to do; watch: it may be; info: worth knowing, no fault of FP8."""

ACTIONS = ("bf16", "recipe", "scale", "software", "record", "none")
"""What the remedy is: keep GEMMs in BF16, another recipe or format, repair the scale state, fix the program or the
host's configuration, record more, nothing."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, where, since when, how it is known and what to do first.

    Attributes:
        code: the verdict's name, e.g. "underflow".
        title: the verdict in three or four words.
        severity: one of ``SEVERITIES``.
        layer, tensor, gemm: what it is about; None where it is about the run.
        first_step, last_step: when; sampled steps, so the truth may lie up to one sampling interval earlier.
        summary: one sentence with the figures.
        basis: why the limit is where it is.
        remedy: the first thing to do.
        action: what kind of thing that is, one of ``ACTIONS``.
        gemms: for "bf16": the GEMMs to keep in it.
        what_if: the recipe that the finding is about, where it is not in force; the sentences then say "would".
        evidence: the rows that it rests on.
        harm: orders findings of one severity; 1 is "one whole tensor is lost", more is worse. A share, not a loss.
        gemm_harm: the same in units of the loss, by which findings that call for BF16 are ordered among themselves
            where it is known: the largest that ``recommend`` predicts of a GEMM that reads the tensor; else None.
        folded: codes of findings about the same thing that this one explains.
    """

    code: str
    title: str
    severity: str
    layer: str | None
    tensor: str | None
    gemm: str | None
    first_step: int | None
    last_step: int | None
    summary: str
    basis: str
    remedy: str
    action: str
    harm: float
    gemms: tuple[str, ...] = ()
    what_if: str | None = None
    evidence: list[dict[str, Any]] = field(default_factory=list)
    folded: tuple[str, ...] = ()
    gemm_harm: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @property
    def where(self) -> str:
        """ "layer, tensor" or as much of it as there is."""
        return ", ".join(part for part in (self.layer, self.tensor, self.gemm) if part) or "the run"


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """By severity, then harm, then onset; names decide what is left, so that the order is always the same."""
    return sorted(
        findings,
        key=lambda f: (SEVERITIES.index(f.severity), -f.harm, f.first_step or 0, f.layer or "", f.tensor or "", f.code),
    )


def fold(findings: Iterable[Finding], explains: Mapping[str, frozenset[str]]) -> list[Finding]:
    """Drop each finding that another one about the same tensor explains; the other keeps its evidence.

    Args:
        findings: of one run.
        explains: for a code, the codes of what it causes on its own tensor while it lasts.
    """
    kept = list(findings)
    for finding in list(kept):
        cause = next((other for other in kept if _explains(other, finding, explains)), None)
        if cause is None:
            continue
        kept.remove(finding)
        kept[kept.index(cause)] = replace(
            cause,
            severity=min(cause.severity, finding.severity, key=SEVERITIES.index),
            evidence=cause.evidence + finding.evidence,
            folded=tuple(dict.fromkeys((*cause.folded, finding.code))),
        )
    return kept


def _explains(cause: Finding, effect: Finding, explains: Mapping[str, frozenset[str]]) -> bool:
    if cause is effect or effect.code not in explains.get(cause.code, ()):
        return False
    same = (cause.layer, cause.tensor, cause.what_if) == (effect.layer, effect.tensor, effect.what_if)
    return same and _overlap(cause, effect)


def _overlap(one: Finding, other: Finding) -> bool:
    """Whether they share a step; an open end reaches to the end of the run."""
    starts = max(one.first_step or 0, other.first_step or 0)
    ends = [f.last_step for f in (one, other) if f.last_step is not None]
    return not ends or starts <= min(ends)
