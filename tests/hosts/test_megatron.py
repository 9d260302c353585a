"""Megatron-Core on a CPU, alone and under torchrun on gloo: names, ranks, recompute, and a fault that it can have."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import fp8dbg
from fp8dbg.analysis.finding import Finding
from fp8dbg.hooks.megatron_fallback import write_fallback
from fp8dbg.hooks.megatron_names import global_names
from tests.hosts.conftest import need
from tests.hosts.runs import rows
from tests.hosts.test_fallback_text import Entry, Plan

ROOT = Path(__file__).parents[2]
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
LAYERS = {f"decoder.layers.{i}.{name}" for i in (0, 1) for name in LINEARS}


def run(out: Path, *options: str, ranks: int = 1) -> list[dict[str, Any]]:
    """What each rank of a training wrote; skipped where a host is missing."""
    need("megatron.core", "transformer_engine")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", port, "-m"]
    environment = {**os.environ, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "tests.hosts.megatron_run", str(out), *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"result-{rank}.json").read_text()) for rank in range(ranks)]


def recorded(out: Path, rank: int = 0) -> dict[str, list[list[Any]]]:
    """Layer:operand -> amax, scale, underflow and at_max of each recorded cast, as the script notes the real ones."""
    found: dict[str, list[list[Any]]] = {}
    query = (
        "select layer, tensor, amax, scale, underflow, at_max from tensors where what_if is null and recipe is not null"
    )
    for row in rows(out, f"{query} and rank = {rank} order by step, microbatch"):
        found.setdefault(f"{row.pop('layer')}:{row.pop('tensor')}", []).append(list(row.values()))
    return found


def findings(folder: Path) -> list[Finding]:
    """Worst first."""
    with fp8dbg.open_run(folder) as opened:
        return opened.findings()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_transformer_engine_layers_inside_megatron(tmp_path: Path, recipe: str) -> None:
    """Figures are those of the bytes, training is bit-identical, every layer has its name, nothing is missing."""
    bare = run(tmp_path / "bare", "--recipe", recipe, "--bare")[0]
    watched = run(tmp_path / "run", "--recipe", recipe)[0]
    assert watched["losses"] == bare["losses"]
    assert watched["weights"] == bare["weights"]
    found = recorded(tmp_path / "run")
    assert {key.split(":")[0] for key in found} == LAYERS
    for key, casts in watched["casts"].items():
        assert found[key] == casts, key  # weights are cached over microbatches, and recorded once a step
    assert rows(tmp_path / "run", "select * from events") == []


def test_recompute_counts_nothing_twice(tmp_path: Path) -> None:
    """Full uniform recompute: one row per layer, operand and microbatch, scales of the first pass."""
    result = run(tmp_path, "--recipe", "delayed", "--recompute")[0]
    found = recorded(tmp_path)
    for key, casts in result["casts"].items():
        assert found[key] == casts, key
    counts = {row["n"] for row in rows(tmp_path, "select count(*) as n from amax group by layer, tensor")}
    assert counts == {8}


@pytest.mark.parametrize("options", [(), ("--sequence-parallel",)])
def test_two_ranks_write_their_own_rows(tmp_path: Path, options: tuple[str, ...]) -> None:
    """TP=2 on gloo, FP8 amaxes reduced by the host: each rank's figures are its own casts', with the reduced scale."""
    results = run(tmp_path, "--recipe", "delayed", *options, ranks=2)
    assert results[0]["losses"] == results[1]["losses"]
    for rank, result in enumerate(results):
        found = recorded(tmp_path, rank)
        assert {key.split(":")[0] for key in found} == LAYERS
        for key, casts in result["casts"].items():
            assert found[key] == casts, (rank, key)
    assert rows(tmp_path, "select * from events where kind = 'error'") == []
    assert findings(tmp_path) == []


def test_a_layer_whose_amaxes_are_not_reduced_is_named(tmp_path: Path) -> None:
    """One row-parallel layer in an autocast with a group of its own rank: the ranks' scales of it part, no others'."""
    lone = "decoder.layers.1.mlp.linear_fc2"
    options = ("--recipe", "delayed", "--steps", "6", "--sequence-parallel")
    results = run(tmp_path, *options, "--lone-layer", lone, ranks=2)
    for rank, result in enumerate(results):
        found = recorded(tmp_path, rank)
        assert all(found[key] == casts for key, casts in result["casts"].items())
    judged = [(f.code, f.severity, f.layer, f.first_step) for f in findings(tmp_path)]
    assert judged == [("rank_disagreement", "act", lone, 1)]
    query = "select layer, tensor from amax group by step, microbatch, layer, tensor having min(scale) < max(scale)"
    apart = {(row["layer"], row["tensor"]) for row in rows(tmp_path, query)}
    assert {key for key in apart if key[0] in LAYERS} == {(lone, role) for role in ("input", "weight", "grad_output")}


def test_current_scales_reduced_over_ranks_are_said_to_be_unseen(tmp_path: Path) -> None:
    """Sequence parallelism: a gathered tensor's scale is that of the ranks' largest amax; the rows together give it."""
    results = run(tmp_path, "--recipe", "current", "--sequence-parallel", ranks=2)
    found = [recorded(tmp_path, rank) for rank in (0, 1)]
    gathered = {f"{layer}:input" for layer in LAYERS if layer.endswith(("qkv", "fc1"))}
    gathered |= {f"{layer}:grad_output" for layer in LAYERS if layer.endswith(("proj", "fc2"))}
    for rank, result in enumerate(results):
        for key in set(found[rank]) - gathered:
            assert found[rank][key] == result["casts"][key], (rank, key)
    for key in gathered:
        largest = [max(a[0], b[0]) for a, b in zip(found[0][key], found[1][key], strict=True)]
        limit = 448.0 if key.endswith("input") else 57344.0
        assert [cast[1] for cast in results[0]["casts"][key]] == [
            float(np.float32(limit) / np.float32(a)) for a in largest
        ]
    told = rows(tmp_path, "select rank, layer, detail from events where kind = 'gap'")
    assert {(row["rank"], f"{row['layer']}:{row['detail'].split()[1]}") for row in told} == {
        (rank, key) for rank in (0, 1) for key in gathered
    }


def test_debug_mode_shows_the_scale_of_a_gathered_input(tmp_path: Path) -> None:
    """The exact route under sequence parallelism: inputs have the scale reduced over ranks, to the last bit."""
    need("nvdlfw_inspect")
    results = run(tmp_path, "--recipe", "current", "--sequence-parallel", "--exact", ranks=2)
    for rank, result in enumerate(results):
        found = recorded(tmp_path, rank)
        gathered = {key for key in result["casts"] if key.endswith(("proj:grad_output", "fc2:grad_output"))}
        assert len(gathered) == 4
        for key in set(result["casts"]) - gathered:
            assert found[key] == result["casts"][key], (rank, key)
    told = rows(tmp_path, "select distinct layer, kind from events where kind in ('gap', 'error')")
    assert {(row["layer"], row["kind"]) for row in told} == {(key.split(":")[0], "gap") for key in gathered}


def test_the_local_spec_is_recorded_too(tmp_path: Path) -> None:
    """Megatron's own linears, tuples and tied output layer, in-place cross entropy: all three GEMMs of each."""
    bare = run(tmp_path / "bare", "--spec", "local", "--bare")[0]
    watched = run(tmp_path / "run", "--spec", "local")[0]
    assert watched["losses"] == bare["losses"]
    assert watched["weights"] == bare["weights"]
    found = rows(tmp_path / "run", "select distinct layer, gemm from gemms where host = 'megatron'")
    expected = {(layer, gemm) for layer in {*LAYERS, "output_layer"} for gemm in ("fprop", "dgrad", "wgrad")}
    assert {tuple(row.values()) for row in found} == expected
    assert rows(tmp_path / "run", "select * from events") == []


