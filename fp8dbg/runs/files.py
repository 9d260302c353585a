"""Files of a run folder: names that cannot escape it, and writes that are whole or absent."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from fp8dbg.errors import RunFolderError

_KEPT = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_LONGEST = 100
"""Bytes of an escaped name: two of them and a suffix stay below the 255 bytes of a file name."""


def escape(name: str) -> str:
    """A file-name component for any text: letters, digits, ``_-.`` stay, all else becomes ``%XX`` of its UTF-8 bytes.

    Never empty, never hidden, never ``..``, at most 100 bytes: what would be longer keeps its start and ends in ``~``
    and 32 hexadecimal digits of its SHA-256. Shorter names are reversible; the true name is kept inside the file too.
    """
    raw = name.encode("utf-8", "surrogatepass")
    text = "".join(chr(b) if b in _KEPT else f"%{b:02X}" for b in raw[: _LONGEST + 1])
    if text.startswith("."):
        text = "%2E" + text[1:]
    if len(text) > _LONGEST:
        text = f"{text[:60]}~{hashlib.sha256(raw).hexdigest()[:32]}"
    return text or "%"


def rank_folder(rank: int) -> str:
    """Name of a rank's folder below a table's: ``rank=00003``."""
    return f"rank={rank:05d}"


def journal_name(rank: int, table: str) -> str:
    """File name of a table's journal."""
    return f"rank-{rank:05d}.{table}.arrows"


def part_name(number: int) -> str:
    """File name of a finished part."""
    return f"part-{number:06d}.parquet"


def parse_journal_name(name: str) -> tuple[int, str] | None:
    """Rank and table of a journal's file name; None if it is no journal's."""
    found = re.fullmatch(r"rank-(\d{5,9})\.([a-z_]+)\.arrows", name)
    return (int(found[1]), found[2]) if found else None


def parse_part_name(name: str) -> int | None:
    """Number of a part's file name; None if it is no part's."""
    found = re.fullmatch(r"part-(\d{6,9})\.parquet", name)
    return int(found[1]) if found else None


def parse_rank_folder(name: str) -> int | None:
    """Rank of a folder's name; None if it is no rank's folder."""
    found = re.fullmatch(r"rank=(\d{5,9})", name)
    return int(found[1]) if found else None


def folder_path(path: object) -> Path:
    """A run folder's path as given by a caller.

    Raises:
        RunFolderError: it is no path, empty, or no path that a file system could hold.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(text := os.fspath(path), str):
        raise RunFolderError(f"{path!r:.100} is no path.", "Give a run folder as text or Path.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RunFolderError(f"{text!r:.200} is not valid Unicode.", "Give another name to the folder.") from None
    if not text or "\0" in text:
        raise RunFolderError(f"{text!r:.200} names no folder.", "Give the path of a run folder.")
    return Path(text)


def is_regular(path: Path) -> bool:
    """Whether a path leads to a regular file: a pipe or a device in a stranger's folder would be read for ever."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def entries(folder: Path) -> list[Path]:
    """Paths in a folder, sorted by name; empty if it is missing or cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file so that it is there whole or not at all: temporary name, fsync, rename, fsync of the folder.

    Args:
        path: where it ends up; its folder is made if missing.
        write: receives the open file.

    Raises:
        OSError: nothing is left behind under the temporary name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    with suppress(OSError):  # some file systems refuse to sync a folder
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
