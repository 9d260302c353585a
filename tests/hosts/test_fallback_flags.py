"""Command-line flags of an emitted fallback, read by torchtitan's own parser, and held against Megatron's options."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from fp8dbg.hooks import megatron_fallback
from fp8dbg.hooks import torchao_float8_fallback as torchao_fallback
from tests.hosts.conftest import need
from tests.hosts.test_fallback_text import MEGATRON_LAYERS, Entry, Plan


def test_torchtitan_flags_name_whole_layers_only() -> None:
    """Whole layers go into filter_fqns; a layer planned by GEMM is said to be beyond it."""
    flags = torchao_fallback.torchtitan_flags(Plan((Entry("layers.0.w2"), Entry("layers.1.w2", ("dgrad",)))))
    assert '--quantize.linear.float8.filter_fqns="layers.0.w2"' in flags
    assert "layers.1.w2: torchtitan's flags keep whole layers only" in flags


@pytest.fixture
def torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan's configuration and filter alone: the package itself imports kernels written in Triton."""
    need("tyro")
    folder = next(
        (Path(p) / "torchtitan" for p in sys.path if (Path(p) / "torchtitan/config/manager.py").exists()), None
    )
    if folder is None:
        pytest.skip("torchtitan not installed: pip install --no-deps torchtitan==0.2.2")
    for name in ("torchtitan", "torchtitan.components", "torchtitan.components.quantization"):
        package = ModuleType(name)
        package.__path__ = [str(folder.parent.joinpath(*name.split(".")))]
        monkeypatch.setitem(sys.modules, name, package)


def test_torchtitan_parses_its_flags_and_filters_the_planned_layers(torchtitan: None) -> None:
    """torchtitan 0.2.2's own parser reads the flags, and its own filter leaves exactly the planned layers out."""
    manager: Any = importlib.import_module("torchtitan.config.manager")
    utils: Any = importlib.import_module("torchtitan.components.quantization.utils")
    planned = {"layers.0.feed_forward.w2", "output"}
    for recipe in torchao_fallback.FLOAT8_RECIPES:
        flags = torchao_fallback.torchtitan_flags(Plan(tuple(Entry(layer) for layer in sorted(planned))), recipe)
        config = manager.ConfigManager().parse_args(shlex.split(flags, comments=True))
        assert config.model.converters == ["quantize.linear.float8"]
        assert config.quantize.linear.float8.recipe_name == recipe
        layers = {*planned, "layers.0.feed_forward.w1", "layers.1.feed_forward.w2", "layers.0.attention.wo"}
        names = config.quantize.linear.float8.filter_fqns
        kept = {name for name in layers if not utils.module_filter_fn(nn.Linear(16, 16), name, names)}
        assert kept == planned


def test_torchtitan_without_flags_is_told_what_to_write() -> None:
    """0.3 takes a converter's configuration in Python, and has no tensorwise recipe."""
    plan = Plan((Entry("output"),))
    flags = " ".join(torchao_fallback.torchtitan_flags(plan, "rowwise").replace("\n#", "").split())
    assert "Float8LinearConverter.Config(recipe_name='rowwise', filter_fqns=['output'])" in flags
    assert "no recipe tensorwise" in torchao_fallback.torchtitan_flags(plan, "tensorwise")


def test_megatron_derives_the_flags_from_its_own_configuration(te: Any) -> None:
    """Megatron-LM makes an option of each field of the configuration: those of the end layers are among them.

    Its parser is not in the wheel. Read in Megatron-LM's megatron/training/arguments.py, where older versions spell
    these three options out, and where --te-precision-config-file is an option of its own.
    """
    need("megatron.core")
    from megatron.core.transformer.transformer_config import TransformerConfig

    layers = {name for name in MEGATRON_LAYERS if ".layers.0." in name}
    text = megatron_fallback.write_fallback(Plan(tuple(map(Entry, sorted(layers)))), model_layers=MEGATRON_LAYERS)
    said = " ".join(line.removeprefix("#") for line in text.splitlines())
    flags = re.findall(r"--[a-z0-9-]+", said[said.index("--first-last-layers-bf16") :])
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert len(flags) == 3
    assert {flag.removeprefix("--").replace("-", "_") for flag in flags} <= fields
