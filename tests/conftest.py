"""Fixtures for every test."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.command_line import Run, in_this_process

if TYPE_CHECKING:
    from tests.browser import Browser

# The tensors here are small, and threads that wait for each other spin: on a busy machine 50 times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _last_hook_id() -> int:
    """Grows with every hook that anybody registers through torch."""
    hooks = sys.modules.get("torch.utils.hooks")
    return int(hooks.RemovableHandle.next_id) if hooks else 0


def _is_ours(hook: Any) -> bool:
    owner = getattr(hook, "__self__", hook)
    return type(owner).__module__.startswith("fp8dbg.") or getattr(hook, "__module__", "").startswith("fp8dbg.")


def _what_is_left() -> list[str]:
    """Hooks of ours that are still on a module or an optimizer, and functions of torch that are still wrapped."""
    import torch
    from torch.optim import optimizer

    found = []
    for module in (o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)):
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            found += [f"a hook on {type(module).__name__}" for hook in hooks.values() if _is_ours(hook)]
    found += ["a hook on all optimizers" for hook in optimizer._global_optimizer_post_hooks.values() if _is_ours(hook)]
    if hasattr(torch.autograd.backward, "__wrapped__"):
        found.append("a wrapped torch.autograd.backward")
    for name in ("scale", "step"):
        if hasattr(getattr(torch.amp.GradScaler, name), "__wrapped__"):
            found.append(f"a wrapped GradScaler.{name}")
    return found


@pytest.fixture(autouse=True)
def no_hooks_left() -> Iterator[None]:
    """Fail a test that leaves a hook of ours behind: an open session would record the next test's training."""
    before = _last_hook_id()
    yield
    if _last_hook_id() == before:
        return
    left = _what_is_left()
    boundaries: Any = sys.modules.get("fp8dbg.recording.boundaries")
    for listener in list(boundaries._listeners) if boundaries else []:
        boundaries.unlisten(listener)  # so that the next test starts clean
    assert not left


@pytest.fixture(name="fp8dbg")
def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs the command line in this process."""
    yield from in_this_process(monkeypatch, capsys)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of a file."""
    from tests.browser import start  # brings selenium

    started = start()
    yield started
    started.driver.quit()


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose layers.2.up was drowned by an outlier from step 100 on."""
    from tests.synthetic import outlier, write_run

    return write_run(tmp_path_factory.mktemp("runs") / "faulty", plant=outlier())
