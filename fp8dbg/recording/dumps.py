"""Which tensors are saved whole: by layer and tensor name, once per step."""

from __future__ import annotations

from collections.abc import Iterable

from fp8dbg.recording.names import matches

__all__ = ["Dumps"]


class Dumps:
    """The tensors asked for as ``layer:tensor`` globs; of each, the step's first one is saved.

    Args:
        requests: such globs, for example ``layers.3.*:input`` or ``*:grad_output``.
    """

    def __init__(self, requests: Iterable[str] = ()) -> None:
        self._globs = [request.rpartition(":")[::2] for request in requests]
        self._saved: set[tuple[str, str]] = set()

    def __bool__(self) -> bool:
        return bool(self._globs)

    def take(self, layer: str, tensor: str) -> bool:
        """Whether this tensor is to be saved now; True once for each name, until the next step."""
        if not self._globs or (layer, tensor) in self._saved:
            return False
        if not any(matches(layer, [a]) and matches(tensor, [b]) for a, b in self._globs):
            return False
        self._saved.add((layer, tensor))
        return True
