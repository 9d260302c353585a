"""The benchmark compares like with like."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.census import all_figures, chain


def test_chain_and_census_compute_the_same_figures() -> None:
    """Every figure of the chain of torch operations equals the census's, to the accuracy of float32."""
    x = torch.randn(300, 301, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, :7] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-4, 9.0])
    *figures, binades = chain(x, torch.tensor(60.0))
    _, zeros, nan, inf, amax, amin, mean, rms, kurtosis, peak, (exponent, counts), cast = all_figures(x, 60.0)
    wanted = [zeros, nan, inf, cast.underflow, cast.saturated, cast.at_max, cast.subnormal, amax, amin, mean, rms]
    wanted += [kurtosis, cast.mse, cast.rel_l2, cast.sqnr_db, cast.cosine, cast.norm_ratio, cast.bias, peak]
    assert [f.item() for f in figures] == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    assert binades.nonzero()[0].item() - 150 == exponent
    assert binades[binades.nonzero()[0] :].tolist() == counts
