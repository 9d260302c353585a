"""The demo's run folder, made once for all tests that read it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Demo(NamedTuple):
    """A run folder, and what the demo printed while it made it."""

    folder: Path
    out: str
    err: str


@cache
def demo() -> Demo:
    """Run ``fp8dbg demo`` as a user does; some minutes on a busy machine."""
    folder = Path(tempfile.mkdtemp(prefix="fp8dbg-demo-")) / "demo_run"
    done = subprocess.run(
        [sys.executable, "-m", "fp8dbg", "demo", str(folder)], capture_output=True, text=True, check=True
    )
    return Demo(folder, done.stdout, done.stderr)
