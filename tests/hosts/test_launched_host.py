"""``fp8dbg run`` on trainings of every host that have never heard of it: recorded, and bit for bit what they were."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8dbg.runs.plan import Plan, PlanEntry
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "module", "gemms"),
    [("te", "transformer_engine", ("fprop", "dgrad", "wgrad")), ("torchao", "torchao", ("dgrad", "wgrad"))],
)
def test_a_plan_is_tried_on_an_unmodified_training(
    tmp_path: Path, host: str, module: str, gemms: tuple[str, ...]
) -> None:
    """--fallback: exactly the planned GEMMs of the planned layer leave FP8, and the run says so."""
    need(module)
    plan = tmp_path / "plan.json"
    plan.write_text(Plan((PlanEntry("0", gemms, reason="tried"),)).to_json())
    out, program = tmp_path / "run", ("tests.hosts.launched_host", host, str(tmp_path / "out"))
    started((*RECORD, str(out), "--fallback", str(plan), "--", sys.executable, "-m", *program))
    (event,) = rows(out, "select detail from events where kind = 'config'")
    assert event["detail"] == f"The fallback plan {plan} is applied: 1 layer."
    listed = {layer["layer"]: layer for layer in json.loads((out / "run.json").read_text())["layers"]}
    assert {name: layer["bf16_gemms"] for name, layer in listed.items()} == {n: [] for n in listed} | {"0": [*gemms]}
    query = "select distinct layer, gemm from gemms where recipe <> 'bf16' and host <> 'pytorch' and recipe = "
    query += "(select any_value(recipe) from tensors where what_if is null and recipe is not null)"
    quantised = {tuple(row.values()) for row in rows(out, query)}
    others = {(layer, gemm) for layer in set(listed) - {"0"} for gemm in ("fprop", "dgrad", "wgrad")}
    if host == "te":  # a whole layer in BF16 is compared with the recipe that attach was given: as what_if
        found = rows(out, "select distinct what_if is null as in_force from tensors where layer = '0' and recipe <> ''")
        assert [row["in_force"] for row in found] == [False]
        assert {layer for layer, _ in quantised} >= {"1", "3"}
    else:
        assert quantised == others | {("0", "fprop")}
