"""Every emitted fallback is read by the host's own parser and picks exactly the planned layers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8dbg.hooks import huggingface_fallback, megatron_fallback, nemo_fallback, nvidia_te_fallback, plans
from fp8dbg.hooks import torchao_float8_fallback as torchao_fallback
from tests.hosts.conftest import need

ALL = ("fprop", "dgrad", "wgrad")
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
MEGATRON_LAYERS = [f"decoder.layers.{i}.{name}" for i in range(24) for name in LINEARS] + ["output_layer"]
ODD = 'a"b\'c\\d\ne\u2028f\x7f{g}*[h]?#: "x"'
"""A layer name with everything that could end a string, a comment, a pattern or a line."""


@dataclass(frozen=True)
class Entry:
    layer: str
    gemms: tuple[str, ...] = ALL
    recipe: str = "bf16"
    reason: str = "Underflow of 43 % of the non-zeros from step 120."


@dataclass(frozen=True)
class Plan:
    entries: tuple[Entry, ...]


PLAN = Plan(
    (
        Entry("decoder.layers.1.mlp.linear_fc2"),
        Entry("decoder.layers.3.mlp.linear_fc1", ("dgrad",)),
        Entry("decoder.layers.3.mlp.linear_fc1", ("wgrad",)),
        Entry("decoder.layers.20.self_attention.linear_qkv", ALL, "mxfp8"),
        Entry(ODD),
    )
)


def test_later_entries_for_a_gemm_hold() -> None:
    """by_layer merges entries of one layer, in the order of the GEMMs."""
    plan = Plan((Entry("a", ("wgrad",)), Entry("a", ("fprop",), "mxfp8"), Entry("a", ("wgrad",), "current")))
    assert plans.by_layer(plan) == {"a": {"fprop": "mxfp8", "wgrad": "current"}}


@pytest.mark.parametrize("text", ["plain", ODD, "\U0001f600", "", "\ttab"])
def test_quoted_strings_read_back(text: str) -> None:
    """YAML, JSON's superset of it, gives back the very string, and it stays on one line."""
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(plans.quoted(text)) == text
    assert len(plans.quoted(text).splitlines()) == 1


def test_a_comment_cannot_be_ended_by_a_name() -> None:
    """Every line of a comment starts with #, whatever the text, and no word is lost."""
    lines = plans.comment("word " * 60 + ODD)
    assert all(line.startswith("#") for line in lines)
    assert all(len(line.splitlines()) == 1 for line in lines)
    assert sum(line.count("word") for line in lines) == 60


# --- Transformer Engine's debug features


@pytest.fixture
def config_manager(te: Any, tmp_path: Path) -> Any:
    """nvdlfw_inspect's own configuration manager, and its registry of TE's features."""
    need("nvdlfw_inspect", "yaml")
    from nvdlfw_inspect.config_manager import ConfigManager
    from nvdlfw_inspect.logging import initialize_logger

    initialize_logger(str(tmp_path))
    yield ConfigManager
    ConfigManager.reset()


def load_te(config_manager: Any, te: Any, text: str, tmp_path: Path) -> None:
    """Load the text through nvdlfw_inspect, against the features that the installed TE really registers."""
    from types import SimpleNamespace

    features = Path(te.__file__).parents[1] / "debug" / "features"
    names = {_camel(path.stem) for path in features.glob("*.py")}
    path = tmp_path / "te.yaml"
    path.write_text(text)
    registry = {"transformer_engine": SimpleNamespace(features=names), "base": SimpleNamespace(features=set())}
    config_manager._load_config(str(path), registry)


def _camel(stem: str) -> str:
    words = {"fp8": "FP8", "gemm": "GEMM"}
    return "".join(words.get(word, word.capitalize()) for word in stem.split("_"))


