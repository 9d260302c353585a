"""The exact route: Transformer Engine's debug mode, real nvdlfw_inspect, on the CPU stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8dbg
from fp8dbg.hooks import nvidia_inspect
from tests.hosts import te_cpu, te_nets
from tests.hosts.conftest import need
from tests.hosts.runs import figures, rows
from tests.hosts.test_nvidia_te import HIDDEN, PER_TENSOR, expected_of, spying, train


@pytest.fixture
def debug_mode(te: Any, tmp_path: Path) -> Iterator[Path]:
    """Debug mode, for this test; the value is a folder for runs."""
    need("nvdlfw_inspect")
    nvidia_inspect.start(log_dir=tmp_path / "logs")
    yield tmp_path
    nvidia_inspect.stop()


def debugged(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether debug mode ran, of each call of the module from now on."""
    answers: list[bool] = []
    real = module.is_debug_iter

    def spy() -> bool:
        answers.append(bool(real()))
        return answers[-1]

    monkeypatch.setattr(module, "is_debug_iter", spy)
    return answers


@pytest.mark.parametrize("recipe", PER_TENSOR)
def test_what_fusion_hides_is_recorded_as_the_bytes_say(te: Any, debug_mode: Path, recipe: str) -> None:
    """Every operand, the input of fc2 and the gradient at fc1 too: amax, scale and counts equal the casts'."""
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, debug_mode / "run", every=1), spying(net) as seen:
        train(te, net, recipe)
    recorded = figures(debug_mode / "run")
    assert set(seen) == set(recorded) >= HIDDEN
    for key, casts in seen.items():
        assert recorded[key] == expected_of(casts, key[1], 2), key
    assert rows(debug_mode / "run", "select * from events where kind in ('error', 'gap')") == []


@pytest.mark.parametrize("power_of_2", [False, True])
def test_gradient_scales_are_those_of_the_bytes(te: Any, debug_mode: Path, power_of_2: bool) -> None:
    """Current scaling keeps no scale: the one recorded of each grad_output is, inverted, what its FP8 tensor holds."""
    net, recipe = te_nets.four_layers(te), te_nets.recipe("current_pow2" if power_of_2 else "current")
    with fp8dbg.attach(net, debug_mode / "run", every=1), spying(net) as seen:
        for step in range(3):
            with te_nets.autocast(te, recipe):
                y = net(te_nets.batch(step))
            y.float().pow(2).mean().backward()
            torch.optim.SGD(net.parameters(), lr=1e-2).step()
            net.zero_grad()
    query = "select layer, scale from tensors where tensor = 'grad_output' and recipe is not null order by step"
    found: dict[str, list[float]] = {}
    for row in rows(debug_mode / "run", query):
        found.setdefault(row["layer"], []).append(torch.tensor(row["scale"], dtype=torch.float32).reciprocal().item())
    held = {
        layer: [c.inner["_scale_inv"].item() for c in made]
        for (layer, role), made in seen.items()
        if role == "grad_output"
    }
    assert len(held) == 5
    assert found == held
    assert all((torch.tensor(made).log2() % 1 == 0).all() == power_of_2 for made in held.values())


def test_both_routes_agree_where_both_see_a_tensor(te: Any, tmp_path: Path) -> None:
    """Current scaling, whose norms are not fused with casts: the figures of both routes are equal, and the losses."""
    need("nvdlfw_inspect")
    results, recorded = [], []
    for route in ("default", "exact"):
        if route == "exact":
            nvidia_inspect.start(log_dir=tmp_path / "logs")
        net = te_nets.four_layers(te)
        with fp8dbg.attach(net, tmp_path / route, every=1):
            results.append(train(te, net, "current"))
        recorded.append(figures(tmp_path / route))
    nvidia_inspect.stop()
    assert all(map(torch.equal, *results))
    assert {key: value for key, value in recorded[1].items() if key not in HIDDEN} == recorded[0]


def test_every_gemm_is_compared_with_its_real_result(te: Any, debug_mode: Path) -> None:
    """fc1's and fc2's GEMMs and the dgrads behind norms have an unexplained error now, and it is rounding alone."""
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, debug_mode / "run", every=1):
        train(te, net, "current", spread=0.5)
    found = rows(debug_mode / "run", "select layer, gemm, error_unexplained as rest from gemms")
    layers = ("0", "1", "2.fc1", "2.fc2", "3")
    assert {(r["layer"], r["gemm"]) for r in found} == {(n, g) for n in layers for g in ("fprop", "dgrad", "wgrad")}
    assert [r for r in found if r["rest"] is None or r["rest"] > 0.004] == []


