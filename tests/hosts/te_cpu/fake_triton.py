"""An absent triton that can still be imported: Transformer Engine decorates triton kernels when it is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MODULES = ("triton", "triton.language", "triton.language.core", "triton.language.standard", "triton.language.math")

# These look for triton when they are first imported and must find it absent, as it is.
_ASK_FOR_TRITON = (
    "torch._dynamo",
    "torch._inductor.runtime.hints",
    "torch._inductor.runtime.triton_compat",
    "torch._functorch.aot_autograd",
)


class _Anything(types.ModuleType):
    """Every attribute, item and call is itself; as a decorator it returns the function."""

    __version__ = "3.4.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_decorator = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if is_decorator else self

    def __getitem__(self, index: Any) -> Any:
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()


@contextmanager
def importable() -> Iterator[None]:
    """Inside, ``import triton`` works; a real triton is left alone; afterwards the pretence is gone again."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    for name in _ASK_FOR_TRITON:
        importlib.import_module(name)
    sys.modules.update({name: _Anything(name) for name in _MODULES})
    try:
        yield
    finally:
        for name in _MODULES:
            sys.modules.pop(name, None)
