"""Names taken from a model, made safe and short enough to show.

A layer name comes from a stranger's run folder: it may hold control characters that move a terminal's cursor,
bidirectional overrides that make text read as something else, lone surrogates that no file can hold, or 200 kB of text.
"""

from __future__ import annotations

import json
import re
import unicodedata

from rich.cells import cell_len, set_cell_size

_SUSPECT = re.compile(r"[\x00-\x1f\x7f-\x9f]|[^\x00-\u052f]")
_KEPT = {"\u200d", "\ufe0e", "\ufe0f"}
"""Joiners and variation selectors: they only build emoji."""


def visible(name: str) -> str:
    """The name with every character that would act instead of show replaced by its escape, as JSON writes it.

    Control characters, bidirectional overrides and lone surrogates become ``\\n``, ``\\u202e`` and the like, so that a
    JSON text stays JSON of the same meaning. Emoji and all that shows is left alone.
    """
    return _SUSPECT.sub(lambda found: _shown(found[0]), name)


def _shown(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    return json.dumps(character)[1:-1] if character != "\x7f" else "\\u007f"


def middle(text: str, width: int) -> str:
    """The text cut in its middle so that it takes at most ``width`` terminal cells (at least 1).

    Both ends are kept, the later one longer: layer names differ at their end.
    """
    if len(text) <= width and cell_len(text) <= width:
        return text
    head = (width - 1) // 3
    return set_cell_size(text[: width + 1], head).rstrip() + "…" + _tail(text[-width - 1 :], width - 1 - head)


def _tail(text: str, width: int) -> str:
    while cell_len(text) > width:
        text = text[1:]
    return text


def shorten(name: str, width: int) -> str:
    """``visible`` and ``middle`` in one, without walking the whole of a name far longer than it will be shown."""
    if len(name) > 8 * width:
        name = name[: 4 * width] + name[-4 * width :]
    return middle(visible(name), width)


def initials(name: str, width: int) -> str:
    """A dotted name with as many of its first parts cut to their first letter as it takes to fit ``width`` cells.

    ``layers.0.attention.qkv`` becomes ``l.0.a.qkv``: numbers and the end stay, so that a layer is still told from its
    neighbours. What is too long even so is cut as ``shorten`` does.
    """
    *first, last = name.split(".") if len(name) <= 8 * width else [name]
    for at, part in enumerate(first):
        if cell_len(".".join([*first, last])) <= width:
            break
        first[at] = part if part.isdigit() else part[:1]
    return shorten(".".join([*first, last]), width)


def clipped(text: str, width: int) -> str:
    """A sentence made visible and, beyond ``width`` terminal cells, cut at its end."""
    shown = visible(text[: 4 * width])
    return shown if cell_len(shown) <= width else set_cell_size(shown, width - 1).rstrip() + "…"


def common_prefix(names: list[str]) -> str:
    """The dotted prefix that all names share, trailing dot included; "" if any name would become empty."""
    if len(names) < 2:
        return ""
    parts = [name.split(".")[:-1] for name in (min(names), max(names))]
    shared = 0
    while shared < min(map(len, parts)) and parts[0][shared] == parts[1][shared]:
        shared += 1
    return "".join(part + "." for part in parts[0][:shared])
