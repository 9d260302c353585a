"""The command line: what it prints, where, and the exit codes."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from typer.main import get_command

from fp8dbg import __version__, cli
from fp8dbg.errors import RunFolderError
from fp8dbg.runs.folder import RunWriter
from tests.command_line import Run, started

# Help and usage.


def test_help_names_every_verb_and_the_exit_codes(fp8dbg: Run) -> None:
    """--help is the whole map."""
    result = fp8dbg("--help")
    assert result.code == 0
    for word in ("demo", "run", "control", "report", "query", "tensors", "doctor", "Exit codes", "nothing recorded"):
        assert word in result.out


@pytest.mark.parametrize("verb", get_command(cli.app).commands)  # type: ignore[attr-defined]  # a group
def test_every_verb_has_help_and_json(fp8dbg: Run, verb: str) -> None:
    """The same two options everywhere."""
    result = fp8dbg(verb, "--help")
    assert result.code == 0
    assert "--json" in result.out


def test_version(fp8dbg: Run) -> None:
    """One line, the name first."""
    assert fp8dbg("--version") == (0, f"fp8dbg {__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("report",),
        ("query", "somewhere"),
        ("report", "somewhere", "--no-such"),
        ("doctor", "--every", "x"),
    ],
)
def test_wrong_usage_is_exit_code_2(fp8dbg: Run, arguments: tuple[str, ...]) -> None:
    """An unknown verb or option, or a missing argument, is told on stderr and nothing is printed."""
    result = fp8dbg(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("Usage: fp8dbg")


def test_options_that_exclude_each_other(fp8dbg: Run, faulty: Path) -> None:
    """Two output forms at once are a mistake, not a choice for us to make."""
    assert fp8dbg("query", faulty, "select 1", "--json", "--csv").code == 2
    assert fp8dbg("report", faulty, "--html", "x.html", "--no-html").code == 2


# Errors.


@pytest.mark.parametrize("verb", [("report",), ("tensors",), ("query", "select 1")])
def test_a_folder_that_is_none_is_one_sentence(fp8dbg: Run, tmp_path: Path, verb: tuple[str, ...]) -> None:
    """Missing, empty, a file, something else: exit code 2, nothing on stdout, no traceback."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "photo.jpg").write_bytes(b"\xff\xd8")
    for name in ("missing", "empty", "file", "other"):
        result = fp8dbg(verb[0], tmp_path / name, *verb[1:])
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("fp8dbg: ")
        assert name in result.err
        assert result.err.count("\n") == 1


def test_a_newer_schema_is_refused(fp8dbg: Run, tmp_path: Path) -> None:
    """A folder of a later fp8dbg says so."""
    (tmp_path / "run.json").write_text(json.dumps({"schema_version": 99}))
    result = fp8dbg("report", tmp_path)
    assert result.code == 2
    assert "schema 99" in result.err


def test_nothing_recorded_is_exit_code_3(fp8dbg: Run, tmp_path: Path) -> None:
    """A run folder without rows opens, but there is nothing to say about it."""
    RunWriter(tmp_path / "run").close()
    report = fp8dbg("report", tmp_path / "run", "--no-html")
    assert report.code == 3
    assert "recorded" in report.out
    tensors = fp8dbg("tensors", tmp_path / "run")
    assert (tensors.code, tensors.out) == (3, "")
    assert "fp8dbg.attach" in tensors.err


def test_an_unknown_layer_lists_the_layers(fp8dbg: Run, faulty: Path) -> None:
    """A glob that matches nothing names what there is."""
    result = fp8dbg("tensors", faulty, "--layer", "decoder.*")
    assert (result.code, result.out) == (2, "")
    assert "layers.2.up" in result.err


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("select layer from tensor", "tensors"),
        ("select nonsense from steps", "grad_norm"),
        ("selec", "fp8dbg: "),
        ("drop table tensors", "SELECT"),
        ("select * from read_csv('/etc/passwd')", "fp8dbg: "),
        ("copy steps to 'x.csv'", "SELECT"),
        ("select cast(layer as int) from tensors", "layers.0"),
        ("select 1; select 2", "fp8dbg: "),
        ("", "fp8dbg: "),
    ],
)
def test_bad_sql_is_one_sentence(fp8dbg: Run, faulty: Path, sql: str, words: str) -> None:
    """Unknown names list the valid ones; what writes, or reads other files, is refused."""
    result = fp8dbg("query", faulty, sql)
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert "Traceback" not in result.err


def test_debug_gives_the_traceback(fp8dbg: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """FP8DBG_DEBUG=1 is for finding out where an error comes from."""
    monkeypatch.setenv("FP8DBG_DEBUG", "1")
    with pytest.raises(RunFolderError, match="There is no folder"):
        fp8dbg("report", tmp_path / "missing")


# doctor


def test_doctor_knows_what_is_installed_and_what_is_set(fp8dbg: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions, devices, and the variables that change FP8 numerics."""
    import torch

    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    found = json.loads(fp8dbg("doctor", "--json").out)
    versions = {package["name"]: package["version"] for package in found["packages"]}
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["devices"][-1]["fp8"] is False
    assert found["variables"][0]["name"] == "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
    assert "power" in found["variables"][0]["meaning"]
    assert "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1" in fp8dbg("doctor").out


def test_doctor_growth_follows_the_plan(fp8dbg: Run) -> None:
    """Twice the layers, twice the rows; never sampling leaves the amax; more ranks, more folders."""

    def growth(*options: object) -> dict[str, int]:
        found: dict[str, int] = json.loads(fp8dbg("doctor", "--json", *options).out)["growth"]
        return found

    base = growth("--layers", 100, "--every", 100, "--steps", 1000)
    assert growth("--layers", 200, "--every", 100, "--steps", 1000)["tensors"] == 2 * base["tensors"]
    never = growth("--layers", 100, "--every", 0, "--steps", 1000)
    assert (never["tensors"], never["gemms"], never["amax"]) == (0, 0, base["amax"])
    assert growth("--layers", 100, "--steps", 1000, "--ranks", 8) == {table: 8 * n for table, n in base.items()}


# As a process.


def test_a_closed_pipe_is_quiet(faulty: Path) -> None:
    """``fp8dbg query ... | head`` ends without a word."""
    process = started("query", faulty, "select * from tensors", "--csv")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == -signal.SIGPIPE


def test_ctrl_c_is_130_and_quiet(tmp_path: Path) -> None:
    """An interrupt ends the demo with the usual code, and what it recorded can be read."""
    process = started("demo", tmp_path / "run")
    journal = tmp_path / "run" / "journal" / "rank-00000.steps.arrows"
    while not journal.exists() or not journal.stat().st_size:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert started("query", tmp_path / "run", "select step from steps", "--json").wait() == 0


def test_the_demo_overwrites_nothing(fp8dbg: Run, tmp_path: Path) -> None:
    """A folder with something in it is refused before anything is trained."""
    (tmp_path / "thesis.tex").write_text("dear to someone")
    result = fp8dbg("demo", tmp_path)
    assert (result.code, result.out) == (2, "")
    assert "not an empty folder" in result.err
