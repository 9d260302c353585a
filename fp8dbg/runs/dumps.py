"""Saved tensors: one safetensors file per step, layer and tensor name; the true names are inside the file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fp8dbg.errors import RunFolderError
from fp8dbg.runs.files import entries, escape, is_regular, parse_rank_folder, rank_folder, write_whole
from fp8dbg.text import in_unicode

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_HEADER = 100_000_000
"""Bytes; the limit that safetensors itself sets."""


@dataclass(frozen=True, slots=True)
class Dump:
    """One saved tensor: where it is and what it was."""

    path: Path
    step: int
    rank: int
    layer: str
    tensor: str

    def load(self) -> Tensor:
        """The tensor, on the CPU.

        Raises:
            RunFolderError: the file cannot be read.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(self.path)["tensor"]
        except (OSError, SafetensorError, KeyError) as error:
            raise RunFolderError(f"The saved tensor {self.path} cannot be read.", "Delete the file.") from error


def dump_path(folder: Path, rank: int, step: int, layer: str, tensor: str) -> Path:
    """Where a dump lies; no name can lead out of the folder."""
    name = f"{escape(layer)}.{escape(tensor)}.safetensors"
    return folder / "dumps" / rank_folder(rank) / f"step={step:06d}" / name


def save_dump(folder: Path, rank: int, step: int, layer: str, tensor: str, value: Tensor) -> Path:
    """Save one tensor, whole or not at all.

    Raises:
        OSError: nothing is left behind.
    """
    from safetensors.torch import save

    names = {"layer": in_unicode(layer), "tensor": in_unicode(tensor), "step": str(step), "rank": str(rank)}
    data = save({"tensor": value.detach().to("cpu").contiguous()}, metadata=names)
    path = dump_path(folder, rank, step, layer, tensor)

    def write(file: IO[bytes]) -> None:
        file.write(data)

    write_whole(path, write)
    return path


def find_dumps(folder: Path, layer: str | None = None, tensor: str | None = None) -> list[Dump]:
    """Dumps in a folder by step, rank, layer and tensor; files that are none, or cut, are passed over.

    Args:
        folder: the run folder.
        layer, tensor: only those of this name; None: all.
    """
    ranks = [p for p in entries(folder / "dumps") if parse_rank_folder(p.name) is not None]
    files = (file for rank in ranks for step in entries(rank) for file in entries(step))
    dumps = (_read_names(file) for file in files if file.suffix == ".safetensors")
    found = [d for d in dumps if d is not None and layer in (None, d.layer) and tensor in (None, d.tensor)]
    return sorted(found, key=lambda d: (d.step, d.rank, d.layer, d.tensor))


def _read_names(path: Path) -> Dump | None:
    try:
        if not is_regular(path):
            return None
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER:
                return None
            header = json.loads(file.read(length))
        if path.stat().st_size != 8 + length + header["tensor"]["data_offsets"][1]:
            return None
        names = header["__metadata__"]
        return Dump(path, int(names["step"]), int(names["rank"]), str(names["layer"]), str(names["tensor"]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
