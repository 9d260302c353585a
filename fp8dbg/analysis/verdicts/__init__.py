"""The verdicts: one file each, whose docstring is its page in the manual. Adding a verdict is adding a file here."""

from __future__ import annotations

from fp8dbg.analysis.verdicts import (
    accumulation,
    coverage,
    dead_tensor,
    early_instability,
    fp8_ignored,
    frozen_scale,
    gain_error,
    non_finite,
    not_fp8,
    nothing_recorded,
    outlier,
    rank_disagreement,
    recompute_mismatch,
    saturation,
    stale_scale,
    underflow,
    wrong_format,
)

VERDICTS = (
    nothing_recorded,
    fp8_ignored,
    non_finite,
    dead_tensor,
    frozen_scale,
    stale_scale,
    outlier,
    wrong_format,
    saturation,
    underflow,
    gain_error,
    accumulation,
    rank_disagreement,
    recompute_mismatch,
    early_instability,
    not_fp8,
    coverage,
)
"""Every verdict, causes before what they cause."""

EXPLAINS = {verdict.CODE: verdict.EXPLAINS for verdict in VERDICTS}
"""For a verdict's code, the codes of what it causes on its own tensor."""
