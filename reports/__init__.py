"""The questions and page templates that ship with fp8dbg, as package data.

A question is one ``.sql`` file; `fp8dbg.runs.queries` reads and runs it. Adding a question is adding a file.
"""

from __future__ import annotations

from importlib import resources


def names(suffix: str) -> list[str]:
    """Names of the files with a suffix (".sql"), without it, sorted."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    return sorted(name.removesuffix(suffix) for name in files if name.endswith(suffix))


def text(name: str) -> str:
    """Contents of a file of this folder, such as "underflow.sql".

    Raises:
        FileNotFoundError: there is no such file.
    """
    return (resources.files(__name__) / name).read_text(encoding="utf-8")