def test_te_yaml_picks_exactly_the_planned_layers(
    te: Any, config_manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the 1-based names of infer_and_assign_layer_names, each planned layer gets its feature, no other does."""
    from tests.hosts.te_cpu import te_version

    monkeypatch.chdir(tmp_path)
    text = megatron_fallback.write_debug_features(PLAN, te_version())
    load_te(config_manager, te, text, tmp_path)
    whole, some = nvidia_te_fallback._features(te_version()) or ("", "")
    expected = {
        "decoder.layers.1.mlp.linear_fc2": {whole: {"enabled": True}},
        "decoder.layers.3.mlp.linear_fc1": {some: {"enabled": True, "gemms": ["dgrad", "wgrad"]}},
    }
    for layer in MEGATRON_LAYERS:
        number = layer.split(".")[2] if "layers." in layer else ""
        name = "model.module.module." + layer.replace(f"layers.{number}.", f"layers.{int(number or 0) + 1}.")
        assert config_manager.get_config_for_layer(name).get("transformer_engine", {}) == expected.get(layer, {}), name
    assert config_manager.get_config_for_layer("model." + ODD)["transformer_engine"] == {whole: {"enabled": True}}
    assert "no debug feature gives recipe mxfp8" in text


def test_te_yaml_uses_the_names_of_its_version() -> None:
    """The features were renamed in 2.13; before 2.4 there are none, and the text says so."""
    assert "DisableQuantizationGEMM:" in nvidia_te_fallback.write_fallback(PLAN, (2, 13))
    assert "DisableFP8GEMM:" in nvidia_te_fallback.write_fallback(PLAN, (2, 12))
    assert "has no debug features" in nvidia_te_fallback.write_fallback(PLAN, (2, 3))


def test_te_yaml_gives_current_scaling_inside_delayed() -> None:
    """PerTensorScaling for the two operands of the planned GEMM."""
    plan = Plan((Entry("a", ("dgrad",), "current"),))
    assert nvidia_te_fallback.features(plan, (2, 20)) == {
        "a": {"PerTensorScaling": {"enabled": True, "gemms": ["dgrad"], "tensors": ["gradient", "weight"]}}
    }


# --- Megatron-Core


def load_megatron(text: str, tmp_path: Path) -> Any:
    need("megatron.core", "yaml")
    from megatron.core.quantization.utils import load_quantization_recipe

    path = tmp_path / "precision.yaml"
    path.write_text(text)
    return load_quantization_recipe(str(path))


def megatron_config(recipe: Any, name: str) -> dict[str, Any] | None:
    from megatron.core.quantization.utils import get_quant_config_or_none

    found = get_quant_config_or_none(name, recipe)
    return None if found is None else found.config["training_recipe"]


def test_megatron_yaml_picks_exactly_the_planned_modules(te: Any, tmp_path: Path) -> None:
    """Megatron's own loader and matcher: {} for BF16 modules, the recipe for the other, nothing for the rest."""
    text = megatron_fallback.write_fallback(PLAN)
    recipe = load_megatron(text, tmp_path)
    expected = {
        "decoder.layers.1.mlp.linear_fc2": {},
        "decoder.layers.3.mlp.linear_fc1": {},
        "decoder.layers.20.self_attention.linear_qkv": {"fp8_quantization_recipe": "mxfp8", "fp8_format": "e4m3"},
        ODD: {},
    }
    for name in [*MEGATRON_LAYERS, ODD]:
        assert megatron_config(recipe, name) == expected.get(name), name
    assert "all three of its GEMMs go to bf16" in text.replace("\n#  ", "")


def test_megatron_yaml_takes_the_experts_of_a_module_together(te: Any, tmp_path: Path) -> None:
    """A grouped linear is one module of Megatron's: its experts' names match nothing there, its own does."""
    experts = "decoder.layers.1.mlp.experts.linear_fc2"
    plan = Plan((Entry(f"{experts}.gemm_3", ("dgrad",)), Entry(f"{experts}.gemm_0", ALL, "mxfp8"), Entry("a.gemm_1x")))
    text = megatron_fallback.write_fallback(plan)
    recipe = load_megatron(text, tmp_path)
    assert [matcher.pattern for matcher in recipe.matchers] == [experts, "a.gemm_1x"]
    assert megatron_config(recipe, experts) == {}
    said = text.replace("\n#  ", "")
    assert f"{experts}: gemm_3, gemm_0 planned; all its experts go together." in said
    assert "all three of its GEMMs go to bf16" in said


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (
            [("gemm_0", ALL, "mxfp8"), ("gemm_1", ALL, "current")],
            "They have one recipe, current; not given: mxfp8 for gemm_0.",
        ),
        (
            [("gemm_0", ALL, "bf16"), ("gemm_1", ALL, "current")],
            "They have one recipe, bf16; not given: current for gemm_1.",
        ),
        (
            [("gemm_0", ("fprop",), "mxfp8"), ("gemm_1", ("dgrad",), "current"), ("gemm_2", ALL, "mxfp8")],
            "They have one recipe, mxfp8; not given: current for gemm_1.",
        ),
        (
            [("gemm_0", ALL, "current"), ("gemm_1", ALL, "delayed")],
            "Not given: current for gemm_0, delayed for gemm_1.",
        ),
        ([("gemm_0", ALL, "mxfp8"), ("gemm_1", ("dgrad",), "mxfp8")], ""),
    ],
)
def test_megatron_text_names_the_experts_whose_recipe_is_not_given(
    entries: list[tuple[str, tuple[str, ...], str]], said: str
) -> None:
    """The experts of a grouped linear have one recipe: which it is, and who asked for another."""
    experts = "decoder.layers.1.mlp.experts.linear_fc2"
    plan = Plan(tuple(Entry(f"{experts}.{name}", gemms, recipe) for name, gemms, recipe in entries))
    text = megatron_fallback.write_fallback(plan).replace("\n#  ", "")
    together = f"{experts}: {', '.join(name for name, _, _ in entries)} planned; all its experts go together."
    assert f"{together} {said}".strip() + "\n" in text
    assert ("ot given" in text) is bool(said)