def test_only_measured_steps_run_in_debug_mode(te: Any, debug_mode: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every=3 the steps between compute as they do without debug mode; hidden operands have rows at 0 and 3."""
    net = te_nets.four_layers(te)
    answers = debugged(net[2], monkeypatch)
    with fp8dbg.attach(net, debug_mode / "run", every=3):
        train(te, net, "delayed", steps=5, microbatches=2)
    assert answers == [step in (0, 3) for step in range(5) for _ in range(2)]
    query = "select distinct step from tensors where layer = '2.fc2' and tensor = 'input' order by step"
    assert [row["step"] for row in rows(debug_mode / "run", query)] == [0, 3]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_nothing_twice(te: Any, debug_mode: Path, reentrant: bool) -> None:
    """One row per layer, operand and call under te.checkpoint of either kind, hidden operands too."""
    net = te_nets.four_layers(te)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return te.checkpoint(net, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    with fp8dbg.attach(net, debug_mode / "run", every=1), spying(net) as seen:
        train(te, net, "current", forward=forward)
    recorded = figures(debug_mode / "run")
    for key, casts in seen.items():
        assert recorded[key] == expected_of(casts, key[1], 2), key


def test_the_report_says_which_route_measured_what(te: Any, debug_mode: Path) -> None:
    """A warning that debug steps compute differently, and per layer what came over the exact route."""
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, debug_mode / "run", every=1):
        train(te, net, "current", steps=1)
    said = {r["layer"]: r["detail"] for r in rows(debug_mode / "run", "select * from events where kind = 'route'")}
    assert "do not compute exactly" in said[None]
    assert said["2.fc1"].startswith("Exact route: input, output, grad_output, grad_input, grad_weight.")
    assert said["0"] == "Both routes see the same tensors."
    from fp8dbg.analysis.summary import summarise

    notes = summarise(fp8dbg.open_run(debug_mode / "run")).coverage.notes
    assert any("do not compute exactly" in note for note in notes)


def test_without_a_session_debug_mode_stays_off(te: Any, debug_mode: Path) -> None:
    """The feature alone changes nothing: training is bit-identical to training before debug mode was started."""
    with_feature = train(te, te_nets.four_layers(te), "delayed")
    nvidia_inspect.stop()
    assert all(map(torch.equal, with_feature, train(te, te_nets.four_layers(te), "delayed")))


def test_a_fault_in_recording_does_not_reach_training(
    te: Any, debug_mode: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception inside the feature is an event of the layer; training ends as usual, without debug mode."""
    from fp8dbg.hooks import nvidia_inspect_tap

    def broken(_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(nvidia_inspect_tap, "amax_of", broken)
    net = te_nets.four_layers(te)
    with fp8dbg.attach(net, debug_mode / "run", every=1):
        train(te, net, "current", steps=2)
    events = rows(debug_mode / "run", "select distinct layer from events where kind = 'error'")
    assert {row["layer"] for row in events} == {"0", "1", "2.fc1", "3"}
    assert len(rows(debug_mode / "run", "select * from amax where layer = '0' and tensor = 'input'")) == 4


def test_a_configuration_of_ones_own_is_kept() -> None:
    """The feature joins each section, the other layers get one of their own, and no layer matches two."""
    theirs = {"mine": {"enabled": True, "layers": {"layer_types": ["fc1", "qkv"]}, "transformer_engine": {"X": {}}}}
    merged = nvidia_inspect.configuration(theirs)
    assert set(merged["mine"]["transformer_engine"]) == {"X", nvidia_inspect.FEATURE}
    import re

    others = re.compile(merged["fp8dbg_record"]["layers"]["layer_name_regex_pattern"])
    assert [bool(others.search(n)) for n in ("model.0.fc1", "model.0.fc2", "a.qkv", "a.proj")] == [False, True] * 2
    with pytest.raises(fp8dbg.errors.UsageError, match="layer_numbers"):
        nvidia_inspect.configuration({"a": {"enabled": True, "layers": {"layer_numbers": [1]}}})


def test_a_fallback_and_the_recording_share_debug_mode(
    te: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan written as debug YAML holds on measured steps and between them; its GEMM is not taken for an FP8 one."""
    need("nvdlfw_inspect")
    from fp8dbg.hooks.nvidia_te import write_fallback
    from tests.hosts.test_fallback_text import Entry, Plan

    plan = tmp_path / "plan.yaml"
    plan.write_text(write_fallback(Plan((Entry("0", ("wgrad",)),)), te_cpu.te_version()))
    nvidia_inspect.start(plan, tmp_path / "logs")
    net = te_nets.four_layers(te)
    import nvdlfw_inspect.api as debug_api

    debug_api.infer_and_assign_layer_names(net)
    planned, other = debugged(net[0], monkeypatch), debugged(net[3], monkeypatch)
    with fp8dbg.attach(net, tmp_path / "run", every=2):
        for _ in range(2):
            train(te, net, "current", steps=1, microbatches=1)
            debug_api.step()
    assert (planned, other) == ([True, True], [True, False])
    assert ("0", "input") in figures(tmp_path / "run")
    found = rows(tmp_path / "run", "select layer, gemm from gemms where layer in ('0', '3')")
    gemms = {(layer, gemm) for layer in ("0", "3") for gemm in ("fprop", "dgrad", "wgrad")}
    assert {(row["layer"], row["gemm"]) for row in found} == gemms - {("0", "wgrad")}
    nvidia_inspect.stop()
