"""Transformer Engine's linears, te.ops' too, split over two ranks: each rank's rows against the casts that it made."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fp8dbg
from tests.hosts import te_cpu
from tests.hosts.runs import rows
from tests.hosts.te_parallel import KINDS, PARALLEL, RECIPES

ROOT = Path(__file__).parents[2]
EVERY = list(itertools.product(KINDS, RECIPES, PARALLEL))
ROLES = ("input", "weight", "grad_output")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have trained: a run folder for each kind, recipe and way of being parallel."""
    reason = te_cpu.absent()
    if reason:
        pytest.skip(reason)
    out = tmp_path_factory.mktemp("parallel")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.hosts.te_parallel", str(out)]
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env=shared | {"RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=280)
        assert process.returncode == 0, errors.decode()[-3000:]
    return out


def found(run: Path, rank: int) -> dict[str, Any]:
    """What a rank noted itself."""
    noted: dict[str, Any] = json.loads((run / f"found-{rank}.json").read_text())
    return noted


def recorded(run: Path, rank: int) -> dict[str, list[list[Any]]]:
    """Layer:operand -> amax, scale, underflow and at_max of each recorded cast."""
    columns = "layer, tensor, amax, scale, underflow, at_max"
    query = f"select {columns} from tensors where what_if is null and recipe is not null and rank = {rank}"
    made: dict[str, list[list[Any]]] = {}
    for row in rows(run, f"{query} order by step, microbatch"):
        made.setdefault(f"{row.pop('layer')}:{row.pop('tensor')}", []).append(list(row.values()))
    return made


def gathered(kind: str, recipe: str, parallel: str) -> set[str]:
    """Operands of which current scaling casts both ranks' parts with one scale."""
    if parallel == "tensor" or recipe == "delayed":
        return set()
    each = {
        "linear": ("0.0:input",),
        "module": ("0:input", "2:grad_output"),
        "mlp": ("0.fc1:input", "0.fc2:grad_output"),
    }
    return set(each.get(kind, ("0.0:input", "0.2:grad_output")))


@pytest.mark.parametrize(("kind", "recipe", "parallel"), EVERY)
def test_each_rank_records_its_own_casts(out: Path, kind: str, recipe: str, parallel: str) -> None:
    """Figures are those of the bytes; what is cast with a scale for all ranks has its own amax, and that is said."""
    run = out / f"{kind}-{recipe}-{parallel}"
    shared = gathered(kind, recipe, parallel)
    made = [recorded(run, rank) for rank in (0, 1)]
    for rank in (0, 1):
        casts = found(run, rank)["casts"]
        seen = {key for key in casts if kind != "mlp" or key not in ("0.fc1:grad_output", "0.fc2:input")}
        assert set(made[rank]) == seen
        for key in seen:
            real = casts[key][::2] if key.endswith("weight") else casts[key]
            if key not in shared or (kind == "groupless" and te_cpu.te_version() >= (2, 20)):
                assert made[rank][key] == real, (rank, key)
            else:
                assert [cast[0] for cast in made[rank][key]] == [cast[0] for cast in real]
                scales = [min(a[1], b[1]) for a, b in zip(made[0][key], made[1][key], strict=True)]
                assert scales == [cast[1] for cast in real]
    told = rows(run, "select layer, detail from events where kind = 'gap' and detail like '%gathered%'")
    assert {f"{row['layer']}:{row['detail'].split()[1]}" for row in told} == shared
    apart = kind == "groupless" and te_cpu.te_version() >= (2, 20)
    assert all(("scale of its own" in row["detail"]) == apart for row in told)


@pytest.mark.parametrize(("kind", "recipe", "parallel"), EVERY)
def test_training_is_the_same_and_no_collective_is_ours(out: Path, kind: str, recipe: str, parallel: str) -> None:
    """Losses, weights and counts of collectives as without fp8dbg; one row per rank, layer, operand and microbatch."""
    run = out / f"{kind}-{recipe}-{parallel}"
    for rank in (0, 1):
        noted = found(run, rank)
        assert noted["same"]
        assert noted["calls"] == noted["usual"]
        assert noted["calls"]
    counts = rows(run, "select rank, layer, tensor, step, microbatch, count(*) as n from amax group by all")
    assert {row["n"] for row in counts} == {1}
    assert len(counts) == 2 * 3 * 2 * (4 if kind == "mlp" else 6)
    assert rows(run, "select * from events where kind = 'error'") == []


@pytest.mark.parametrize(("kind", "recipe", "parallel"), EVERY)
def test_what_ranks_sum_up_is_not_compared(out: Path, kind: str, recipe: str, parallel: str) -> None:
    """A product that ranks sum up is not held against one rank's shadow: nothing is unexplained, nothing is judged."""
    run = out / f"{kind}-{recipe}-{parallel}"
    gemms = rows(run, "select layer, gemm, error_unexplained as rest from gemms")
    if kind == "mlp" or (parallel == "sequence" and kind != "linear"):
        assert all(row["rest"] is None for row in gemms)
    else:
        held = {(row["layer"][-1], row["gemm"]) for row in gemms if row["rest"] is not None}
        down = [] if parallel == "sequence" else [("0", "fprop"), ("0", "wgrad")]
        rows_only = [("2", "dgrad"), ("2", "wgrad")] + ([("2", "fprop")] if kind == "linear" else [])
        assert held == {*down, *rows_only}
        assert all(row["rest"] < 0.004 for row in gemms if row["rest"] is not None)
    with fp8dbg.open_run(run) as opened:
        assert {finding.code for finding in opened.findings()} <= {"coverage"}
