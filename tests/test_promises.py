"""The promises of the design that recording keeps: 1, 2, 5 and 6. Promise 4 is in test_promise_nothing_lost.py."""

from __future__ import annotations

import gc
import importlib
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8dbg
from fp8dbg.recording.calls import Call
from fp8dbg.recording.guard import GUARDED, guarded
from fp8dbg.recording.probe import Probe
from tests.nets import CASES, Case, attached, table, train


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


ELSEWHERE = ("Watch.forward", "Recorder.logged", "Recorder.step_left_out")
"""Those that the training below does not come to."""


@pytest.mark.parametrize("name", [name for name in SITES if name not in ELSEWHERE])
def test_a_fault_of_ours_never_reaches_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise 2: whatever raises, training goes on bit for bit, the log has it once a layer, and the run says so."""
    case = CASES["simulated, non-reentrant"] if name == "Watch.compare" else Case(recipe="delayed:history=4")
    bare = train(case, steps=3)
    _break(monkeypatch, name)
    bare.assert_same(train(case, steps=3, run_dir=tmp_path, every=1))
    told = table(tmp_path, "select distinct layer, detail from events where kind = 'error'")
    assert any(f"planted in {name}" in row["detail"] for row in told)
    assert len(told) == len([record for record in caplog.records if "no longer recorded" in record.getMessage()])


def test_a_fault_of_ours_in_a_step_that_a_scaler_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler goes on as without us: its scale and the weights are the same."""

    def trained(run_dir: Path | None) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(0)
        layer, scaler, scales = nn.Linear(4, 2), torch.amp.GradScaler("cpu", init_scale=2.0**127), []
        optimizer = torch.optim.SGD(layer.parameters(), 0.01)
        run = fp8dbg.attach(layer, run_dir, optimizer) if run_dir else None
        for _ in range(6):
            scaler.scale(layer(torch.randn(3, 4)).square().mean() * 64).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        if run is not None:
            run.close()
        return scales, layer.weight.detach()

    scales, weight = trained(None)
    _break(monkeypatch, "Recorder.step_left_out")
    with_us = trained(tmp_path)
    assert (scales, scales[-1] < scales[0]) == (with_us[0], True)
    assert torch.equal(weight, with_us[1])
    (told,) = table(tmp_path, "select detail from events where kind = 'error'")
    assert "planted in Recorder.step_left_out" in told["detail"]


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


@pytest.mark.slow
def test_memory_does_not_grow_over_2000_steps(tmp_path: Path) -> None:
    """Promise 5: the peak after 1,000 steps, sampled and unsampled, is the peak after 2,000."""
    peaks = {}
    with attached(tmp_path, every=100) as (_, step):
        for done in range(1, 2001):
            step()
            peaks[done] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    assert peaks[2000] - peaks[1000] < 4 << 10
    assert len(table(tmp_path / "run", "select step from steps")) == 2000


def test_no_pass_leaves_anything_behind(tmp_path: Path) -> None:
    """Promise 5: what is kept between forward and backward goes with the graph, evaluation passes' too, at once."""
    gc.collect()
    gc.disable()
    try:
        with attached(tmp_path, Case(validate=True), every=1) as (_, step):
            for _ in range(3):
                step()
            assert not [o for o in gc.get_objects() if type(o) in (Call, Probe)]
    finally:
        gc.enable()


def test_what_is_kept_until_the_backward_is_bounded(tmp_path: Path) -> None:
    """Promise 5: all layers together keep 64 MiB at most; where rows are long, fewer are compared."""
    model = nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with fp8dbg.attach(model, tmp_path, every=1, rows=200) as run:
        assert run.recorder.probing.kept_bytes == 32 << 20
        run.recorder.probing.kept_bytes = 1 << 16
        model(torch.randn(256, 8)).sum().backward()
        optimizer.step()
    rows = table(tmp_path, "select layer, rows_measured from gemms where gemm = 'fprop' order by layer")
    per_row = 4 * 1024 + 4 * 256, 4 * 8 + 4 * 256
    assert [row["rows_measured"] for row in rows] == [(1 << 16) // size for size in per_row] == [12, 62]


@pytest.mark.parametrize("recipe", [None, "delayed:history=16", "mxfp8"])
def test_a_healthy_run_yields_no_finding(recipe: str | None, tmp_path: Path) -> None:
    """Promise 6: a classifier that learns well, in BF16 and in two FP8 recipes, gets no finding and no plan."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16))
    teacher = nn.Linear(64, 16)
    if recipe is not None:
        fp8dbg.simulate(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fp8dbg.attach(model, tmp_path, every=5):
        for _ in range(40):
            x = torch.randn(256, 64)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            loss: Any = nn.functional.cross_entropy(logits.float(), teacher(x).argmax(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    run = fp8dbg.open_run(tmp_path)
    assert run.findings() == []
    assert not run.plan()
    run.close()
