"""torchao: float8 linear layers (tensorwise, rowwise, rowwise_with_gw_hp) and MXFP8 training layers.

torchao scales dynamically: no scale is stored anywhere, each cast computes its own from the tensor in front of it.
So the scales recorded are emulated, by torchao's formula, from the operands that the layer's hooks see. The one
exception is a weight that FSDP2 gathered in float8: it arrives cast, and its scale is read.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8dbg.hooks import Handle, Handles, attach_each
from fp8dbg.hooks.torchao_float8_fallback import CASTS, apply_fallback, torchtitan_flags, write_fallback
from fp8dbg.hooks.versions import tell_version, version_of
from fp8dbg.numerics.recipes import Recipe, recipe_named
from fp8dbg.recording.layer import Gradients, Layer, ScaleInForce

if TYPE_CHECKING:
    from fp8dbg.recording.recorder import Recorder

__all__ = ["HOST", "apply_fallback", "attach", "claims", "torchtitan_flags", "write_fallback"]

HOST = "torchao_float8"

_ROUNDINGS = {"rceil": "up", "floor": "floor", "ceil": "ceil", "even": "even"}


def _loaded(module: str, name: str) -> Any:
    """A class of the host, or None where nobody has imported it: then no module can be of it."""
    return getattr(sys.modules.get(module), name, None)


def _is_float8(module: nn.Module) -> bool:
    kind = _loaded("torchao.float8.float8_linear", "Float8Linear")
    return kind is not None and isinstance(module, kind)


def _mx_settings(module: nn.Module) -> Any:
    """What configures a module's MXFP8 GEMMs: the module itself, its weight's wrapper, or None."""
    kind = _loaded("torchao.prototype.moe_training.mxfp8_linear", "MXFP8Linear")
    if kind is not None and isinstance(module, kind):
        return module
    wrapper = _loaded("torchao.prototype.moe_training.tensor", "MXFP8TrainingWeightWrapperTensor")
    weight = module._parameters.get("weight")
    # A wrapped parameter stays an nn.Parameter: its type is the wrapper's, its data the plain weight.
    if wrapper is not None and isinstance(module, nn.Linear) and isinstance(weight, wrapper):
        return weight.config  # type: ignore[union-attr, unused-ignore] # the wrapper's own attribute
    return None


def claims(module: nn.Module) -> bool:
    """Whether the module is one of torchao's FP8 training layers. Imports nothing."""
    return _is_float8(module) or _mx_settings(module) is not None


def attach(model: nn.Module, recorder: Recorder) -> Handles:
    """Watch every torchao FP8 layer of the model; the handle undoes it."""

    def one(name: str, path: str, module: nn.Module) -> Handle:
        return recorder.hook((Float8Layer if _is_float8(module) else MxLayer)(name, module, path))

    handles = attach_each(model, recorder, claims, one)
    if handles:
        tell_version(recorder, "torchao", version_of("torchao"))
    return Handles(handles)


class Float8Layer(Layer):
    """One ``Float8Linear``: its recipe and the GEMMs it keeps in high precision, as its configuration says."""

    host = HOST
    as_given = True
    nodes = ("matmul_with_hp_or_float8_argsBackward",)

    def __init__(self, name: str, module: nn.Module, path: str = "") -> None:
        super().__init__(name, module, path)
        self._config: Any = None
        self._recipe: Recipe | None = None
        self._off: frozenset[str] = frozenset()

    @property
    def recipe(self) -> Recipe | None:
        """What the configuration says; a fallback that was applied to a live model shows here."""
        config: Any = self.module.config
        if config is not self._config:
            self._config, self._recipe = config, recipe_of(config)
            self._off = frozenset(gemm for gemm, casts in CASTS.items() if _is_off(getattr(config, casts[0])))
        return self._recipe

    def recipe_of(self, gemm: str) -> Recipe | None:
        """None for the GEMMs that the configuration keeps in high precision."""
        recipe = self.recipe
        return None if gemm in self._off else recipe

    def results(self, node: str, gradients: tuple[Tensor | None, ...]) -> Gradients:
        """The GEMM is given the weight transposed."""
        grad_input, turned = gradients[:2]
        return grad_input, None if turned is None else turned.t()

    def weight(self) -> Tensor | None:
        """The weight; one that FSDP2 gathered in float8 is there only as its FP8 values."""
        found = super().weight()
        if found is not None and hasattr(found, "_scale") and hasattr(found, "_data"):
            values: Tensor = found._data.float() / found._scale
            return values
        return getattr(found, "_tensor", found)

    def scale(self, role: str) -> ScaleInForce:
        """Live for a weight that arrived cast; nothing else stores one."""
        if role == "weight":
            found = self.module.__dict__.get("weight", self.module._parameters.get("weight"))
            scale = getattr(found, "_scale", None)
            if isinstance(scale, Tensor) and scale.numel() == 1:
                return scale, "live"
        return None, None


def _is_off(cast: Any) -> bool:
    return bool(cast.scaling_type.value == "disabled")


def recipe_of(config: Any) -> Recipe | None:
    """The recipe that a Float8LinearConfig follows, with its parameters; None if all its GEMMs are off."""
    casts = [getattr(config, name) for pair in CASTS.values() for name in pair]
    on = [cast for cast in casts if not _is_off(cast)]
    if not on:
        return None
    power_of_2 = bool(config.round_scales_to_power_of_2)
    if all(cast.scaling_granularity.value == "tensorwise" for cast in on):
        hybrid = config.cast_config_grad_output.target_dtype in (torch.float8_e5m2, torch.float8_e5m2fnuz)
        return recipe_named("tensorwise", power_of_2=power_of_2, hybrid=hybrid)
    weight = config.cast_config_weight_for_grad_input
    mixed = not _is_off(weight) and weight.scaling_granularity.value == "tensorwise"
    return recipe_named("rowwise_with_gw_hp" if mixed else "rowwise", power_of_2=power_of_2)


class MxLayer(Layer):
    """A linear layer whose GEMMs run in MXFP8: ``MXFP8Linear``, or an nn.Linear whose weight torchao has wrapped."""

    host = HOST
    as_given = True
    nodes = ("mx_mmBackward",)

    def __init__(self, name: str, module: nn.Module, path: str = "") -> None:
        super().__init__(name, module, path)
        settings = _mx_settings(module)
        rounding = _ROUNDINGS[settings.scale_calculation_mode.value]
        self._recipe = recipe_named("mxfp8", rounding=rounding)
        self._off = "wgrad" if settings.wgrad_with_hp else None

    @property
    def recipe(self) -> Recipe | None:
        """MXFP8, with torchao's choice of scales."""
        return self._recipe

    def recipe_of(self, gemm: str) -> Recipe | None:
        """None for wgrad where torchao keeps it in high precision."""
        return None if gemm == self._off else self._recipe

    def results(self, node: str, gradients: tuple[Tensor | None, ...]) -> Gradients:
        """The first two."""
        return gradients[0], gradients[1]

    def weight(self) -> Tensor | None:
        """The plain weight below torchao's wrapper."""
        found = super().weight()
        return getattr(found, "_data", found)
