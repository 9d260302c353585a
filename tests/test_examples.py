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


HIDDEN = """
import runpy, sys, types
from importlib.machinery import ModuleSpec
for name in ("megatron", "transformer_engine"):
    sys.modules[name] = types.ModuleType(name) if INSTALLED else None
    if INSTALLED:
        sys.modules[name].__spec__ = ModuleSpec(name, None)
sys.modules["tests"] = None
runpy.run_path(EXAMPLE, run_name="__main__")
"""


@pytest.mark.parametrize("name", ["megatron_te", "transformer_engine"])
@pytest.mark.parametrize(("installed", "says"), [(False, "pip install '.["), (True, "in the root of a checkout")])
def test_an_example_that_lacks_something_says_so_in_one_line(name: str, installed: bool, says: str) -> None:
    """Its host library, or, where it was started as a script, the tests' stand-in for a GPU's code."""
    program = f"INSTALLED, EXAMPLE = {installed}, {str(ROOT / 'examples' / name) + '.py'!r}\n{HIDDEN}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
