"""The demo's run folder, made once for all tests that read it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Demo(NamedTuple):
    """A run folder, and what the demo printed while it made it."""

    folder: Path
    out: str
    err: str


@cache
def demo() -> Demo:
    """Run ``fp8dbg demo`` as a user does; some minutes on a busy machine."""
    place = Path(tempfile.mkdtemp(prefix="fp8dbg-demo-"))
    command = [sys.executable, "-m", "fp8dbg", "demo", "demo_run"]
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=True)
    return Demo(place / "demo_run", done.stdout, done.stderr)
