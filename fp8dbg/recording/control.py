"""``fp8dbg control``: tell a live run, through its ``control.toml``, to measure more, less or something else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp8dbg.errors import RunFolderError, UnknownNameError, UsageError
from fp8dbg.recording.names import matches
from fp8dbg.recording.sampling import CONTROL, Settings, read_control
from fp8dbg.runs.files import write_whole
from fp8dbg.runs.fingerprint import parse_run_json_name, read_run_json, refuse_newer
from fp8dbg.runs.reader import require_folder

_ASKED = ("every", "windows", "dump", "trigger_steps", "spike", "limits", "trigger_dump")
"""Options of ``attach`` that are settings of a live run; its ``layers`` are those hooked at all."""


class Control:
    """What a run was asked for when it was attached to, and what ``control.toml`` says since.

    Args:
        folder: the run folder.

    Attributes:
        finished: whether every rank has ended, so that nobody reads ``control.toml`` any more.

    Raises:
        RunFolderError: it is no run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / CONTROL
        ranks = _run_jsons(folder)
        options = ranks[0].get("options")
        options = options if isinstance(options, dict) else {}
        self._layers = [str(layer["layer"]) for rank in ranks for layer in _listed(rank) if "layer" in layer]
        asked = {name: options[name] for name in _ASKED if name in options}
        self._asked = Settings().changed(asked)
        self.finished = all(rank.get("finished") for rank in ranks)

    def said(self) -> dict[str, Any]:
        """The keys of ``control.toml`` and their values; empty where there is none.

        Raises:
            UsageError: it is not readable, or a run would not follow it.
        """
        try:
            values = read_control(self._file)
        except FileNotFoundError:
            return {}
        except UsageError as error:
            raise UsageError(f"{self._file.parent}: {error.message}", "Start afresh with --reset.") from None
        self._asked.changed(values)
        return values

    def in_force(self) -> list[dict[str, Any]]:
        """Each setting: its name, its value, and who set it: attach, control or, in neither, default.

        Raises:
            UsageError: as ``said``.
        """
        said, default = self.said(), asdict(Settings())
        now, asked = asdict(self._asked.changed(said)), asdict(self._asked)
        origin = {n: "control" if n in said else "attach" if asked[n] != default[n] else "default" for n in now}
        return [{"setting": name, "value": value, "set_by": origin[name]} for name, value in now.items()]

    def change(self, values: Mapping[str, Any]) -> None:
        """Write ``control.toml`` anew, whole or not at all: what it says already, but for these.

        A ``dump`` is for once: it is left out again at the next change.

        Raises:
            UsageError: a value does not fit, or the old file does not; nothing has been written.
            RunFolderError: the folder cannot be written.
        """
        merged = {name: value for name, value in self.said().items() if name != "dump"} | dict(values)
        settings = asdict(self._asked.changed(merged))
        changed = {name: settings[name] for name in values}
        self._check_layers(
            [
                *changed.get("layers", ()),
                *(one.rpartition(":")[0] for key in ("dump", "trigger_dump") for one in changed.get(key, ())),
            ]
        )
        text = "".join(f"{name} = {json.dumps(settings[name], ensure_ascii=False)}\n" for name in merged)
        try:
            write_whole(self._file, lambda file: file.write(text.encode()))
        except OSError as error:
            raise RunFolderError(f"{self._file} cannot be written: {error.strerror}.") from error

    def reset(self) -> None:
        """Remove ``control.toml``: what ``attach`` was asked for holds again."""
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            raise RunFolderError(f"{self._file} cannot be removed: {error.strerror}.") from error

    def _check_layers(self, globs: Iterable[str]) -> None:
        for glob in globs:
            if self._layers and not any(matches(layer, [glob]) for layer in self._layers):
                raise UnknownNameError("layer", glob, self._layers)


def _listed(rank: Mapping[str, Any]) -> list[dict[str, Any]]:
    layers = rank.get("layers")
    return [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []


def _run_jsons(folder: Path) -> list[dict[str, Any]]:
    require_folder(folder)
    names = sorted(path for path in folder.glob("run*.json") if parse_run_json_name(path.name) is not None)
    found = [read for path in names if isinstance(read := read_run_json(path), dict)]
    if not found:
        raise RunFolderError(
            f"{folder} has no run.json that can be read.", "Give the folder of a run that was attached to."
        )
    for meta in found:
        refuse_newer(folder, meta)
    return found
