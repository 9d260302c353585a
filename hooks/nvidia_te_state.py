"""Where Transformer Engine keeps what is in force: recipes, scales, slots; one table per difference between versions.

Read in versions 1.9 to 2.20. Nothing here imports Transformer Engine: the objects come from modules already built.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8dbg.errors import UsageError
from fp8dbg.hooks.nvidia_te_fuser import basic_linear
from fp8dbg.hooks.versions import version_of
from fp8dbg.numerics.recipes import Recipe, recipe_named
from fp8dbg.recording.layer import ScaleInForce

KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")

OPERATION = "BasicLinear"
"""The kind of a linear of ``te.ops``."""


class Slots(NamedTuple):
    """Where a GEMM layer's operands are among its module's quantizers."""

    input: int
    weight: int
    grad_output: int


LINEAR, FC1, FC2 = Slots(0, 1, 0), Slots(0, 1, 0), Slots(3, 4, 2)

_DIRECTIONS = {"input": "scaling_fwd", "weight": "scaling_fwd", "grad_output": "scaling_bwd"}


def kind_of(module: nn.Module) -> str | None:
    """Which of Transformer Engine's GEMM modules this is (Megatron's are subclasses), or None. Imports nothing."""
    te = sys.modules.get("transformer_engine.pytorch")
    if te is None:
        return None
    if basic_linear(module) is not None:
        return OPERATION
    return next((name for name in KINDS if isinstance(module, getattr(te, name, ()))), None)


def layer_names(name: str, module: nn.Module) -> tuple[str, ...]:
    """Names of the GEMM layers of a module, as Transformer Engine's debug mode calls them."""
    kind = kind_of(module)
    if kind == "LayerNormMLP":
        return f"{name}.fc1", f"{name}.fc2"
    if kind == "GroupedLinear":
        gemms: Any = module.num_gemms
        return tuple(f"{name}.gemm_{i}" for i in range(gemms))
    return (name,)


def grouped_slots(index: int, gemms: int, version: tuple[int, int]) -> Slots:
    """Slots of one GEMM of a GroupedLinear: side by side by kind up to 2.3, interleaved from 2.4 on."""
    if version < (2, 4):
        return Slots(index, gemms + index, index)
    return Slots(3 * index, 3 * index + 1, 2 * index)


def te_version() -> tuple[int, int]:
    """Major and minor version of the installed Transformer Engine; (0, 0) if its version cannot be told."""
    return version_of("transformer_engine", "transformer-engine")


def has_run(module: nn.Module) -> bool:
    """Whether the module has had a forward: what it will do is decided in each."""
    return getattr(module, "activation_dtype", None) is not None


def in_fp8(module: nn.Module) -> bool:
    """Whether the module's last forward ran in FP8: calibration and a disabled autocast do not."""
    operations: Any = module.__dict__.get("_fp8_metas")
    return bool(operations) or bool(getattr(module, "fp8", False))


def meta_of(module: nn.Module, role: str) -> Any:
    """What the module keeps for a role's casts: a dictionary; operations of ``te.ops`` have one a direction."""
    if "_fp8_metas" in module.__dict__:
        metas: Any = module._fp8_metas or {}
        return metas.get("backward" if role == "grad_output" else "forward") or {}
    return module.fp8_meta


def recompute_phase() -> bool:
    """Whether Transformer Engine's own checkpointing is running a forward for the second time."""
    distributed = sys.modules.get("transformer_engine.pytorch.distributed")
    asked = getattr(distributed, "in_fp8_activation_recompute_phase", None)
    return bool(asked()) if asked is not None else False


def recipe_of(theirs: Any) -> Recipe:
    """fp8dbg's recipe for one of Transformer Engine's.

    Raises:
        UsageError: one (a custom one) that fp8dbg has no formulas for.
    """
    kinds = type(theirs).__mro__  # Megatron derives its own
    convert = next((_RECIPES[kind.__name__] for kind in kinds if kind.__name__ in _RECIPES), None)
    if convert is None:
        raise UsageError(f"Transformer Engine recipe {type(theirs).__name__} is not known.", "Its layers are left out.")
    return convert(theirs)


def _hybrid(theirs: Any) -> bool:
    return bool(theirs.fp8_format.name == "HYBRID")


