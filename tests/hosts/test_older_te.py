"""The Transformer Engine tests once more, with an older Transformer Engine, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.conftest import OLDER_TE

HERE = Path(__file__).parent
FOLDER = Path(sys.prefix) / "te-2.8.0"


@pytest.mark.slow
def test_transformer_engine_2_8_passes_the_same_tests() -> None:
    """Every TE test of this folder passes with TE 2.8.0: ``pip install --no-deps --target <venv>/te-2.8.0``."""
    if OLDER_TE in os.environ:
        pytest.skip("this is that other process")
    if not FOLDER.exists():
        pytest.skip("Transformer Engine 2.8.0 is not in te-2.8.0 of this environment")
    files = [str(path) for path in sorted(HERE.glob("test_*te*.py")) if path.name != Path(__file__).name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, OLDER_TE: str(FOLDER)}
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-3000:]
