"""The merged views: what they hold is that of the whole step, and in pieces they are what they are in one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fp8dbg
from fp8dbg.runs.folder import RunWriter, open_folder
from fp8dbg.runs.merged import AT_ONCE, MERGED
from tests.synthetic import outlier, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks, with an outlier."""
    path = tmp_path_factory.mktemp("merged") / "run"
    return write_run(path, blocks=1, steps=70, ranks=3, plant=outlier("layers.0.up", step=30))


def settled(row: dict[str, Any]) -> list[str]:
    """A row without the last digits of its numbers, which depend on the order in which they were added."""
    return [f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()]


@pytest.mark.parametrize("name", MERGED)
@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_pieces_together_are_the_whole(folder: Path, name: str, pieces: int) -> None:
    """Each step is in one piece, however the steps are divided; rows of no step have a piece of their own."""
    with open_folder(folder) as run:
        _, _, first, last = run.sql(MERGED[name].extent_sql).fetchall()[0]
        selects = MERGED[name].pieces(False, pieces * AT_ONCE, first, last)
        assert len(selects) == pieces + 1
        apart = [row for select in selects for row in run.rows(select)]
        whole = run.rows(f"select * from {name}")
    assert len(whole) > 100
    assert sorted(map(settled, apart)) == sorted(map(settled, whole))


@pytest.mark.parametrize("name", MERGED)
def test_what_needs_no_merging_is_read_as_it_is(tmp_path: Path, name: str) -> None:
    """One rank, one microbatch, one call: the plain select has the same rows."""
    folder = write_run(tmp_path / "run", blocks=1, steps=30)
    with open_folder(folder) as run:
        plain, *extent = run.sql(MERGED[name].extent_sql).fetchall()[0]
        assert plain
        (select,) = MERGED[name].pieces(plain, *extent)
        assert "GROUP BY" not in select
        assert sorted(map(settled, run.rows(select))) == sorted(map(settled, run.rows(f"select * from {name}")))


def recorded(path: Path, inputs: list[Tensor], gradients: list[Tensor]) -> Tensor:
    """Record a step of one linear layer, a microbatch for each input, at a scale of 1; return its weight."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(inputs[0].shape[1], gradients[0].shape[1], bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with fp8dbg.attach(layer, path, optimizer, recipe="unscaled", every=1, rows=1 << 20):
        for x, gradient in zip(inputs, gradients, strict=True):
            layer(x.clone().requires_grad_()).backward(gradient)
        optimizer.step()
    return layer.weight.detach()


def merged_gemm(path: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    """gemm_steps of one dgrad of these calls."""
    keys = {"step": 0, "rank": 0, "call": 0, "layer": "a", "gemm": "dgrad", "n": 10, "k": 4}
    with RunWriter(path / "run") as writer:
        writer.append(
            "gemms", [keys | {"microbatch": i, "rows_measured": row.get("m")} | row for i, row in enumerate(rows)]
        )
    with open_folder(path / "run") as run:
        (got,) = run.rows("select * from gemm_steps")
    return got


def call(output: float, error: float, m: int = 8, **more: Any) -> dict[str, Any]:
    """A call whose output and error have these root mean squares."""
    return {"m": m, "mse": error**2, "rel_l2": error / output if output else None} | more


def e4m3(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn).double()


def e5m2(values: Tensor) -> Tensor:
    return values.to(torch.float8_e5m2).double()


def test_figures_of_a_tensor_are_those_of_its_finite_elements_together(tmp_path: Path) -> None:
    """Two microbatches of standard deviation 1 and 10, 60 of the 64 rows of the first NaN, one Inf in the second."""
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(64, 32, generator=generator) * size for size in (1, 10)]
    inputs[0][:60], inputs[1][0, 0] = math.nan, math.inf
    recorded(tmp_path, inputs, [torch.ones(64, 16)] * 2)
    with open_folder(tmp_path) as run:
        (got,) = run.rows("select mean, rms, rel_l2, saturated_ratio from tensor_steps where tensor = 'input'")
    whole = torch.cat(inputs)
    finite = whole[whole.isfinite()]
    x, error = finite.double(), e4m3(finite) - finite.double()
    right = {
        "mean": x.mean().item(),
        "rms": x.square().mean().sqrt().item(),
        "rel_l2": (error.norm() / x.norm()).item(),
        "saturated_ratio": 0.0,
    }
    assert got == pytest.approx(right, rel=1e-12)


def test_error_of_a_gemm_is_that_of_all_its_outputs_together(tmp_path: Path) -> None:
    """The second microbatch's gradient is 1e-6 times as large, and all of it is flushed: nearly nothing is lost."""
    generator = torch.Generator().manual_seed(3)
    x = [torch.randn(64, 32, generator=generator) * size for size in (1, 10)]
    g = [torch.randn(64, 16, generator=generator) * size for size in (1, 1e-6)]
    w = recorded(tmp_path, x, g)
    with open_folder(tmp_path) as run:
        got = {row["gemm"]: row for row in run.rows("select * from gemm_steps")}
    operands = {
        "fprop": [((a, e4m3), (w.t(), e4m3)) for a in x],
        "dgrad": [((a, e5m2), (w, e4m3)) for a in g],
        "wgrad": [((a.t(), e5m2), (b, e4m3)) for a, b in zip(g, x, strict=True)],
    }
    for gemm, calls in operands.items():
        exact = torch.cat([a.double() @ b.double() for (a, _), (b, _) in calls])
        errors = {
            "rel_l2": torch.cat([to_a(a) @ to_b(b) for (a, to_a), (b, to_b) in calls]) - exact,
            "error_from_a": torch.cat([to_a(a) @ b.double() for (a, to_a), (b, _) in calls]) - exact,
            "error_from_b": torch.cat([a.double() @ to_b(b) for (a, _), (b, to_b) in calls]) - exact,
        }
        right = {name: (error.norm() / exact.norm()).item() for name, error in errors.items()}
        assert {name: got[gemm][name] for name in right} == pytest.approx(right, rel=1e-5), gemm
    assert {gemm: (row["m"], row["n"], row["k"], row["rows_measured"]) for gemm, row in got.items()} == {
        "fprop": (128, 16, 32, 128),
        "dgrad": (128, 32, 16, 128),
        "wgrad": (64, 16, 64, 64),
    }