def test_a_plan_is_applied_by_megatron_names(tmp_path: Path) -> None:
    """One layer of the FP8 model kept in BF16: no cast is made for it, the others' are."""
    layer = "decoder.layers.1.mlp.linear_fc2"
    result = run(tmp_path, "--recipe", "current", "--bf16-layer", layer)[0]
    assert {key.split(":")[0] for key in result["casts"]} == LAYERS - {layer}
    found = rows(
        tmp_path, f"select distinct recipe, what_if from tensors where layer = '{layer}' and recipe is not null"
    )
    assert [row["what_if"] for row in found] == ["delayed"]


def test_the_precision_file_keeps_exactly_the_planned_layers(tmp_path: Path) -> None:
    """What is written for --te-precision-config-file, taken by the model as Megatron does: no others are in BF16."""
    planned = {"decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.self_attention.linear_proj"}
    file = tmp_path / "precision.yaml"
    file.write_text(write_fallback(Plan(tuple(map(Entry, sorted(planned))))))
    result = run(tmp_path / "run", "--recipe", "delayed", "--precision-file", str(file))[0]
    assert {key.split(":")[0] for key in result["casts"]} == LAYERS - planned
    found = rows(tmp_path / "run", "select distinct layer from tensors where what_if is null and recipe is not null")
    assert {row["layer"] for row in found} == LAYERS - planned


def test_names_are_global_on_a_later_pipeline_stage() -> None:
    """A stage's layers.0 with layer_number 17 is layers.16 of the model; other models' names are left alone."""

    class TransformerLayer(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer_number, self.fc = number, nn.Linear(2, 2)

    def model() -> nn.Module:
        stage = nn.Module()
        stage.layers = nn.ModuleList([TransformerLayer(17), TransformerLayer(18)])
        return nn.ModuleDict({"decoder": stage})

    assert global_names(model())("decoder.layers.1.fc") == "decoder.layers.1.fc"
    TransformerLayer.__module__ = "megatron.core.transformer.transformer_layer"
    rename = global_names(model())
    assert [rename(f"decoder.layers.{i}.fc") for i in (0, 1)] == ["decoder.layers.16.fc", "decoder.layers.17.fc"]
    assert rename("output_layer") == "output_layer"
