"""What a caller may give: arguments of the wrong kind are refused in a sentence, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fp8dbg.errors import UsageError
from fp8dbg.text import in_unicode

__all__ = ["a_module", "texts", "whole"]


def a_module(model: object) -> nn.Module:
    """The model.

    Raises:
        UsageError: it is no module, or a class of modules.
    """
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UsageError(f"The model is {what:.200}, not a torch.nn.Module.", "Give the module that is trained.")
    return model


def whole(name: str, value: object, least: int, most: int = (1 << 63) - 1) -> int:
    """A whole number within limits, which are inclusive.

    Raises:
        UsageError: it is something else; ``name`` is the argument's.
    """
    if type(value) is not int or not least <= value <= most:
        limit = f"from {least} up" if most == (1 << 63) - 1 else f"from {least} to {most}"
        raise UsageError(f"{name}={value!r:.100} does not fit.", f"Give a whole number {limit}.")
    return value


def texts(name: str, value: object) -> tuple[str, ...]:
    """One text or several, as several, each of them valid Unicode.

    Raises:
        UsageError: it is something else; ``name`` is the argument's.
    """
    several = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else None
    if several is None or not all(isinstance(one, str) for one in several):
        raise UsageError(f"{name}={value!r:.100} does not fit.", "Give a text or a list of texts.")
    return tuple(map(in_unicode, several))
