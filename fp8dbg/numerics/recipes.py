"""Recipes: which format and which scale each operand of each GEMM gets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8dbg.errors import UnknownNameError, UsageError
from fp8dbg.numerics import scales
from fp8dbg.numerics.delayed import DelayedState
from fp8dbg.numerics.formats import Format, format_named

__all__ = ["GEMMS", "ROLES", "DelayedState", "Parameter", "Recipe", "parse_recipe", "recipe_named", "recipe_names"]

Parameter = bool | int | float | str

ROLES = ("input", "weight", "grad_output")
GEMMS = ("fprop", "dgrad", "wgrad")

_LIMITS = {"history": (1.0, 2.0**20), "margin": (-64.0, 64.0), "amax_epsilon": (0.0, math.inf)}
_CHOICES = {"algorithm": ("max", "most_recent"), "rounding": scales.ROUNDINGS}
_TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_TENSOR = dict.fromkeys(ROLES, "tensor")
_ROW = dict.fromkeys(ROLES, "row")


@dataclass(frozen=True)
class _Kind:
    """What a recipe's name fixes: parameters with their defaults, granularity per role, forward format, GEMMs."""

    defaults: dict[str, Parameter] = field(default_factory=dict)
    granularity: dict[str, str] = field(default_factory=lambda: _TENSOR)
    forward: str = "e4m3"
    backward: str = "e4m3"
    gemms: tuple[str, ...] = GEMMS


_DELAYED: dict[str, Parameter] = {"history": 1024, "algorithm": "max", "margin": 0, "hybrid": True}
_CURRENT: dict[str, Parameter] = {"power_of_2": False, "amax_epsilon": 0.0, "hybrid": True}
_KINDS: dict[str, _Kind] = {
    "delayed": _Kind(_DELAYED),
    "current": _Kind(_CURRENT),
    "current_pow2": _Kind({**_CURRENT, "power_of_2": True}),
    "tensorwise": _Kind({"power_of_2": False, "hybrid": True}),
    "rowwise": _Kind({"power_of_2": True}, _ROW),
    "rowwise_with_gw_hp": _Kind({"power_of_2": True}, _ROW, gemms=("fprop", "dgrad")),
    "block": _Kind(
        {"power_of_2": True, "amax_epsilon": 0.0, "hybrid": False},
        {"input": "1x128", "weight": "128x128", "grad_output": "1x128"},
    ),
    "mxfp8": _Kind({"rounding": "up", "hybrid": False}, dict.fromkeys(ROLES, "1x32")),
    "nvfp4": _Kind({}, dict.fromkeys(ROLES, "1x16"), "e2m1", "e2m1"),
    "int8": _Kind({}, {**_TENSOR, "weight": "row"}, "int8", "bf16", ("fprop",)),
    "unscaled": _Kind({"hybrid": True}),
    "bf16": _Kind({}, _TENSOR, "bf16", "bf16", ()),
}


