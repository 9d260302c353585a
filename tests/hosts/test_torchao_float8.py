"""torchao's float8 layers, recorded while they train, against the casts that torchao really made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8dbg
from fp8dbg.hooks import torchao_float8, torchao_float8_fallback
from tests.hosts.conftest import need
from tests.hosts.runs import Figures, figures, rows
from tests.hosts.test_fallback_text import Entry, Plan, exact_gemms

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
STEPS, MICROBATCHES = 3, 2


class Net(nn.Module):
    """Two float8 layers around a GELU; the second may be checkpointed."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.recompute)  # type: ignore[no-any-return]

    def block(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _torchao() -> None:
    need("torchao")


def float8(net: nn.Module, recipe: str, emulate: bool = True) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    return convert_to_float8_training(net, config=config)  # type: ignore[no-any-return]


def batch(index: int) -> Tensor:
    x = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(index)) * 3.0
    return (x * 10.0 ** torch.linspace(-4, 1, 64)).requires_grad_()


def train(net: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Losses of a few steps, two microbatches each, followed by the weights."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            x = batch(step * MICROBATCHES + microbatch).to(dtype)
            loss = net(x).float().pow(2).mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(p.detach().clone() for p in net.parameters())]


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[str, Tensor, Any, dict[str, Any]]]]:
    """id of a layer's linear_mm_config -> its casts: role, input, result, keywords."""
    from torchao.float8 import float8_linear

    real: Callable[..., Any] = float8_linear.hp_tensor_to_float8_dynamic
    seen: dict[int, list[tuple[str, Tensor, Any, dict[str, Any]]]] = {}

    def spy(dense: Tensor, dtype: torch.dtype, config: Any, **kwargs: Any) -> Any:
        made = real(dense, dtype, config, **kwargs)
        role = kwargs["gemm_input_role"].value
        seen.setdefault(id(config), []).append((role, dense.detach().clone(), made, kwargs))
        return made

    monkeypatch.setattr(float8_linear, "hp_tensor_to_float8_dynamic", spy)
    return seen


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensorwise_figures_are_those_of_the_bytes(
    tmp_path: Path, casts: dict[int, list[Any]], dtype: torch.dtype, emulate: bool
) -> None:
    """Every amax, scale, underflow, saturation and at_max equals the intercepted cast's, bit for bit."""
    net = float8(Net().to(dtype), "tensorwise", emulate)
    with fp8dbg.attach(net, tmp_path, every=1):
        train(net, dtype)
    recorded = figures(tmp_path)
    for name in ("up", "down"):
        made = casts[id(net.get_submodule(name).linear_mm_config)]
        assert len(made) == STEPS * MICROBATCHES * 6
        for role in ("input", "weight", "grad_output"):
            # Each operand is cast for two GEMMs, with one result; a weight is recorded once a step.
            expected = [_figures(dense, cast) for kind, dense, cast, _ in made if kind == role]
            every = 2 if role != "weight" else 2 * MICROBATCHES
            assert recorded[name, role] == expected[::every], (name, role)


def _figures(dense: Tensor, cast: Any) -> Figures:
    return Figures.of(dense, cast._data, cast._data.dtype, cast._scale)


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_rowwise_figures_are_those_of_the_bytes(
    tmp_path: Path, casts: dict[int, list[Any]], recipe: str, emulate: bool
) -> None:
    """Underflow equals that of the fprop and dgrad casts' bytes, the extreme scales theirs; wgrad is as configured."""
    net = float8(Net(), recipe, emulate)
    with fp8dbg.attach(net, tmp_path, every=1):
        train(net)
    for name in ("up", "down"):
        made = casts[id(net.get_submodule(name).linear_mm_config)]
        for role in ("input", "weight", "grad_output"):
            first = [(dense, cast) for kind, dense, cast, kw in made if kind == role and _along_contraction(kw, role)]
            step = 1 if role != "weight" else MICROBATCHES
            expected = [(_figures_of_rows(dense, cast)) for dense, cast in first[::step]]
            query = f"select underflow, saturated, scale_min, scale_max from tensors where layer = '{name}' and "
            query += f"tensor = '{role}' and what_if is null order by step, microbatch"
            assert [tuple(row.values()) for row in rows(tmp_path, query)] == expected, (name, role)
    gemms = {row["gemm"] for row in rows(tmp_path, "select distinct gemm from gemms")}
    assert gemms == ({"fprop", "dgrad"} if recipe == "rowwise_with_gw_hp" else {"fprop", "dgrad", "wgrad"})


