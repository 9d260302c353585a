"""What goes wrong in silence: a table of traps of the host libraries, each with the facts by which it is recognised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Version = tuple[int, ...]


@dataclass(frozen=True)
class Machine:
    """What is known about where, and how, a training will run.

    Args:
        versions: installed packages and their versions; absent: not installed.
        variables: environment variables.
        capabilities: compute capability of each NVIDIA device; empty: there is none.
        cuda: version of CUDA that torch was built for; None: a build without.
        command: the command that starts the training, if it is known.
        fp8_units: whether any device multiplies in FP8.
    """

    versions: Mapping[str, Version] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    capabilities: Sequence[tuple[int, int]] = ()
    cuda: Version | None = None
    command: Sequence[str] = ()
    fp8_units: bool = False

    def has(self, package: str, least: Version = ()) -> bool:
        """Whether a package is installed, in this version or a later one."""
        return package in self.versions and self.versions[package] >= least

    def option(self, name: str) -> str | None:
        """The value of a command's option, "" for a mere flag, None where it is not given; --a b and --a=b alike."""
        for i, word in enumerate(self.command):
            if word == name:
                following = self.command[i + 1] if i + 1 < len(self.command) else ""
                return "" if following.startswith("--") else following
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        return None


@dataclass(frozen=True)
class Trap:
    """One trap.

    Attributes:
        name: short and stable, for programs.
        sprung: True where the facts show that it holds here; False where it is a thing to know of what is installed.
        detail: what happens, and what to do.
    """

    name: str
    sprung: bool
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def found(machine: Machine) -> list[Trap]:
    """The traps of this machine and command, those that are sprung first."""
    traps = [Trap(name, sprung, detail) for name, concerned, sprung, detail in _rules(machine) if concerned]
    return sorted(traps, key=lambda trap: not trap.sprung)


_Rule = tuple[str, bool, bool, str]
"""Name, whether it concerns this machine at all, whether it is sprung, and what is said."""


def _rules(m: Machine) -> list[_Rule]:
    te, megatron = m.has("transformer-engine"), m.has("megatron-core") or m.option("--fp8-format") is not None
    no_wgrad, asked = m.option("--no-fp8-wgrad") is not None, m.option("--fp8-format") is not None
    recipe = m.option("--fp8-recipe") or "delayed"
    local = m.option("--transformer-impl") == "local"
    ends = m.option("--first-last-layers-bf16") is not None
    compiled = m.has("transformer-engine", (2, 20))
    return [
        ("no_fp8_units", not m.fp8_units, True, _NO_UNITS),
        ("fp8_flag_ignored", asked and local, True, _LOCAL),
        ("no_fp8_wgrad_ignored", megatron and (no_wgrad or m.has("transformer-engine", (2,))), no_wgrad, _NO_WGRAD),
        ("fp8_interval_ignored", m.option("--fp8-interval") is not None, True, _INTERVAL),
        ("first_last_refused", asked and ends and recipe == "delayed", True, _FIRST_LAST),
        ("history_defaults", te or megatron, asked and recipe == "delayed" and not _history(m), _HISTORY),
        ("extra_state_refused", compiled, False, _EXTRA_STATE),
        ("no_compile_with_delayed", compiled, False, _NO_COMPILE),
        ("debug_changes_numerics", te and m.has("nvdlfw-inspect"), False, _DEBUG),
        *_of_variables(m),
        *_of_recipes(m, asked, recipe),
    ]


def _history(m: Machine) -> bool:
    return m.option("--fp8-amax-history-len") is not None


_NO_UNITS = (
    "No device here has FP8 units: Transformer Engine refuses FP8, torchao needs emulate=True. fp8dbg.simulate "
    "rehearses a recipe."
)
_LOCAL = (
    "--transformer-impl local builds Megatron's own linear layers, which run in BF16: --fp8-format changes none of "
    "them. Use transformer_engine."
)
_NO_WGRAD = (
    "Megatron's --no-fp8-wgrad does nothing with Transformer Engine 2: the recipe lost override_linear_precision and "
    "takes it in silence. fp8dbg recommend --for nvidia_te writes what keeps wgrad in BF16."
)
_INTERVAL = "Megatron ignores --fp8-interval: scales are updated on every microbatch."
_FIRST_LAST = (
    "--first-last-layers-bf16 is refused under delayed scaling, which is Megatron's recipe where --fp8-recipe is not "
    "given. Name another recipe, or the layers in --te-precision-config-file."
)
_HISTORY = (
    "Delayed scaling has two defaults: Transformer Engine's history is 1024 amaxes and their maximum, Megatron's and "
    "NeMo's 1, the most recent. The first holds a spike for 1024 updates, the second clips whenever values grow."
)
_EXTRA_STATE = (
    "load_state_dict of delayed scaling's state raises unless NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1; whoever leaves "
    "the state out instead resumes with scales of 1."
)
_NO_COMPILE = "Transformer Engine refuses delayed scaling under torch.compile: use another recipe there."
_DEBUG = (
    "Transformer Engine's debug mode (nvdlfw_inspect) turns fused kernels off where it looks, so the steps that it "
    "measures are not those that it does not."
)