def test_megatron_recipes_are_ones_it_accepts(te: Any, tmp_path: Path) -> None:
    """Every recipe this file can name passes TEQuantizationParams' own check; delayed is refused in a sentence."""
    need("megatron.core")
    from tests.hosts import te_cpu

    te_cpu.install(also_for=("megatron",))
    from megatron.core.extensions.transformer_engine import TEQuantizationParams
    from megatron.core.quantization.utils import get_quant_config_or_none

    labels = ["bf16", "current", "tensorwise", "block", "mxfp8", "nvfp4"]
    plan = Plan(tuple(Entry(f"layer_{label}", ALL, label) for label in labels))
    recipe = load_megatron(megatron_fallback.write_fallback(plan), tmp_path)
    for label in labels:
        params = TEQuantizationParams.parse_from_config(get_quant_config_or_none(f"layer_{label}", recipe))
        chosen = params.training_recipe.fp8_quantization_recipe or params.training_recipe.fp4_quantization_recipe
        assert (chosen is None) == (label == "bf16")
    refused = megatron_fallback.write_fallback(Plan((Entry("a", ALL, "delayed"),)))
    assert "cannot name recipe delayed" in refused
    assert load_megatron(refused, tmp_path).matchers == []


def test_megatron_says_what_pipeline_stages_blur(te: Any, tmp_path: Path) -> None:
    """With two stages of 12 layers the pattern is the local one, and the other layer it hits is named."""
    text = megatron_fallback.write_fallback(Plan((Entry("decoder.layers.20.mlp.linear_fc2"),)), stages=(12, 12))
    recipe = load_megatron(text, tmp_path)
    assert [n for n in MEGATRON_LAYERS if megatron_config(recipe, n) == {}] == ["decoder.layers.8.mlp.linear_fc2"]
    assert "also matches decoder layer 8 on the other stages" in text.replace("\n#  ", "")


def test_megatron_flags_for_whole_layers_at_the_ends() -> None:
    """The first two and the last decoder layer, all four linears each, are also given as flags; one less is not."""
    ends = [name for name in MEGATRON_LAYERS if name.split(".")[2:3] and name.split(".")[2] in ("0", "1", "23")]
    text = megatron_fallback.write_fallback(Plan(tuple(map(Entry, ends))), model_layers=MEGATRON_LAYERS)
    assert "--num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 1" in text.replace("\n#  ", "")
    assert "--first-last" not in megatron_fallback.write_fallback(PLAN, model_layers=MEGATRON_LAYERS)


# --- NeMo and Megatron-Bridge


