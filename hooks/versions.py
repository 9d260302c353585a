"""Which versions of the host libraries fp8dbg has been read against, and what is said of others."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8dbg.recording.recorder import Recorder

Version = tuple[int, int]

KNOWN: dict[str, tuple[Version, Version]] = {
    "Transformer Engine": ((1, 9), (2, 20)),
    "torchao": ((0, 18), (0, 19)),
    "Megatron-Core": ((0, 16), (0, 20)),
}
"""The versions, first and last, whose source was read."""

_WORKS = {
    "Transformer Engine": "operands are seen, scales are read where they used to be",
    "torchao": "operands are seen, scales are emulated by the formulas of the versions that were read",
    "Megatron-Core": "its layers are recorded if they are called as they used to be; stages' names may differ",
}
"""What of a host can be expected to work all the same."""


def version_of(*packages: str) -> Version:
    """Major and minor version of the first of these that is installed; (0, 0) if its version cannot be told."""
    for name in packages:
        try:
            major, minor = installed(name).split(".")[:2]
            return int(major), int(minor)
        except (PackageNotFoundError, ValueError):
            continue
    return 0, 0


def tell_version(recorder: Recorder, host: str, version: Version) -> None:
    """Warn, and leave an event, where a host's version is none of those that were read."""
    first, last = KNOWN[host]
    if first <= version <= last:
        return
    said = (
        f"{host} {version[0]}.{version[1]} is not one that fp8dbg has been read against "
        f"({first[0]}.{first[1]} to {last[0]}.{last[1]}): {_WORKS[host]}."
    )
    warnings.warn(said, stacklevel=4)
    recorder.event("gap", None, said)
