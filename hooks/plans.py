"""What every host's fallback text starts from: the plan by layer, names quoted safely, reasons as comments.

A plan is anything with ``entries``, each entry a layer, some of its GEMMs, the recipe they should follow ("bf16" or
another) and the reason. Nothing here imports a host.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

GEMMS = ("fprop", "dgrad", "wgrad")


class Entry(Protocol):
    """One decision of a plan."""

    @property
    def layer(self) -> str:
        """Canonical global name."""

    @property
    def gemms(self) -> Sequence[str]:
        """GEMMs concerned: of fprop, dgrad, wgrad."""

    @property
    def recipe(self) -> str:
        """Recipe label: "bf16" keeps them in high precision."""

    @property
    def reason(self) -> str:
        """Why, in a sentence."""


class Plan(Protocol):
    """Layers and GEMMs, each with the recipe it should follow."""

    @property
    def entries(self) -> Sequence[Entry]:
        """The decisions, most important first."""


Recipes = dict[str, str]
"""GEMM -> recipe label, for one layer; GEMMs that keep their recipe are absent."""


def by_layer(plan: Plan) -> dict[str, Recipes]:
    """Layer -> its recipes by GEMM in the order fprop, dgrad, wgrad; of two entries for one GEMM the later holds."""
    layers: dict[str, Recipes] = {}
    for entry in plan.entries:
        layers.setdefault(entry.layer, {}).update(dict.fromkeys(entry.gemms, entry.recipe))
    return {layer: {g: recipes[g] for g in GEMMS if g in recipes} for layer, recipes in layers.items()}


def in_bf16(recipes: Recipes) -> tuple[str, ...]:
    """The GEMMs of a layer that go to BF16."""
    return tuple(gemm for gemm, recipe in recipes.items() if recipe == "bf16")


def is_whole(gemms: Iterable[str]) -> bool:
    """Whether these are all three GEMMs."""
    return set(gemms) == set(GEMMS)


def spelled(gemms: Iterable[str]) -> str:
    """ "fprop, dgrad", or "all three GEMMs"."""
    named = tuple(gemms)
    return "all three GEMMs" if is_whole(named) else ", ".join(named)


def refused(recipes: Recipes, known: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Recipe label -> its GEMMs, for recipes that are neither "bf16" nor known by name."""
    names = {"bf16", *known}
    odd = [label for label in dict.fromkeys(recipes.values()) if recipe_name(label) not in names]
    return {label: tuple(gemm for gemm in recipes if recipes[gemm] == label) for label in odd}


def recipe_name(label: str) -> str:
    """ "delayed:history=16" -> "delayed"."""
    return label.partition(":")[0]


def is_hybrid(label: str) -> bool:
    """Whether gradients are E5M2 under this recipe: its own default unless the label says otherwise."""
    found = re.search(r"\bhybrid=(\w+)", label)
    if found:
        return found[1].lower() in ("true", "1")
    return recipe_name(label) in ("delayed", "current", "current_pow2", "tensorwise")


def quoted(text: str) -> str:
    """A double-quoted string that YAML, JSON and Python all read back as ``text``; unprintable characters escaped."""
    body = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else _escaped(c) for c in body)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def comment(text: str) -> list[str]:
    """Comment lines, at most 118 characters each where words allow; line breaks in ``text`` cannot end the comment."""
    words = "".join(c if c.isprintable() else " " for c in text).split()
    lines, line = [], "#"
    for word in words:
        if len(line) + 1 + len(word) > 118 and line != "#":
            lines.append(line)
            line = "#  "
        line += " " + word
    return [*lines, line] if words else []


def described(plan: Plan) -> list[str]:
    """One comment per entry: layer, GEMMs, recipe and reason."""
    lines = []
    for entry in plan.entries:
        lines += comment(f"- {entry.layer}: {spelled(entry.gemms)} in {entry.recipe}. {entry.reason}")
    return lines


def text_of(lines: Iterable[str]) -> str:
    """The lines as a file."""
    return "\n".join(lines) + "\n"