def _delayed(theirs: Any) -> Recipe:
    algorithm = theirs.amax_compute_algo if isinstance(theirs.amax_compute_algo, str) else "max"
    history, margin = int(theirs.amax_history_len), int(theirs.margin)
    return recipe_named("delayed", history=history, algorithm=algorithm, margin=margin, hybrid=_hybrid(theirs))


def _current(theirs: Any) -> Recipe:
    cast = theirs.fp8_quant_fwd_inp
    epsilon = float(cast.amax_epsilon)
    return recipe_named("current", power_of_2=bool(cast.power_2_scale), amax_epsilon=epsilon, hybrid=_hybrid(theirs))


def _block(theirs: Any) -> Recipe:
    cast = theirs.fp8_quant_fwd_inp
    epsilon = float(cast.amax_epsilon)
    return recipe_named("block", power_of_2=bool(cast.power_2_scale), amax_epsilon=epsilon, hybrid=_hybrid(theirs))


def _mxfp8(theirs: Any) -> Recipe:
    return recipe_named("mxfp8", hybrid=_hybrid(theirs))


def _nvfp4(theirs: Any) -> Recipe:
    return recipe_named("nvfp4")


_BEYOND_NVFP4 = {
    "disable_2d_quantization": "weights in blocks of 16 x 16, which lose more than the blocks of 16 measured here",
    "disable_stochastic_rounding": "gradients rounded stochastically, measured here as rounded to nearest",
    "disable_rht": "random Hadamard transforms of what wgrad reads, which its shadow here leaves out",
}
_BEYOND_PLAIN_NVFP4 = {
    "row_scaled_activation": "one scale a row for activations, measured here with one a tensor",
    "nvfp4_4over6": "a choice between 4 and 6 as the largest of a block, measured here with 6",
}


def left_out(theirs: Any) -> str | None:
    """What one of Transformer Engine's recipes does that the measured casts do not, in a sentence; None: nothing."""
    if not any(kind.__name__ == "NVFP4BlockScaling" for kind in type(theirs).__mro__):
        return None
    found = [said for name, said in _BEYOND_NVFP4.items() if not getattr(theirs, name, True)]
    found += [
        said for name, said in _BEYOND_PLAIN_NVFP4.items() if getattr(theirs, name, None) not in (None, False, "none")
    ]
    return f"The run's NVFP4 recipe has {'; '.join(found)}." if found else None


_RECIPES = {
    "DelayedScaling": _delayed,
    "Float8CurrentScaling": _current,
    "Float8BlockScaling": _block,
    "MXFP8BlockScaling": _mxfp8,
    "NVFP4BlockScaling": _nvfp4,
}


def state_of(module: nn.Module, role: str) -> Any:
    """The delayed-scaling state that holds a role's scale (``scale``, ``amax_history``), or None."""
    state = meta_of(module, role).get(_DIRECTIONS[role])
    return state if isinstance(getattr(state, "scale", None), Tensor) else None


def live_scale(module: nn.Module, role: str, slot: int) -> ScaleInForce:
    """A role's scale as it is now: under delayed scaling, before the update, the one that is in force.

    On a CPU a number; on a device a copy that waits there. It is "initial" while it is the 1.0 that a state is born
    with, which can be told without waiting for the device only on a CPU.
    """
    state = state_of(module, role)
    if state is None:
        return None, None
    if not state.scale.is_cpu:
        return state.scale[slot].clone(), "live"
    value: float = state.scale.tolist()[slot]  # a handful: a fifth of the time that indexing takes
    born = value == 1.0 and not state.amax_history[1:, slot].any()
    return value, "initial" if born else "live"


def scale_of_copy(found: ScaleInForce, copy: Any) -> ScaleInForce:
    """The scale of a weight's FP8 copy: the one found, unless the copy was made under another before.

    Delayed scaling moves on after each microbatch, while the copy stays as its first one has cast it.
    """
    (scale, _), inverse = found, getattr(copy, "_scale_inv", None)
    if scale is None or not isinstance(inverse, Tensor) or inverse.numel() != 1:
        return found
    inverse = inverse.detach().float().reshape(())
    if isinstance(scale, Tensor):
        return torch.where(scale.float().reciprocal() == inverse, scale, inverse.reciprocal()), "live"
    if torch.tensor(scale, dtype=torch.float32).reciprocal().item() == inverse.item():
        return found
    return inverse.reciprocal().item(), "live"