def test_nemo_python_carries_both_forms(
    te: Any, config_manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module runs; its YAML is Megatron's, its features dictionary is loaded by nvdlfw_inspect."""
    need("megatron.core")
    monkeypatch.chdir(tmp_path)
    from tests.hosts.te_cpu import te_version

    module: dict[str, Any] = {}
    exec(nemo_fallback.write_fallback(PLAN, te_version()), module)
    recipe = module["quant_recipe"]()
    assert [n for n in MEGATRON_LAYERS if megatron_config(recipe, n) == {}] == [
        "decoder.layers.1.mlp.linear_fc2",
        "decoder.layers.3.mlp.linear_fc1",
    ]
    for section in module["TE_FEATURES"].values():
        import yaml

        load_te(config_manager, te, yaml.safe_dump({"section": section}), tmp_path)
    gemms = config_manager.get_config_for_layer("model.module.decoder.layers.4.mlp.linear_fc1")["transformer_engine"]
    assert [config["gemms"] for config in gemms.values()] == [["dgrad", "wgrad"]]

    class Config:
        model: Any = type("Model", (), {})()

    assert module["configure_bridge"](Config()).model.quant_recipe.matchers


# --- torchao and Hugging Face


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))  # type: ignore[no-any-return]


def converted(text: str, recipe: str) -> nn.Module:
    """A three-block model through the ``convert`` of the emitted module, GEMMs emulated."""
    module: dict[str, Any] = {}
    exec(text, module)
    torch.manual_seed(0)
    return module["convert"](nn.Sequential(*[Block() for _ in range(3)]), recipe, emulate=True)  # type: ignore[no-any-return]


def exact_gemms(linear: nn.Module) -> set[str]:
    """The GEMMs of a layer whose results equal the high-precision ones bit for bit."""
    weight = linear.weight
    assert isinstance(weight, torch.Tensor)
    x = torch.randn(48, weight.shape[1], generator=torch.Generator().manual_seed(1), requires_grad=True)
    grad = torch.randn(48, weight.shape[0], generator=torch.Generator().manual_seed(2))
    y = linear(x)
    grad_input, grad_weight = torch.autograd.grad(y, (x, weight), grad)
    exact = {"fprop": x @ weight.t(), "dgrad": grad @ weight, "wgrad": grad.t() @ x}
    seen = {"fprop": y, "dgrad": grad_input, "wgrad": grad_weight}
    return {gemm for gemm, value in seen.items() if torch.equal(value, exact[gemm])}


@pytest.mark.parametrize("recipe", torchao_fallback.FLOAT8_RECIPES)
def test_torchao_python_converts_each_layer_as_planned(recipe: str) -> None:
    """For every set of GEMMs, exactly those of the planned layer are bit-identical to high precision."""
    need("torchao")
    own = {"wgrad"} if recipe == "rowwise_with_gw_hp" else set()
    for gemms in itertools.chain.from_iterable(itertools.combinations(ALL, n) for n in (1, 2, 3)):
        plan = Plan((Entry("1.down", gemms), Entry(ODD)))
        model = converted(torchao_fallback.write_fallback(plan, recipe), recipe)
        for name, linear in model.named_modules():
            if isinstance(linear, nn.Linear):
                expected = own | set(gemms) if name == "1.down" else own
                assert exact_gemms(linear) == expected, (name, gemms)


def test_torchao_python_gives_a_layer_another_recipe() -> None:
    """A layer planned as tensorwise in a rowwise run gets tensorwise casts, its neighbour keeps rowwise ones."""
    need("torchao")
    text = torchao_fallback.write_fallback(Plan((Entry("0.up", ALL, "tensorwise"), Entry("2.up", ALL, "mxfp8"))))
    layers = dict(converted(text, "rowwise").named_modules())
    granularities = {
        n: layers[n].config.cast_config_input.scaling_granularity.value for n in ("0.up", "0.down", "2.up")
    }
    assert granularities == {"0.up": "tensorwise", "0.down": "axiswise", "2.up": "axiswise"}
    assert "2.up: a Float8Linear has no recipe mxfp8" in text


def test_hugging_face_python_serves_accelerate_too() -> None:
    """The handler that Accelerate would use filters exactly the planned layers out."""
    need("torchao", "accelerate")
    module: dict[str, Any] = {}
    exec(huggingface_fallback.write_fallback(Plan((Entry("1.down"),))), module)
    handler = module["accelerate_handler"]()
    model = nn.Sequential(*[Block() for _ in range(3)])
    kept = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and not handler.module_filter_func(m, n)]
    assert kept == ["1.down"]
    assert handler.config.round_scales_to_power_of_2
