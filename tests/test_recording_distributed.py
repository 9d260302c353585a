"""Two processes on gloo: each rank writes its own rows, under names in which no wrapper shows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.nets import Case, table, train
from tests.test_recording_calls import LAYERS


def _run_two_ranks(kind: str, run_dir: Path, ranks: str = "01") -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.two_ranks", kind, str(run_dir), ranks]
    root = Path(__file__).resolve().parent.parent
    processes = [
        subprocess.Popen(command, cwd=root, env=shared | {"RANK": str(r), "LOCAL_RANK": str(r)}, stderr=subprocess.PIPE)
        for r in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp of every layer"])
def test_two_ranks_write_their_own_rows(kind: str, tmp_path: Path) -> None:
    """One row per rank, layer, operand and microbatch; full weights under FSDP2; training as it is without us."""
    _run_two_ranks(kind, tmp_path)
    rows = table(tmp_path, "select rank, step, microbatch, layer, count(*) as n from amax group by all order by all")
    assert [tuple(row.values()) for row in rows] == [
        (rank, step, microbatch, layer, 3)
        for rank in range(2)
        for step in range(3)
        for microbatch in range(2)
        for layer in LAYERS
    ]
    shapes = table(tmp_path, "select distinct layer, shape from tensors where tensor = 'weight' order by layer")
    assert [row["shape"] for row in shapes] == ["16x32", "32x16", "16x32", "32x16", "8x16"]
    gemms = table(tmp_path, "select rank, gemm, count(*) as n from gemms group by all order by all")
    assert [row["n"] for row in gemms] == [16, 20, 20] * 2
    assert not table(tmp_path, "select * from events")


@pytest.mark.slow
def test_ranks_differ_where_their_data_do_and_agree_where_they_do_not(tmp_path: Path) -> None:
    """Inputs are each rank's own, weights are the same, and both are those of a run without processes."""
    _run_two_ranks("ddp", tmp_path / "two")
    amaxes = "select amax from amax where step = 0 and microbatch = 0 and layer = 'blocks.0.up' and tensor = "
    weights, inputs = (table(tmp_path / "two", f"{amaxes} '{name}'") for name in ("weight", "input"))
    assert weights[0] == weights[1]
    assert inputs[0] != inputs[1]
    torch.manual_seed(0)
    train(Case(microbatches=2), steps=1, run_dir=tmp_path / "one")
    assert table(tmp_path / "one", f"{amaxes} 'weight'") == weights[:1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp of every layer"])
def test_no_collective_is_called(kind: str, tmp_path: Path) -> None:
    """Attached on one rank alone: a collective of ours would wait for the other for ever, or take its data."""
    _run_two_ranks(kind, tmp_path, ranks="1")
    assert table(tmp_path, "select rank, count(*) as n from amax group by rank") == [{"rank": 1, "n": 90}]


def test_the_rank_of_a_launcher_without_a_process_group_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sets RANK before a program initialises anything."""
    monkeypatch.setenv("RANK", "3")
    train(Case(), steps=1, run_dir=tmp_path)
    assert table(tmp_path, "select distinct rank from amax") == [{"rank": 3}]
