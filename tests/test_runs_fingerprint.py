"""run.json: it says what a run was made with, and keeps what it must not say to itself."""

from __future__ import annotations

import json
import math
import platform
from importlib import metadata
from pathlib import Path

import pytest

from fp8dbg.runs.fingerprint import environment, parse_run_json_name, read_run_json, run_json_name
from fp8dbg.runs.folder import RunWriter, open_folder
from fp8dbg.runs.schema import SCHEMA_VERSION


def test_it_says_with_what_the_run_was_made(tmp_path: Path) -> None:
    """Schema, versions, and what the recorder adds; finished only once it is."""
    writer = RunWriter(tmp_path, fingerprint={"recipe": "delayed", "config": {"lr": 0.1}})
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["schema_version"] == SCHEMA_VERSION
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"] == metadata.version("torch")
    assert (found["recipe"], found["config"], found["finished"]) == ("delayed", {"lr": 0.1}, False)
    writer.update_fingerprint(layout={"tp": 2}, recipe="current")
    writer.close()
    writer.update_fingerprint(recipe="too late")
    with open_folder(tmp_path) as run:
        assert (run.meta["recipe"], run.meta["layout"], run.meta["finished"]) == ("current", {"tp": 2}, True)


def test_a_second_session_keeps_what_the_first_said(tmp_path: Path) -> None:
    """Except for what it says anew."""
    RunWriter(tmp_path, fingerprint={"recipe": "delayed", "note": "a"}).close()
    created = json.loads((tmp_path / "run.json").read_text())["created"]
    RunWriter(tmp_path, fingerprint={"recipe": "current"})
    found = json.loads((tmp_path / "run.json").read_text())
    assert (found["recipe"], found["note"], found["created"], found["finished"]) == ("current", "a", created, False)


def test_values_that_json_lacks_are_written_as_it_can(tmp_path: Path) -> None:
    """NaN and infinities as null, sets sorted, the rest as text: a strange config must not stop a run."""
    odd = {"nan": math.nan, "inf": [math.inf], "set": {"b", "a"}, "path": Path("x"), 3: (1, 2), "lone": "\ud800"}
    RunWriter(tmp_path, fingerprint={"config": odd}).close()
    with open_folder(tmp_path) as run:
        assert run.meta["config"] == {
            "nan": None,
            "inf": [None],
            "set": ["a", "b"],
            "path": "x",
            "3": [1, 2],
            "lone": "\\ud800",
        }


def test_only_listed_variables_are_recorded() -> None:
    """Those that change FP8 arithmetic; never one that is named like a secret, whatever its prefix."""
    variables = {
        "NVTE_FP8_DPA_BWD": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
        "NVTE_API_KEY": "s",
        "NVTE_TOKEN": "s",
        "TORCH_SECRET": "s",
        "AWS_SECRET_ACCESS_KEY": "s",
        "HF_TOKEN": "s",
        "PATH": "/bin",
        "HOME": "/root",
    }
    assert list(environment(variables)) == [
        "NVIDIA_TF32_OVERRIDE",
        "NVTE_FP8_DPA_BWD",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    ]


@pytest.mark.parametrize("rank", [0, 1, 12345, 123456])
def test_each_rank_has_its_own_name(rank: int) -> None:
    """And it can be read back from it."""
    assert parse_run_json_name(run_json_name(rank)) == rank


@pytest.mark.parametrize(
    "name", ["run.json.bak", "Run.json", "run.rank-1.json", "run.rank-00001.json.77.tmp", "xrun.json"]
)
def test_other_names_are_no_run_json(name: str) -> None:
    """Temporary files and copies."""
    assert parse_run_json_name(name) is None


def test_a_huge_run_json_is_not_read(tmp_path: Path) -> None:
    """A stranger's folder must not fill the memory."""
    with (tmp_path / "run.json").open("wb") as file:
        file.truncate(1 << 40)
    assert read_run_json(tmp_path / "run.json") == "is larger than 256 MiB"
