"""The host examples run, each in a process of its own, and say what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.conftest import need

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hosts", "says"),
    [
        ("torchao_float8", ("torchao",), "input's non-zeros become zero"),
        ("transformer_engine", ("transformer_engine",), "with the plan: loss"),
        ("megatron_te", ("megatron.core", "transformer_engine"), "training_recipe: {}"),
        ("lightning_callback", ("lightning",), "steps, lowest and highest loss: (20,"),
        ("huggingface_trainer", ("transformers", "accelerate"), "15 layers recorded"),
    ],
)
def test_an_example_runs(tmp_path: Path, name: str, hosts: tuple[str, ...], says: str) -> None:
    """It ends well and prints its result; the run folder is where it was asked for."""
    need(*hosts)
    command = [sys.executable, "-W", "ignore", "-m", f"examples.{name}", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert says in done.stdout
    assert list((tmp_path / "out").rglob("run.json"))
