"""The code on the hosts' pages of the manual runs with the host itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.conftest import need
from tests.test_docs import blocks

ROOT = Path(__file__).parents[2]

GIVEN = {"transformer-engine": "from tests.hosts import te_cpu\nte_cpu.install()\n"}
"""What stands before a page's code: Transformer Engine's stand-in for a GPU."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "hosts", "recorded"),
    [
        ("transformer-engine", ("transformer_engine",), "te_run"),
        ("torchao", ("torchao",), "torchao_run"),
        ("nemo-lightning", ("lightning",), "lightning_run"),
        ("huggingface", ("transformers", "accelerate"), "hf_run"),
    ],
)
def test_the_code_of_a_hosts_page_records(tmp_path: Path, page: str, hosts: tuple[str, ...], recorded: str) -> None:
    """As it stands; afterwards there is a run folder with figures."""
    need(*hosts)
    code = "\n".join([GIVEN.get(page, ""), *blocks(ROOT / "docs" / "hosts" / f"{page}.md", "python")])
    code += f"\nassert fp8dbg.open_run({recorded!r}).rows('select count(*) as n from tensors')[0]['n'] > 0\n"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", f"import fp8dbg\n{code}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