VARIABLES: dict[str, tuple[Callable[[str], bool], str]] = {
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": (lambda v: v == "1", "current scaling uses powers of two"),
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": (lambda v: v == "1", "block scales are no powers of two"),
    "NVTE_BACKWARD_OVERRIDE": (lambda v: v not in ("", "None"), "the backward GEMMs use another precision"),
    "NVTE_UNFUSED_FP8_UPDATE": (lambda v: v == "1", "delayed scales are updated by other code: NaN reaches amax"),
    "NVTE_NVFP4_DISABLE_RHT": (lambda v: v == "1", "NVFP4 gradients are not rotated (Hadamard)"),
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": (lambda v: v == "1", "NVFP4 gradients are rounded to nearest"),
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": (lambda v: v == "1", "NVFP4 weights get scales along rows only"),
}
"""Variables that change what a recipe computes: for which values, and how."""


def _of_variables(m: Machine) -> list[_Rule]:
    said = {name: what for name, (changes, what) in VARIABLES.items() if changes(m.variables.get(name, ""))}
    return [
        (f"variable_{name}", name in m.variables, True, f"{name}={m.variables.get(name)}: {what}, and nothing says so.")
        for name, what in said.items()
    ]


@dataclass(frozen=True)
class Needs:
    """What a recipe of Transformer Engine needs: its version, a device from ``least`` to below ``below``, CUDA."""

    version: Version
    least: tuple[int, int]
    below: tuple[int, int] = (99, 0)
    cuda: Version = ()

    def missing(self, m: Machine, capability: tuple[int, int] | None) -> str:
        """What is missing, in words; "" where it runs."""
        if not m.has("transformer-engine"):
            return "needs Transformer Engine, which is not installed"
        if not m.has("transformer-engine", self.version):
            return f"needs Transformer Engine {_dotted(self.version)} or newer"
        if capability is None or capability < self.least:
            return f"needs compute capability {_dotted(self.least)}"
        if capability >= self.below:
            return f"is not there for compute capability {_dotted(capability)} yet"
        return f"needs CUDA {_dotted(self.cuda)} or newer" if (m.cuda or ()) < self.cuda else ""


RECIPES = {
    "delayed": Needs((1,), (8, 9)),
    "current": Needs((2, 2), (8, 9)),
    "block": Needs((2, 3), (9, 0), cuda=(12, 9)),
    "mxfp8": Needs((2, 1), (10, 0), below=(12, 0)),
    "nvfp4": Needs((2, 8), (10, 0)),
}
"""Transformer Engine's recipes, by fp8dbg's names; conditions as version 2.20 checks them."""

MEGATRON_RECIPES = {"delayed": "delayed", "tensorwise": "current", "blockwise": "block", "mxfp8": "mxfp8"}


def recipes(m: Machine) -> list[dict[str, Any]]:
    """Each recipe of Transformer Engine on the first device: whether it runs, and as what; empty without it."""
    if not m.has("transformer-engine"):
        return []
    capability = m.capabilities[0] if m.capabilities else None
    rows = []
    for name, needs in RECIPES.items():
        missing = needs.missing(m, capability)
        remark = missing or _variant(m, name)
        rows.append({"recipe": name, "runs": not missing, "default": name == default_recipe(m), "remark": remark})
    return rows


def default_recipe(m: Machine) -> str | None:
    """What an autocast without a recipe uses on the first device; None where there is no FP8."""
    capability = m.capabilities[0] if m.capabilities else None
    if not m.has("transformer-engine") or RECIPES["delayed"].missing(m, capability):
        return None
    if not RECIPES["mxfp8"].missing(m, capability):
        return "mxfp8"
    return "current" if capability is not None and capability >= (12, 0) else "delayed"


def _variant(m: Machine, recipe: str) -> str:
    """What variables make of a recipe."""
    of = {"current": "CURRENT", "block": "BLOCK", "nvfp4": "NVFP4", "delayed": "UNFUSED"}
    said = [
        what
        for name, (changes, what) in VARIABLES.items()
        if changes(m.variables.get(name, "")) and (of.get(recipe, "-") in name or "BACKWARD" in name)
    ]
    return "; ".join(said)


def _of_recipes(m: Machine, asked: bool, recipe: str) -> list[_Rule]:
    name = MEGATRON_RECIPES.get(recipe)
    if not asked or name is None:
        return []
    missing = RECIPES[name].missing(m, m.capabilities[0] if m.capabilities else None)
    return [("recipe_does_not_run", bool(missing), True, f"--fp8-recipe {recipe} will not run here: it {missing}.")]


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
