"""The facts that verdicts judge, on rows whose answers are known."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8dbg.analysis.run import open_run
from fp8dbg.runs.folder import Folder, RunWriter, open_folder
from fp8dbg.runs.queries import ask
from tests.synthetic import write_run


def folder_of(path: Path, **tables: Iterable[dict[str, Any]]) -> Folder:
    with RunWriter(path / "run") as writer:
        for table, rows in tables.items():
            writer.append(table, rows)
    return open_folder(path / "run")


def tensor(step: int = 0, **figures: Any) -> dict[str, Any]:
    row = {"step": step, "microbatch": 0, "call": 0, "rank": 0, "layer": "a", "tensor": "input", "recipe": "delayed"}
    counts = {"format": "e4m3", "numel": 100, "zeros": 0, "nan": 0, "inf": 0, "underflow": 0, "saturated": 0}
    return row | counts | figures


def amax(step: int, value: float | None, scale: float, **more: Any) -> dict[str, Any]:
    row = {"step": step, "microbatch": 0, "rank": 0, "layer": "a", "tensor": "input", "amax": value, "scale": scale}
    return row | {"nan": 0, "inf": 0} | more


def test_a_step_is_the_whole_of_its_microbatches_and_ranks(tmp_path: Path) -> None:
    """Four microbatches with amax 12, 3, 1.5, 0.75: amax 12, counts over sizes, rms and rel_l2 of all values."""
    sizes, rms, error = [100, 300, 100, 500], [1.0, 2.0, 4.0, 8.0], [0.1, 0.2, 0.3, 0.4]
    rows = [
        tensor(microbatch=i % 2, rank=i // 2, amax=a, numel=n, underflow=i * 10, rms=r, mse=(e * r) ** 2, rel_l2=e)
        for i, (a, n, r, e) in enumerate(zip([12, 3, 1.5, 0.75], sizes, rms, error, strict=True))
    ]
    (got,) = ask(folder_of(tmp_path, tensors=rows), "tensor_series")
    squares = [n * r**2 for n, r in zip(sizes, rms, strict=True)]
    lost = [s * e**2 for s, e in zip(squares, error, strict=True)]
    assert got["amax"] == 12
    assert got["underflow_ratio"] == pytest.approx(60 / 1000)
    assert got["rms"] == pytest.approx((sum(squares) / 1000) ** 0.5)
    assert got["rel_l2"] == pytest.approx((sum(lost) / sum(squares)) ** 0.5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_merging_one_row_changes_nothing(ranks: int, tmp_path: Path) -> None:
    """The short way for runs with one row per step gives what merging gives: identical ranks merge into themselves."""
    rows = [tensor(s, amax=2.0, rms=1.0, mse=1e-4, rel_l2=0.01, kurtosis=3.0, cosine=0.9) for s in range(3)]
    every = [row | {"rank": rank} for row in rows for rank in range(ranks)]
    for got in ask(folder_of(tmp_path, tensors=every), "tensor_series"):
        assert (got["amax"], got["kurtosis"], got["cosine"]) == (2.0, 3.0, 0.9)
        assert got["rel_l2"] == pytest.approx(0.01)


def test_all_zero_tensor_has_no_underflow_ratio(tmp_path: Path) -> None:
    """0 of 0 is NULL, not 0 %."""
    (got,) = ask(folder_of(tmp_path, tensors=[tensor(zeros=100)]), "tensor_series")
    assert got["underflow_ratio"] is None


def test_impact_adds_over_microbatches_and_is_averaged_over_ranks(tmp_path: Path) -> None:
    """The loss is a mean over ranks of sums over microbatches."""
    rows = [
        {
            "step": 0,
            "microbatch": m,
            "call": 0,
            "rank": r,
            "layer": "a",
            "gemm": "fprop",
            "impact": 1.0 + r,
            "rel_l2": e,
        }
        for m, r, e in [(0, 0, 0.3), (1, 0, 0.4), (0, 1, 0.3), (1, 1, 0.4)]
    ]
    (got,) = ask(folder_of(tmp_path, gemms=rows), "gemm_series")
    assert got["impact"] == pytest.approx(3.0)
    assert got["rel_l2"] == pytest.approx((0.125) ** 0.5)


def test_rows_of_a_gemm_are_those_of_one_ranks_step(tmp_path: Path) -> None:
    """Two ranks, two microbatches, the second of two calls: what a rank's sensitivity, which adds, is for each of."""
    calls = [(rank, microbatch, call) for rank in (0, 1) for microbatch, call in ((0, 0), (1, 0), (1, 1))]
    rows = [
        {"step": 5, "rank": r, "microbatch": b, "call": c, "layer": "a", "gemm": "fprop", "m": 64, "sensitivity": 1.0}
        for r, b, c in calls
    ]
    faults = json.dumps([{"layer": "a", "first_step": 0, "last_step": 9}])
    (got,) = ask(folder_of(tmp_path, gemms=rows), "gemm_harm", faults=faults)
    assert (got["m"], got["sensitivity"]) == (128, 3.0)