def _along_contraction(keywords: dict[str, Any], role: str) -> bool:
    """The input's and the gradient's casts along features, the (transposed) weight's of fprop."""
    axis = keywords.get("axiswise_dim")
    return axis == (0 if role == "weight" else -1)


def _figures_of_rows(dense: Tensor, cast: Any) -> tuple[int, int, float, float]:
    figures_ = Figures.of(dense, cast._data, cast._data.dtype, None)
    beyond = (dense.float() * cast._scale).abs() > 464.0
    return figures_.underflow, int(beyond.sum()), float(cast._scale.min()), float(cast._scale.max())


def trains_alike(made: Callable[[], nn.Module], folder: Path) -> None:
    """Bare and watched: same losses and weights; one row of amax per layer, tensor and microbatch, and no event."""
    torch.manual_seed(0)
    bare = train(made())
    torch.manual_seed(0)
    net = made()
    with fp8dbg.attach(net, folder, every=1):
        watched = train(net)
    assert all(map(torch.equal, bare, watched))
    counts = rows(folder, "select layer, tensor, count(*) as n from amax group by all")
    assert len(counts) == 2 * 3
    assert {row["n"] for row in counts} == {STEPS * MICROBATCHES}
    assert rows(folder, "select * from events") == []


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("recompute", [None, True, False])
def test_training_is_bit_identical_and_each_call_is_one_row(
    tmp_path: Path, recipe: str, recompute: bool | None
) -> None:
    """Plain and under both kinds of checkpointing: same losses and weights, one row per layer, tensor, microbatch."""
    trains_alike(lambda: float8(Net(recompute), recipe), tmp_path)
    query = "select tensor, count(*) as n from tensors where what_if is null and recipe is not null group by tensor"
    assert {row["tensor"]: row["n"] for row in rows(tmp_path, query)} == {
        "input": 2 * STEPS * MICROBATCHES,
        "grad_output": 2 * STEPS * MICROBATCHES,
        "weight": 2 * STEPS,
    }


def test_the_scale_of_every_step_is_in_amax(tmp_path: Path) -> None:
    """Unsampled steps too: tensorwise scales are 448 / amax (57344 for gradients), as torchao's float64 division."""
    net = float8(Net(), "tensorwise")
    with fp8dbg.attach(net, tmp_path, every=0):
        train(net)
    found = rows(tmp_path, "select tensor, amax, scale from amax")
    assert len(found) == 2 * 3 * STEPS * MICROBATCHES
    for row in found:
        largest = 57344.0 if row["tensor"] == "grad_output" else 448.0
        assert row["scale"] == torch.tensor(largest / max(row["amax"], 1e-12), dtype=torch.float64).float().item()


def test_real_gemms_are_compared_with_the_shadow(tmp_path: Path) -> None:
    """Healthy float8 errors for all three GEMMs, and nothing unexplained beyond the rounding of the result."""
    net = float8(Net(), "tensorwise")
    with fp8dbg.attach(net, tmp_path, every=1, rows=64):
        train(net)
    found = rows(tmp_path, "select gemm, rel_l2, error_unexplained from gemms")
    assert {row["gemm"] for row in found} == {"fprop", "dgrad", "wgrad"}
    for row in found:
        assert 0.005 < row["rel_l2"] < 0.15
        assert row["error_unexplained"] < 1e-5


