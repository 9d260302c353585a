"""What a session waits for in vain: layers that nobody calls, and the end of a step that no optimizer brings."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fp8dbg.recording.names import named_layers

if TYPE_CHECKING:
    from torch import nn

    from fp8dbg.recording.layer import Layer
    from fp8dbg.recording.watch import Watch

STEPS = 3
"""Steps without a call before that is reported."""

REWRITTEN = 32
"""Writes into one weight within the first step before that is reported; one LBFGS step makes 25 at most by default."""


class Silence:
    """Counts a session's steps until it is time to ask who has been called.

    Whether code that was compiled earlier will serve this model, too, is known only when it runs: torch.compile keeps
    code by class, and reuses it for any model that passes its guards, none of which look at the hooks of modules.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._compiled: set[int] = set()
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._rewritten: Counter[int] = Counter()

    def look_at(self, model: nn.Module) -> None:
        """Note the model, and which modules there is compiled code for, before anything is called."""
        self._compiled, self._model = _with_code(model), weakref.ref(model)

    def rewritten(self, watch: Watch) -> str | None:
        """Somebody has written into a layer's weight within a step; what to say of it, once."""
        self._rewritten[watch.number] += 1
        if self._steps or self._rewritten[watch.number] != REWRITTEN or max(self._rewritten.values()) > REWRITTEN:
            return None
        return (
            f"The weight of {watch.layer.name} was written {REWRITTEN} times and no torch optimizer has stepped: all "
            "of it counts as one step. Call run.step() at the end of each step."
        )

    def after_step(self, watches: Sequence[Watch]) -> str | None:
        """What to say of layers without a call; None before the last step of ``STEPS``, and ever after."""
        self._steps += 1
        silent = [watch.layer for watch in watches if not watch.seen] if self._steps == STEPS else []
        compiled = [layer.name for layer in silent if id(layer.module) in self._compiled]
        if compiled:
            return (
                f"No call of {compiled[0]} was seen in {STEPS} steps, nor of {len(compiled) - 1} further layers: the "
                "model was compiled before fp8dbg was attached, and code that was compiled already calls no hooks. "
                "Attach first, or call torch._dynamo.reset() now."
            )
        gone = self._gone(silent)
        if gone:
            return (
                f"{gone[0]} is no longer a part of the model, nor are {len(gone) - 1} further layers: replaced after "
                "fp8dbg was attached, and what took their place is not recorded. Attach to the model as it is trained."
            )
        if silent and len(silent) == len(watches):
            return (
                f"No call of any of the {len(watches)} layers was seen in {STEPS} steps: nothing is recorded. Attach "
                "to the model that is trained, and before torch.compile."
            )
        return None

    def _gone(self, silent: Sequence[Layer]) -> list[str]:
        model = self._model() if silent else None
        there = set() if model is None else {id(module) for module in model.modules()}
        return [layer.name for layer in silent if there and id(layer.module) not in there]


def _with_code(model: nn.Module) -> set[int]:
    """The modules in those parts of the model that torch.compile was applied to and has compiled something of."""
    if "torch._dynamo" not in sys.modules:
        return set()
    marked = [module for _, _, module in named_layers(model) if _to_compile(module)]
    return {id(part) for module in marked if any(map(_has_code, module.modules())) for part in module.modules()}


def _to_compile(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _has_code(module: nn.Module) -> bool:
    """Whether there is compiled code for the forward of the module's class; True where this torch does not tell."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    entries: Any = getattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
    return code is not None and (entries is None or bool(entries(code)))
