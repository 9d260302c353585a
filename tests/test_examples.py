"""The examples that need no host library run, each in a process of its own, and say what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_rehearse_fp8(tmp_path: Path) -> None:
    """A loss per recipe; FP8 recipes end close to BF16, and NVFP4 does once its output layer is in BF16."""
    command = [sys.executable, "-W", "ignore", "-m", "examples.rehearse_fp8"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.rsplit(maxsplit=2) for line in done.stdout.splitlines()[1:]]
    against = {name.strip(): float(gap) for name, _, gap in rows}
    assert against["bf16"] == 0.0
    assert all(abs(gap) < 0.1 for name, gap in against.items() if name != "nvfp4")
    assert against["nvfp4"] > 5 * abs(against["nvfp4, layer 8 in BF16"])