def test_mx_layers_are_recorded_with_torchaos_scales(tmp_path: Path) -> None:
    """MXFP8Linear, emulated: the recorded underflow and scales are those of the real MXTensors of fprop."""
    pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    for mode, label in (("RCEIL", "mxfp8"), ("FLOOR", "mxfp8:rounding=floor")):
        scale_mode = ScaleCalculationMode[mode]
        layer = MXFP8Linear(
            64,
            96,
            kernel_preference=KernelPreference.EMULATED,
            scale_calculation_mode=scale_mode,
            wgrad_with_hp=True,
            dtype=torch.bfloat16,
        )
        net, folder = nn.Sequential(layer), tmp_path / mode
        x = batch(0).to(torch.bfloat16).detach()
        with fp8dbg.attach(net, folder, every=1):
            net(x).float().pow(2).mean().backward()
            torch.optim.SGD(net.parameters(), lr=0.1).step()
        real = MXTensor.to_mx(x.reshape(-1, 64), torch.float8_e4m3fn, 32, scale_mode, KernelPreference.EMULATED)
        underflow = int(((x.reshape(-1, 64) != 0) & (real.qdata.view(torch.uint8) & 0x7F == 0)).sum())
        scale = 1.0 / real.scale.float()
        query = "select recipe, underflow, scale_min, scale_max from tensors where tensor = 'input' and what_if is null"
        assert [tuple(row.values()) for row in rows(folder, query)] == [
            (label, underflow, float(scale.min()), float(scale.max()))
        ]
        assert {row["gemm"] for row in rows(folder, "select gemm from gemms")} <= {"fprop", "dgrad"}


@pytest.mark.parametrize("recompute", [None, True, False])
def test_mx_training_is_bit_identical_and_each_call_is_one_row(tmp_path: Path, recompute: bool | None) -> None:
    """MXFP8Linear, plain and under both kinds of checkpointing."""
    pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    def mx(net: Net) -> Net:
        for name in ("up", "down"):
            linear = net.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            sizes = linear.in_features, linear.out_features
            made = MXFP8Linear(*sizes, bias=False, kernel_preference=KernelPreference.EMULATED)
            made.weight.data.copy_(linear.weight.data)
            net.add_module(name, made)
        return net

    trains_alike(lambda: mx(Net(recompute)), tmp_path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_plan_is_applied_to_a_live_model(tmp_path: Path, recipe: str) -> None:
    """Exactly the planned GEMMs become exact, the parameters stay the same objects, and the next rows say so."""
    net = float8(Net(), recipe)
    parameters = [id(p) for p in net.parameters()]
    said = fp8dbg.apply_fallback(net, Plan((Entry("up"), Entry("down", ("dgrad",)))))
    assert said == []
    assert [id(p) for p in net.parameters()] == parameters
    own = {"wgrad"} if recipe == "rowwise_with_gw_hp" else set()
    assert exact_gemms(_without_bias(net.get_submodule("up"))) == {"fprop", "dgrad", "wgrad"}
    assert exact_gemms(_without_bias(net.get_submodule("down"))) == {"dgrad"} | own
    layer = torchao_float8.Float8Layer("down", net.get_submodule("down"))
    assert layer.recipe_of("dgrad") is None
    assert layer.recipe is not None
    assert layer.recipe.name == recipe.replace("_with_gw_hp", "")


def _without_bias(linear: nn.Module) -> nn.Module:
    linear.register_parameter("bias", None)
    return linear


def test_applying_says_what_torchao_cannot_do() -> None:
    """Another format's recipe is refused in a sentence, an unknown layer with the list of layers."""
    net = float8(Net(), "rowwise")
    said = torchao_float8_fallback.apply_fallback(net, Plan((Entry("up", ("dgrad",), "mxfp8"),)))
    assert said == ["up: a Float8Linear has no recipe mxfp8, so dgrad left as before."]
    with pytest.raises(fp8dbg.errors.UnknownNameError, match="down, up"):
        torchao_float8_fallback.apply_fallback(net, Plan((Entry("nowhere"),)))