def test_a_measured_row_stands_for_all_rows_of_its_call(tmp_path: Path) -> None:
    """64 of 1000 rows and 50 of 50: the large call counts 20 times as much, and m n k is the multiplications."""
    got = merged_gemm(tmp_path, call(1.0, 0.1, 1000, rows_measured=64, k=4), call(1.0, 0.4, 50, rows_measured=50, k=25))
    assert got["rel_l2"] == pytest.approx(math.sqrt((1000 * 0.01 + 50 * 0.16) / 1050))
    assert (got["m"], got["rows_measured"], got["k"]) == (1050, 114, 5)


def test_outputs_of_zeros_have_errors_and_no_energy(tmp_path: Path) -> None:
    """The row has no rel_l2, so all its error counts against the other output."""
    got = merged_gemm(tmp_path, call(1.0, 0.3), call(0.0, 0.4), call(0.0, 0.0))
    assert got["rel_l2"] == pytest.approx(0.5)


def test_outputs_without_any_error_do_not_tell_their_energy(tmp_path: Path) -> None:
    """Beside others they are left out; alone, the error is 0; without any output but zeros there is none."""
    assert merged_gemm(tmp_path / "a", call(1.0, 0.3), call(1.0, 0.0))["rel_l2"] == pytest.approx(0.3)
    assert merged_gemm(tmp_path / "b", call(1.0, 0.0), call(2.0, 0.0))["rel_l2"] == 0
    assert merged_gemm(tmp_path / "c", call(0.0, 0.0), call(0.0, 0.0))["rel_l2"] is None


def test_what_is_relative_to_an_output_is_averaged_by_its_energy(tmp_path: Path) -> None:
    """Blame and what is unexplained, over the calls that have it."""
    rows = [
        call(1.0, 0.1, error_from_a=0.06, error_from_b=0.08, error_unexplained=0.02),
        call(3.0, 0.9, error_from_a=0.3, error_from_b=None, error_unexplained=0.01),
        call(5.0, 0.5, error_from_a=None, error_from_b=0.1, error_unexplained=None),
    ]
    got = merged_gemm(tmp_path, *rows)
    for name in ("error_from_a", "error_from_b", "error_unexplained"):
        known = [(row[name], row["mse"] / row["rel_l2"] ** 2) for row in rows if row[name] is not None]
        errors, energies = np.array(known).T
        assert got[name] == pytest.approx(np.sqrt((errors**2 * energies).sum() / energies.sum())), name
    assert got["rel_l2"] == pytest.approx(math.sqrt((0.01 + 0.81 + 0.25) / 35))
