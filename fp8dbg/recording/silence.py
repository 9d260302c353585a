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
        if not silent:
            return None
        nothing = len(silent) == len(watches)
        gone = self._gone(silent)
        compiled = [layer for layer in silent if id(layer.module) in self._compiled and layer not in gone]
        told = []
        if compiled:
            told.append(_compiled_before(compiled[0], len(silent if nothing else compiled) - 1, nothing))
        elif nothing:
            who = f"any of the {len(silent)} layers" if len(silent) > 1 else silent[0].name
            told.append(f"No call of {who} was seen in {STEPS} steps: nothing is recorded.")
        if gone:
            told.append(_replaced(gone[0], len(gone) - 1))
        elif nothing and not compiled:
            told.append("Attach to the model that is trained, and before torch.compile.")
        return " ".join(told) or None

    def _gone(self, silent: Sequence[Layer]) -> list[Layer]:
        model = self._model()
        there = set() if model is None else {id(module) for module in model.modules()}
        return [layer for layer in silent if there and id(layer.module) not in there]


def _compiled_before(first: Layer, others: int, nothing: bool) -> str:
    return (
        f"No call of {first.name} was seen in {STEPS} steps{_others(', nor of', others)}: "
        f"{'nothing is recorded. The' if nothing else 'the'} model was compiled before fp8dbg was attached, and code "
        "that was compiled already calls no hooks. Attach first, or call torch._dynamo.reset() now."
    )


def _replaced(first: Layer, others: int) -> str:
    return (
        f"{first.name} is no longer a part of the model{_others(', nor are' if others > 1 else ', nor is', others)}: "
        f"replaced after fp8dbg was attached, and what took {'their' if others else 'its'} place is not recorded. "
        "Attach to the model as it is trained."
    )


def _others(begin: str, count: int) -> str:
    return f"{begin} {count} further layer{'s' if count > 1 else ''}" if count else ""


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
