"""Host libraries for the tests: present or skipped with a reason, and Transformer Engine on a CPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.hosts import te_cpu
from tests.hosts.te_cpu.quantizers import Cast

OLDER_TE = "FP8DBG_TEST_TE"
"""Environment variable: a folder with another Transformer Engine, to be used instead of the installed one."""

torch.set_num_threads(1)  # these layers are small: threads would only wait for each other

if OLDER_TE in os.environ:
    sys.path.insert(0, os.environ[OLDER_TE])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that play a GPU go last: what the stand-in replaces in torch stays replaced in this process."""
    items.sort(key=lambda item: "te" in getattr(item, "fixturenames", ()))


def need(*modules: str) -> None:
    """Skip the test unless these modules are installed."""
    missing = [name for name in modules if not _installed(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent package
        return False


@pytest.fixture(scope="session")
def te() -> Any:
    """``transformer_engine.pytorch`` over the CPU stand-in."""
    reason = te_cpu.absent()
    if reason:
        pytest.skip(reason)
    return te_cpu.install()


@pytest.fixture
def casts(te: Any) -> Iterator[list[Cast]]:
    """Every cast that Transformer Engine makes during the test, with copies of the tensors."""
    seen: list[Cast] = []

    def observer(cast: Cast) -> None:
        inner = {name: value.clone() for name, value in cast.inner.items()}
        seen.append(replace(cast, dense=cast.dense.detach().clone(), inner=inner))

    te_cpu.OBSERVERS.append(observer)
    yield seen
    te_cpu.OBSERVERS.remove(observer)
