"""Every benchmark, one after another, each in a process of its own: ``python -m tests.benchmarks``."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path


def machine() -> str:
    """What the figures were measured on."""
    models = [line.split(":")[1].strip() for line in _processors() if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def _processors() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


print(machine())
for name in ("census", "training", "commands", "pandas_group_bys"):
    print(f"\n{name}", flush=True)
    subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"], check=True)
