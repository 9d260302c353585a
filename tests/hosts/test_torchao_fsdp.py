"""torchao's float8 layers under FSDP2 on two ranks, their weights gathered in float8."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.conftest import need
from tests.hosts.runs import rows


def run_two_ranks(*arguments: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.hosts.float8_fsdp", *arguments]
    root = Path(__file__).resolve().parents[2]
    processes = [
        subprocess.Popen(command, cwd=root, env=shared | {"RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()[-3000:]


@pytest.mark.slow
def test_weights_gathered_in_float8_are_recorded_with_their_scale(tmp_path: Path) -> None:
    """Training is bit-identical; one row per rank, layer, operand and step; the weight's scale is live.

    The weight is whole on each rank, and both agree on every figure of it. Its values are FP8's already: the largest
    is the format's own, and nothing is lost.
    """
    need("torchao")
    run_two_ranks("tensorwise", "float8", str(tmp_path))
    counts = rows(tmp_path, "select rank, layer, tensor, count(*) as n from amax group by all")
    assert len(counts) == 2 * 2 * 3
    assert {row["n"] for row in counts} == {3}
    query = "select rank, layer, step, shape, scale_source, amax, scale, underflow, saturated from tensors"
    found = rows(tmp_path, f"{query} where tensor = 'weight' order by all")
    first, second = ([{**row, "rank": None} for row in found if row["rank"] == rank] for rank in (0, 1))
    assert len(first) == 2 * 3
    assert first == second
    for row in first:
        assert row["shape"] in ("128x64", "64x128")
        assert (row["scale_source"], row["underflow"], row["saturated"]) == ("live", 0, 0)
        assert row["amax"] * row["scale"] == pytest.approx(448.0, rel=1e-6)
    assert rows(tmp_path, "select * from events where kind = 'error'") == []