@dataclass(frozen=True)
class Recipe:
    """One recipe with all its parameters; made by ``recipe_named``.

    | name | what it follows |
    |---|---|
    | delayed | Transformer Engine DelayedScaling: history, algorithm (max, most_recent), margin, hybrid |
    | current, current_pow2 | Transformer Engine Float8CurrentScaling: power_of_2, amax_epsilon, hybrid |
    | tensorwise, rowwise, rowwise_with_gw_hp | torchao float8: power_of_2; the last keeps wgrad in BF16 |
    | block | Transformer Engine Float8BlockScaling and DeepSeek-V3: 1x128 and, for weights, 128x128 |
    | mxfp8 | MXFP8: 1x32 and E8M0 scales; rounding (up, floor, ceil, even) |
    | nvfp4 | NVFP4: 1x16 blocks of E2M1 with E4M3 scales under a float32 tensor scale |
    | int8 | W8A8 inference: input per tensor, weight per row, both symmetric; only fprop is quantised |
    | unscaled | a cast with scale 1 |
    | bf16 | no quantisation |

    ``hybrid``: E5M2 for grad_output, E4M3 for the rest; otherwise E4M3 for all.
    """

    name: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.label)

    def __str__(self) -> str:
        return self.label

    @property
    def label(self) -> str:
        """The name with the parameters that are not at their defaults; ``recipe_named`` reads it back."""
        defaults = _KINDS[self.name].defaults
        changed = [f"{k}={_text(v)}" for k, v in self.parameters.items() if v != defaults[k]]
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    @property
    def formats(self) -> dict[str, str]:
        """Name of the format of each operand role."""
        kind = _KINDS[self.name]
        backward = "e5m2" if self.parameters.get("hybrid") else kind.backward
        return {"input": kind.forward, "weight": kind.forward, "grad_output": backward}

    def format(self, role: str) -> Format:
        """The format that operands of this role are cast to."""
        return format_named(self.formats[_checked_role(role)])

    def granularity(self, role: str, gemm: str = "fprop") -> str:
        """Elements that share a scale in this GEMM: tensor, row, 1x128, 128x128, 1x32 or 1x16.

        torchao's rowwise_with_gw_hp scales the weight per tensor in dgrad.
        """
        if (self.name, role, gemm) == ("rowwise_with_gw_hp", "weight", "dgrad"):
            return "tensor"
        return _KINDS[self.name].granularity[_checked_role(role)]

    def quantises(self, gemm: str) -> bool:
        """Whether the recipe runs this GEMM on quantised operands."""
        if gemm not in GEMMS:
            raise UnknownNameError("GEMM", gemm, list(GEMMS))
        return gemm in _KINDS[self.name].gemms

    def scales(self, amax: npt.ArrayLike, role: str, fmt: Format | None = None) -> scales.Float32Array:
        """One float32 scale per amax (float32, any shape), as this recipe's library would choose it from that amax.

        ``fmt`` replaces the role's own format (an FNUZ twin, say). Delayed scaling answers as current scaling with the
        same format and margin would: the scale it is chasing. NVFP4 answers with its tensor scale. Unscaled answers 1,
        and so does whatever is cast to BF16.
        """
        fmt, p = fmt or self.format(role), self.parameters
        if self.name == "unscaled" or fmt.name == "bf16":
            return np.ones_like(np.asarray(amax, dtype=np.float32))
        if self.name in ("current", "current_pow2", "block"):
            value_for_inf = scales.BF16_MAX if self.name == "block" else scales.FLT_MAX
            power_of_2, epsilon = bool(p["power_of_2"]), float(p["amax_epsilon"])
            return scales.te_current_scale(amax, fmt.max, power_of_2, epsilon, value_for_inf)
        if self.name in _TORCHAO:
            return scales.torchao_scale(amax, fmt.max, bool(p["power_of_2"]))
        if self.name == "mxfp8":
            return scales.e8m0_reciprocal(scales.e8m0_exponent(amax, fmt, str(p["rounding"])))
        if self.name == "nvfp4":
            return scales.nvfp4_tensor_scale(amax)
        return scales.te_current_scale(amax, float(self.scaled_max(role, fmt)))  # delayed, int8

    def current_scale(self, amax: float, role: str, fmt: Format | None = None) -> float:
        """``scales`` for one amax. May be 0, Inf or NaN where the library's own would be."""
        with np.errstate(over="ignore"):
            return float(self.scales(np.float32(amax), role, fmt))

    def scaled_max(self, role: str, fmt: Format | None = None) -> np.float32:
        """The format's maximum times 2^-margin, in float32: what amax is mapped to."""
        margin = float(self.parameters.get("margin", 0))
        return np.float32((fmt or self.format(role)).max) * np.float32(2.0**-margin)

    @property
    def lets_nan_in(self) -> bool:
        """Whether a NaN makes the amax NaN, as torchao's ``torch.max`` does; an fmax leaves it out."""
        return self.name in _TORCHAO

    def amax_seen(self, amax: float | None, nan: int, inf: int) -> float:
        """The amax that the library's own reduction would hand on, from the finite amax and the counts.

        Inf wherever there is one; NaN only in torchao (``torch.max`` lets it through, ``fmaxf`` does not); 0 where
        nothing else is there.
        """
        if nan and self.lets_nan_in:
            return math.nan
        return math.inf if inf else amax or 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for run.json; ``from_dict`` reads it back."""
        return {"name": self.name, "parameters": dict(self.parameters)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """A recipe from ``to_dict``'s data; names and values are checked."""
        return recipe_named(str(data["name"]), **data.get("parameters", {}))


def recipe_named(recipe: str | Recipe, **parameters: Parameter) -> Recipe:
    """The recipe of that name, e.g. ``recipe_named("delayed", history=16)`` or ``"delayed:history=16,hybrid=false"``.

    A Recipe is returned as it is, with the parameters given replaced. Parameters not given take their library's
    defaults. Unknown names, parameters and values raise a UsageError that lists the valid ones.
    """
    text = recipe.label if isinstance(recipe, Recipe) else recipe
    if not isinstance(text, str):
        raise UsageError(f"{text!r:.100} names no recipe.", f"Give a text: {', '.join(_KINDS)}.")
    name, _, rest = text.partition(":")
    if name not in _KINDS:
        raise UnknownNameError("recipe", name, list(_KINDS))
    typed = (item.partition("=") for item in rest.split(",") if item)
    given = {**{key.strip(): value.strip() for key, _, value in typed}, **parameters}
    defaults = _KINDS[name].defaults
    for key in given:
        if key not in defaults:
            raise UnknownNameError(f"parameter of recipe {name}", key, list(defaults))
    return Recipe(name, {k: _checked(name, k, given.get(k, v), v) for k, v in defaults.items()})


def parse_recipe(text: str) -> Recipe:
    """A recipe from its label, as typed on a command line."""
    return recipe_named(text)


def recipe_names() -> list[str]:
    """The names that ``recipe_named`` knows."""
    return list(_KINDS)


def _checked_role(role: str) -> str:
    if role not in ROLES:
        raise UnknownNameError("operand role", role, list(ROLES))
    return role


def _text(value: Parameter) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _checked(recipe: str, key: str, value: Parameter, default: Parameter) -> Parameter:
    """The value in its default's type, or a UsageError that says what is allowed."""
    wrong = UsageError(f"Recipe {recipe} does not take {key}={value!r:.100}.", f"Give {_allowed(key, default)}.")
    if isinstance(default, bool):
        text = str(value).lower()
        if text not in ("true", "false", "1", "0"):
            raise wrong
        return text in ("true", "1")
    if isinstance(default, str):
        if not isinstance(value, str) or value not in _CHOICES[key]:
            raise wrong
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise wrong from None
    if not math.isfinite(number) or not _LIMITS[key][0] <= number <= _LIMITS[key][1]:
        raise wrong
    if isinstance(default, float):
        return number
    if number != int(number):
        raise wrong
    return int(number)


def _allowed(key: str, default: Parameter) -> str:
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, str):
        return " or ".join(_CHOICES[key])
    return {"history": "a whole number from 1 to 1048576", "margin": "a whole number from -64 to 64"}.get(
        key, "a number from 0 up"
    )
