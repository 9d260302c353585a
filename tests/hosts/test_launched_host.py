"""``fp8dbg run`` on trainings of every host that have never heard of it: recorded, and bit for bit what they were."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.conftest import need
from tests.hosts.runs import rows
from tests.hosts.te_cpu import absent

ROOT = Path(__file__).parents[2]
RECORD = (sys.executable, "-m", "fp8dbg", "run", "--every", "2", "--out")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")

LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
MEGATRON = {"output_layer", *(f"decoder.layers.0.{name}" for name in LINEARS)}


def started(command: tuple[str, ...]) -> tuple[list[str], str]:
    """The hashes that a command prints, and its other words."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(line for line in done.stdout.splitlines() if line.startswith("hash")), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "modules", "layers", "recorded_as", "ranks"),
    [
        ("te", ("transformer_engine",), {"0", "1", "2.fc1", "2.fc2", "3"}, "nvidia_te", 1),
        ("torchao", ("torchao",), {"0", "2"}, "torchao_float8", 1),
        ("megatron", ("transformer_engine", "megatron.core"), MEGATRON, "nvidia_te", 2),
        ("lightning", ("lightning",), {"net.0", "net.2"}, "pytorch", 1),
        ("huggingface", ("transformers", "accelerate"), {"net.0", "net.2"}, "pytorch", 1),
    ],
)
def test_an_unmodified_training_is_recorded_and_unchanged(
    tmp_path: Path, host: str, modules: tuple[str, ...], layers: set[str], recorded_as: str, ranks: int
) -> None:
    """Every rank's weights to the last bit; each layer, every step, its microbatches, its own host's rows."""
    need(*modules)
    reason = absent() if "transformer_engine" in modules else None
    if reason:
        pytest.skip(reason)
    program = (*(TORCHRUN if ranks > 1 else ()), "tests.hosts.launched_host", host, str(tmp_path / "out"))
    bare, _ = started((sys.executable, "-m", *program))
    hashes, said = started((*RECORD, str(tmp_path / "run"), "--", sys.executable, "-m", *program))
    assert len(bare) == ranks
    assert hashes == bare
    assert "Recorded in" in said
    query = "select rank, layer, count(distinct step) as steps, count(distinct microbatch) as microbatches from amax"
    found = rows(tmp_path / "run", f"{query} where tensor = 'weight' group by all")
    assert {row["rank"] for row in found} == set(range(ranks))
    assert {(row["steps"], row["microbatches"]) for row in found} == {(3, 2)}
    assert {row["layer"] for row in found} == layers
    query = "select distinct host, what_if is null as in_force from tensors where tensor = 'weight'"
    hosts = {tuple(row.values()) for row in rows(tmp_path / "run", query)}
    assert hosts - {("megatron", False)} == {(recorded_as, recorded_as != "pytorch")}  # its output layer is in BF16
    assert rows(tmp_path / "run", "select * from events where kind = 'error'") == []
