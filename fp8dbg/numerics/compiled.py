"""How this room compiles loops, and how it shares them out over threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from numba import njit

T = TypeVar("T")

_pool: ThreadPoolExecutor | None = None


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """``numba.njit`` that releases the GIL; compiled at the first call, kept on disk where some place can be written.

    ``options`` are njit's. numba's own parallel loops are not used: their default layer aborts the process when two
    threads enter it at once.
    """
    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        kernel = njit(cache=True, **options)(function)
    except RuntimeError:  # no writable place: compile afresh in every process
        return njit(**options)(function)
    kernel._cache = _ForgivingCache(kernel._cache)
    return kernel


class _ForgivingCache:
    """numba's cache, whose troubles (a full disk, a torn file, a stale network handle) only cost a compilation."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, *arguments: Any) -> Any:
        try:
            return self._cache.load_overload(*arguments)
        except Exception:  # noqa: BLE001 -- a damaged pickle can raise anything
            return None

    def save_overload(self, *arguments: Any) -> None:
        with suppress(Exception):
            self._cache.save_overload(*arguments)


def threads() -> int:
    """How many threads a large tensor may use: as many as torch was told to use, at most 16."""
    import torch

    return max(1, min(torch.get_num_threads(), 16))


def parts_of(size: int, smallest: int) -> int:
    """Into how many parts ``share_out`` cuts."""
    return max(1, min(threads(), size // smallest))


def share_out(work: Callable[[int, int], T], size: int, smallest: int) -> Sequence[T]:
    """``work(start, stop)`` over ``range(size)`` in contiguous parts of at least ``smallest``; results in order.

    The caller's thread does the last part, so a small size costs no hand-over.
    """
    parts = parts_of(size, smallest)
    bounds = [size * i // parts for i in range(parts + 1)]
    try:
        others = [_workers().submit(work, *bounds[i : i + 2]) for i in range(parts - 1)]
    except RuntimeError:  # the interpreter is shutting down and starts no more threads
        return [work(*bounds[i : i + 2]) for i in range(parts)]
    last = work(bounds[-2], bounds[-1])
    return [*(other.result() for other in others), last]


def _workers() -> ThreadPoolExecutor:
    """The pool, made when first needed: a process that only measures small tensors never starts a thread."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(15, thread_name_prefix="fp8dbg")
    return _pool


def _forget_pool() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):  # a forked data loader has the pool but none of its threads
    os.register_at_fork(after_in_child=_forget_pool)
