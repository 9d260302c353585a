"""Real text that every machine has: the source of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from fp8dbg.errors import UsageError

VOCABULARY = 128
"""ASCII; every other byte becomes the last code."""

_SMALLEST = 300_000
"""Bytes. Below this the model learns the text by heart instead of the language."""


def read_text(limit: int = 1_500_000) -> Tensor:
    """The top-level modules of the standard library in the order of their names, as codes below ``VOCABULARY``.

    Args:
        limit: bytes read at most.

    Returns:
        int64 [bytes]; the same for the same Python.

    Raises:
        UsageError: this Python came without its source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < _SMALLEST:
        raise UsageError(
            f"The demo trains on the source of Python's standard library, and {folder} holds {len(text)} bytes of it.",
            "Use a Python that was installed with its source.",
        )
    return torch.frombuffer(text[:limit], dtype=torch.uint8).clamp(max=VOCABULARY - 1).long()


def split(text: Tensor, held_out: int = 100_000) -> tuple[Tensor, Tensor]:
    """Text to train on, and its last ``held_out`` codes (at most a tenth) to judge by."""
    kept = min(held_out, len(text) // 10)
    return text[:-kept], text[-kept:]


def batch(text: Tensor, rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text, and the code that follows each position: two int64 tensors [rows, length]."""
    starts = torch.randint(len(text) - length, (rows, 1), generator=generator)
    windows = text[starts + torch.arange(length + 1)]
    return windows[:, :-1], windows[:, 1:]