def test_steps_without_a_layer_are_counted_among_those_that_its_ranks_sampled(tmp_path: Path) -> None:
    """Of a pipeline of two ranks the first alone goes on to sample; layer b is left out on step 1 and from 4 on."""
    rows = [tensor(step) for step in range(7)]
    rows += [tensor(step, layer="b") for step in (0, 2, 3)]
    rows += [tensor(step, layer="c", rank=1) for step in range(4)]
    got = ask(folder_of(tmp_path, tensors=rows), "layer_steps")
    assert [tuple(row.values()) for row in got] == [
        ("a", 6, None, 7, 7, 0),
        ("b", 3, 4, 3, 4, 3),
        ("c", 3, None, 4, 4, 0),
    ]


def test_onset_lists_unbroken_stretches(tmp_path: Path) -> None:
    """Beyond the limit on steps 20, 30 and 60: two stretches with their bounds, worst values and places."""
    ratios = [0, 1, 30, 40, 2, 3, 90, 0]
    folder = folder_of(tmp_path, tensors=[tensor(10 * i, underflow=r) for i, r in enumerate(ratios)])
    limit = {"layer": "a", "tensor": "input", "what_if": None, "figure": "underflow_ratio", "limit": 0.2}
    first, second = ask(folder, "onset", limits=json.dumps([limit]))
    assert (first["first_step"], first["last_step"], first["steps"], first["before"]) == (20, 30, 2, 10)
    assert (first["worst"], first["worst_step"], first["position"], first["total_steps"]) == (0.4, 30, 3, 8)
    assert (second["first_step"], second["last_step"], second["worst"]) == (60, 60, 0.9)


def test_onset_leaves_out_the_steps_before_a_scale_was_set(tmp_path: Path) -> None:
    """Under a scale of 1 on the first step anything may underflow; that is no onset."""
    rows = [tensor(0, underflow=90, scale_source="initial"), tensor(10, underflow=0, scale_source="live")]
    limit = {"layer": "a", "tensor": "input", "what_if": None, "figure": "underflow_ratio", "limit": 0.2}
    assert ask(folder_of(tmp_path, tensors=rows), "onset", limits=json.dumps([limit])) == []


def test_usual_and_worst_values(tmp_path: Path) -> None:
    """Median and median deviation of the window, the worst of the run."""
    rows = [tensor(i, underflow=u, amax=1.0 + i) for i, u in enumerate([10, 12, 14, 50, 13])]
    (got,) = ask(folder_of(tmp_path, tensors=rows), "tensor_facts", healthy_from=0, healthy_to=2)
    assert got["usual_underflow_ratio"] == pytest.approx(0.12)
    assert got["spread_underflow_ratio"] == pytest.approx(0.02)
    assert (got["worst_underflow_ratio"], got["worst_at"], got["worst_amax"]) == (0.5, 3, 5.0)


FULL = json.dumps([{"layer": "a", "tensor": "input", "full": 448.0}])


def test_scale_that_follows_is_never_outgrown(tmp_path: Path) -> None:
    """amax doubles at each step and the scale follows a step late: outgrown each time, and each time heeded."""
    rows = [amax(s, 2.0**s, 448.0 / 2.0 ** (s - 1)) for s in range(1, 30)]
    assert ask(folder_of(tmp_path, amax=rows), "outgrown_scales", tensors=FULL) == []


