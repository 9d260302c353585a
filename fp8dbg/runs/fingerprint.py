"""run.json: what a run was made with, so that two runs can be told apart and a folder outlives its program."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from fp8dbg.errors import RunFolderError
from fp8dbg.runs.files import is_regular, write_whole
from fp8dbg.runs.schema import SCHEMA_VERSION
from fp8dbg.text import in_unicode

_LARGEST = 256 << 20
"""Bytes of run.json that are read at most: 1,000 layers with names of 200 kB fit."""

_VARIABLES = re.compile(
    r"NVTE_\w+|TORCH_(ALLOW_TF32_CUBLAS_OVERRIDE|COMPILE_DISABLE|BLAS_PREFER_CUBLASLT|LINALG_PREFER_CUSOLVER)"
    r"|TORCHDYNAMO_DISABLE|TORCHINDUCTOR_(MAX_AUTOTUNE|EMULATE_PRECISION_CASTS)|NVIDIA_TF32_OVERRIDE"
    r"|CUBLAS_WORKSPACE_CONFIG|CUBLASLT_WORKSPACE_SIZE|CUDA_DEVICE_MAX_CONNECTIONS|CUDA_LAUNCH_BLOCKING"
    r"|PYTORCH_(CUDA_)?ALLOC_CONF|NCCL_ALGO|NCCL_PROTO|WORLD_SIZE|LOCAL_WORLD_SIZE"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


def run_json_name(rank: int) -> str:
    """Rank 0 writes ``run.json``; another rank ``run.rank-00003.json``: ranks never touch each other's files."""
    return "run.json" if rank == 0 else f"run.rank-{rank:05d}.json"


def parse_run_json_name(name: str) -> int | None:
    """Rank of a run.json's file name; None if it is no run.json's."""
    found = re.fullmatch(r"run(?:\.rank-(\d{5,9}))?\.json", name)
    return None if found is None else int(found[1] or 0)


def new_fingerprint(rank: int) -> dict[str, Any]:
    """What every run folder says: schema, time of creation, versions, host, FP8-relevant environment."""
    return {
        "schema_version": SCHEMA_VERSION,
        "created": now(),
        "rank": rank,
        "versions": _versions(),
        "environment": environment(),
        "sessions": 0,
        "finished": False,
    }


def continued(old: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """A fingerprint for one more session of a run: what the old one said stays where this session has no news."""
    new = new_fingerprint(rank)
    return {**old, **new, "created": old.get("created", new["created"])}


def refuse_newer(path: Path, meta: Mapping[str, Any]) -> None:
    """Refuse a folder that a newer fp8dbg recorded.

    Raises:
        RunFolderError: with both versions in it.
    """
    if meta["schema_version"] > SCHEMA_VERSION:
        raise RunFolderError(
            f"{path} was recorded with schema {meta['schema_version']}; this fp8dbg knows up to {SCHEMA_VERSION}.",
            "Update fp8dbg.",
        )


def environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables known to change FP8 arithmetic or its kernels; nothing else, and nothing named like a secret."""
    return {k: v for k, v in sorted(variables.items()) if _VARIABLES.fullmatch(k) and not _SECRET.search(k)}


def now() -> str:
    """UTC time in ISO 8601, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("fp8dbg", "torch", "transformer-engine", "torchao", "megatron-core"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def write_run_json(folder: Path, rank: int, fingerprint: Mapping[str, Any]) -> None:
    """Write it whole or not at all; what JSON has no value for is written as text, NaN and infinities as null.

    Texts are Unicode, as in the tables, so that a layer has the same name in both.

    Raises:
        OSError: the old one, if any, is still there.
    """
    text = json.dumps(_plain(fingerprint), indent=1, allow_nan=False)
    write_whole(folder / run_json_name(rank), lambda file: file.write(text.encode()))


def read_run_json(path: Path) -> dict[str, Any] | str:
    """The object in a run.json, or why it cannot be read, as the end of a sentence."""
    if not path.exists():
        return "is missing"
    if not is_regular(path):
        return "is not a regular file"
    try:
        if path.stat().st_size > _LARGEST:
            return f"is larger than {_LARGEST >> 20} MiB"
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return f"is not readable JSON ({' '.join(str(error).split())[:200]})"
    if not isinstance(found, dict) or type(found.get("schema_version")) is not int:
        return "is not a run's: it has no schema_version"
    return found


def _plain(value: Any) -> Any:
    """The value in JSON's own types."""
    if isinstance(value, Mapping):
        return {in_unicode(str(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(in_unicode(str(v)) for v in value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int)) else in_unicode(str(value))
