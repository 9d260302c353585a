"""The promises of the design that recording keeps: 1, 2, 5 and 6. Promise 4 is in test_promise_nothing_lost.py."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from fp8dbg.recording.guard import GUARDED, guarded
from tests.nets import CASES, Case, table, train


@pytest.mark.parametrize("name", CASES)
def test_training_is_never_changed(name: str, tmp_path: Path) -> None:
    """Promise 1: weights, losses and random numbers are the same, bit for bit, with everything measured and without."""
    bare = train(CASES[name])
    bare.assert_same(train(CASES[name], run_dir=tmp_path, every=2, what_if=["current", "mxfp8"], dump="*head:input"))
    assert table(tmp_path, "select count(*) as n from events where kind = 'error'") == [{"n": 0}]


def _site(name: str) -> tuple[type[Any], str]:
    owner, _, entry = name.rpartition(".")
    return getattr(importlib.import_module(GUARDED[name]), owner), entry


def _break(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have a guarded method raise, behind the same guard."""
    owner, entry = _site(name)

    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"planted in {name}")

    broken.__name__, broken.__qualname__ = entry, f"planted.{name}"
    monkeypatch.setattr(owner, entry, guarded("something")(broken))
    GUARDED.pop(f"planted.{name}")


SITES = sorted(name for name, module in GUARDED.items() if module.startswith("fp8dbg.recording."))
"""Every place at which training calls us."""


@pytest.mark.parametrize("name", [name for name in SITES if name not in ("Watch.forward", "Recorder.logged")])
def test_a_fault_of_ours_never_reaches_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise 2: whatever raises, training goes on bit for bit, the log has it once a layer, and the run says so."""
    case = Case(recipe="delayed:history=4")
    bare = train(case, steps=3)
    _break(monkeypatch, name)
    bare.assert_same(train(case, steps=3, run_dir=tmp_path, every=1))
    told = table(tmp_path, "select distinct layer, detail from events where kind = 'error'")
    assert any(f"planted in {name}" in row["detail"] for row in told)
    assert len(told) == len([r for r in caplog.records if r.name == "fp8dbg"])


@pytest.mark.parametrize("method", ["pick", "weight", "bias", "scale", "recipe_of", "results", "facts"])
def test_a_fault_of_an_adapter_never_reaches_training(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 2 holds for what a host's adapter says about a layer: a host may have changed under it."""
    from fp8dbg.hooks.pytorch import SimulatedLayer

    def broken(*args: Any) -> None:
        raise AttributeError(f"no {method} any more")

    case = Case(recipe="delayed:history=4")
    bare = train(case, steps=3)
    monkeypatch.setattr(SimulatedLayer, method, broken)
    bare.assert_same(train(case, steps=3, run_dir=tmp_path, every=1))
    told = table(tmp_path, "select detail from events where kind = 'error'")
    assert told
    assert all(f"no {method} any more" in row["detail"] for row in told)


def test_a_fault_in_one_layer_leaves_the_others_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks for one layer is switched off for that layer alone."""
    from fp8dbg.recording.layer import Layer

    original = Layer.pick

    def picky(self: Layer, *args: Any) -> Any:
        if self.name == "head":
            raise ValueError("not this one")
        return original(self, *args)

    monkeypatch.setattr(Layer, "pick", picky)
    train(Case(), steps=3, run_dir=tmp_path)
    told = table(tmp_path, "select step, layer from events where kind = 'error'")
    assert told == [{"step": 0, "layer": "head"}]
    seen = table(tmp_path, "select layer, count(*) as n from amax group by layer order by layer")
    assert [row["n"] for row in seen] == [9] * 4
    assert "head" not in {row["layer"] for row in seen}
