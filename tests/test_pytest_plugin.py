"""The pytest plugin: the fixture records, judges, and fails a test with a sentence for each gate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

UNWELL = """
import torch
import fp8dbg
from torch import nn

def test_it(fp8dbg_run):
    torch.manual_seed(0)
    model = fp8dbg.simulate(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "current")
    with torch.no_grad():
        model[0].weight[0] *= 1e6
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    fp8dbg_run.attach(model, optimizer=optimizer, every=1)
    for _ in range(12):
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
    fp8dbg_run.assert_healthy()
"""


def pytest_in(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, with the plugin."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "fp8dbg.pytest_plugin", "-q", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_example_passes(tmp_path: Path) -> None:
    """examples/ci as it stands, rules file included."""
    done = pytest_in(tmp_path, f"--rootdir={ROOT / 'examples' / 'ci'}", str(ROOT / "examples" / "ci"))
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.slow
def test_an_unwell_training_fails_with_a_sentence_for_each_gate(tmp_path: Path) -> None:
    """What, where and why, without a traceback; the session that the test left open is closed."""
    (tmp_path / "test_unwell.py").write_text(UNWELL, encoding="utf-8")
    done = pytest_in(tmp_path, "test_unwell.py")
    assert done.returncode == 1, done.stdout
    assert "within their format's reach: median underflow of 0 weight is 0.98" in done.stdout
    assert "Limit: " in done.stdout
    assert "Traceback" not in done.stdout


def test_loading_the_plugin_imports_nothing_heavy() -> None:
    """Every test session of a project that has fp8dbg installed loads it."""
    code = "import sys, fp8dbg.pytest_plugin; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "pyarrow", "duckdb", "plotly"} & set(done.stdout.split())