def test_scale_that_comes_back_is_not_a_stuck_one(tmp_path: Path) -> None:
    """BF16 amaxes repeat, and so do the scales made of them: only the next step with the same scale tells."""
    rows = [amax(s, [1.0, 8.0][s % 2], [56.0, 448.0][s % 2]) for s in range(30)]
    assert ask(folder_of(tmp_path, amax=rows), "outgrown_scales", tensors=FULL) == []


def test_scale_that_stays_is_told_with_its_dates(tmp_path: Path) -> None:
    """Frozen from step 5 on by an Inf on step 4; amax outgrows it 16 times from step 8 to the end."""
    rows = [amax(s, 1.0 if s < 8 else 16.0, 448.0, inf=int(s == 4)) for s in range(12)]
    (got,) = ask(folder_of(tmp_path, amax=rows), "outgrown_scales", tensors=FULL)
    assert (got["first_outgrown"], got["outgrown_steps"], got["outgrown_reach"]) == (8, 3, 4.0)
    assert (got["first_step"], got["last_step"], got["first_infinite"]) == (0, 11, 4)


def test_scale_is_traced_to_the_amax_it_serves(tmp_path: Path) -> None:
    """A spike of 100 on step 3 holds the scale at 4.48 until it leaves the window."""
    rows = [amax(s, 100.0 if s == 3 else 1.0, 4.48 if 3 < s <= 7 else 448.0) for s in range(10)]
    asked = json.dumps([{"layer": "a", "tensor": "input", "step": 6, "full": 448.0}])
    (got,) = ask(folder_of(tmp_path, amax=rows), "scale_origin", tensors=asked)
    assert (got["scale"], got["justified_by"], got["amax_then"]) == (4.48, 3, 100.0)


def test_non_finite_is_dated_from_both_tables(tmp_path: Path) -> None:
    """amax sees every step, tensors what is no operand; the earlier of them dates a tensor."""
    folder = folder_of(
        tmp_path,
        tensors=[tensor(0), tensor(10, nan=5), tensor(10, tensor="grad_weight", nan=1)],
        amax=[amax(s, 1.0, 1.0, nan=int(s >= 7)) for s in range(12)],
    )
    first, second = ask(folder, "non_finite")
    assert (first["tensor"], first["step"], first["seen_before"]) == ("input", 7, 6)
    assert (second["tensor"], second["step"]) == ("grad_weight", 10)


def test_ranks_that_share_scales_are_not_apart(tmp_path: Path) -> None:
    """Rank 1 of three is off by a factor of two on step 2 only."""
    rows = [amax(s, 1.0, 896.0 if (s, r) == (2, 1) else 448.0, rank=r) for s in range(4) for r in range(3)]
    (got,) = ask(folder_of(tmp_path, amax=rows), "rank_scales")
    assert (got["steps"], got["steps_apart"], got["first_step"], got["lone_rank"]) == (4, 1, 2, 1)
    assert got["worst"] == pytest.approx(1.0)


def test_heat_is_layer_by_step(tmp_path: Path) -> None:
    """One value per layer and sampled step, for each figure on offer."""
    folder = open_folder(write_run(tmp_path / "run", steps=50))
    for figure in ("underflow_ratio", "saturated_ratio", "rel_l2", "scale_delta", "kurtosis", "amax", "norm_ratio"):
        rows = ask(folder, "heat", figure=figure)
        assert len(rows) == 5 * 20
        assert np.isfinite([row["value"] for row in rows]).all()


def test_only_the_recipe_in_force_or_compared_with_is_judged(tmp_path: Path) -> None:
    """Further what-if recipes, which nobody asked to use, make no finding however badly they would do."""
    rows = [
        tensor(s, layer=layer, recipe=r, what_if=w, underflow=u, peak_to_median=7.0, amax=1.0)
        for s in range(0, 100, 10)
        for layer, r, w, u in [
            ("fp8", "delayed", None, 0),
            ("fp8", "unscaled", "unscaled", 90),
            ("bf16", "delayed", "delayed", 0),
            ("bf16", "current", "current", 90),
        ]
    ]
    with RunWriter(tmp_path / "run", fingerprint={"recipe": {"name": "delayed", "parameters": {}}}) as writer:
        writer.append("tensors", rows)
    run = open_run(tmp_path / "run")
    assert [(r["layer"], r["what_if"]) for r in run.evidence.operands] == [("bf16", "delayed"), ("fp8", None)]
    assert run.findings() == []
