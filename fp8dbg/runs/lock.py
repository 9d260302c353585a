"""Which process records which rank: a file lock that dies with its process, however it dies."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from fp8dbg.errors import RunFolderError
from fp8dbg.runs.files import is_regular

try:
    import fcntl
except ImportError:  # Windows: folders are read there, not recorded
    fcntl = None  # type: ignore[assignment]


def _lock_path(folder: Path, rank: int) -> Path:
    return folder / "journal" / f"rank-{rank:05d}.lock"


class RankLock:
    """Held while a rank is being recorded; released when this object goes, or its process.

    Raises:
        RunFolderError: another process holds it, or it is no regular file.
        OSError: the file cannot be made.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        path = _lock_path(folder, rank)
        if path.exists() and not is_regular(path):
            raise RunFolderError(f"{path} is not a regular file.", "Remove it, or record into another folder.")
        self._file: IO[bytes] = path.open("ab")
        if not _try_lock(self._file):
            self._file.close()
            raise RunFolderError(
                f"Rank {rank} of {folder} is being recorded by another process.",
                "Wait until it ends, give each process its own rank, or record into another folder.",
            )

    def release(self) -> None:
        """Let go of the lock. In a forked child this only closes the child's copy: the parent keeps the lock."""
        self._file.close()


def is_recording(folder: Path, rank: int) -> bool:
    """Whether some process on this machine records this rank now."""
    path = _lock_path(folder, rank)
    if not is_regular(path):
        return False  # a pipe in a stranger's folder would be waited for
    try:
        with path.open("rb") as file:
            return not _try_lock(file)
    except OSError:
        return False


def _try_lock(file: IO[bytes]) -> bool:
    """Whether the lock was free; a file system without locks counts as free."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
