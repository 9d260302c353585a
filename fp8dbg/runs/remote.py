"""Run folders in object stores: a copy is fetched, checked and read like any other folder.

``s3://bucket/run`` and its like are read through fsspec where it knows the scheme (s3fs for s3, gcsfs for gs), else
through DuckDB's httpfs extension. Saved tensors stay where they are: they may be larger than all the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from fp8dbg.errors import RunFolderError
from fp8dbg.runs import queries
from fp8dbg.runs.fingerprint import parse_run_json_name

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,3}(?=[^/])(.+)", re.DOTALL)
_WANTED = re.compile(r"journal/[^/]+\.arrows|[a-z_]+/rank=\d+/part-\d+\.parquet")


def as_url(path: object) -> str | None:
    """A path's URL if it is one, with two slashes though pathlib takes one away; None for a path on this machine."""
    found = _URL.fullmatch(str(path))
    if found is None or Path(str(path)).exists():
        return None
    return f"{found[1]}://{'/' if found[1] == 'file' else ''}{found[2].rstrip('/')}"


def fetched(url: str) -> TemporaryDirectory[str]:
    """A copy of a run folder; it goes with the object returned.

    Raises:
        RunFolderError: there is nothing to read at the URL, or nothing here that can read it.
    """
    scratch = TemporaryDirectory(prefix="fp8dbg-")
    count = 0
    for name, data in _files(url):
        count += 1
        target = Path(scratch.name, *PurePosixPath(name).parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    if not count:
        raise RunFolderError(f"There is no run folder at {url}.", "Give the URL of the folder that holds run.json.")
    return scratch


def _files(url: str) -> Iterator[tuple[str, bytes]]:
    """Each file's path below the URL, and its bytes."""
    try:
        system, root = _file_system(url)
    except ImportError as error:
        yield from _by_duckdb(url, str(error))
        return
    try:
        for path in sorted(system.find(root)):
            name = str(path)[len(root) :].lstrip("/")
            if str(path).startswith(root) and _is_wanted(name):
                yield name, system.cat_file(path)
    except Exception as error:
        raise _unreadable(url, error) from error


def _file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the folder's path in it.

    Raises:
        ImportError: fsspec, or what it needs for this scheme, is not installed, or it does not know the scheme.
    """
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)  # type: ignore[no-any-return]
    except ValueError as error:
        raise ImportError(str(error)) from error
    except OSError as error:
        raise _unreadable(url, error) from error


def _by_duckdb(url: str, missing: str) -> Iterator[tuple[str, bytes]]:
    """The same without fsspec; ``missing`` is what that said."""
    try:
        for path, data in queries.remote_files(f"{url}/**"):
            if _is_wanted(name := path.removeprefix(f"{url}/")):
                yield name, data
    except queries.ReadError as error:
        if "not known" in missing:
            why = f"nothing here knows {url.split(':')[0]}://"
            raise RunFolderError(f"{url} cannot be read: {why}.", "Give a folder, or s3://bucket/run.") from error
        why = "lacks its httpfs extension" if "httpfs" in error.message else f"says {error.message:.200}"
        raise RunFolderError(f"{url} cannot be read: fsspec lacks a library, DuckDB {why}.", f"{missing}.") from error


def _is_wanted(name: str) -> bool:
    return parse_run_json_name(name) is not None or _WANTED.fullmatch(name) is not None


def _unreadable(url: str, error: Exception) -> RunFolderError:
    return RunFolderError(f"{url} cannot be read ({' '.join(str(error).split()):.300}).", "Give another folder.")
