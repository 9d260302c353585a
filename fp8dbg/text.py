"""Text as every file and program can hold it: common ground of all rooms, as errors are."""

from __future__ import annotations


def in_unicode(text: str) -> str:
    """The text, as a layer's name is known by everywhere: a lone surrogate, which no file holds, as ``\\udc80``."""
    return text.encode("utf-8", "backslashreplace").decode()
