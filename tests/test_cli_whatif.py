"""``fp8dbg whatif`` on the command line: its table, its JSON and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fp8dbg import cli
from tests.synthetic import amax_jump, write_run

Captured = pytest.CaptureFixture[str]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of the command line, in this process."""
    monkeypatch.setattr(sys, "argv", ["fp8dbg", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One batch that jumps, recorded with counts per binade."""
    return write_run(tmp_path_factory.mktemp("runs") / "run", histograms=True, blocks=1, plant=amax_jump(150))


def test_the_table_says_what_is_bounds(monkeypatch: pytest.MonkeyPatch, capsys: Captured, recorded: Path) -> None:
    """A row for each operand, now and then, with its basis; how to have it exact goes to stderr."""
    assert run(monkeypatch, "whatif", recorded, "--recipe", "current", "--layer", "*.down") == 0
    said = capsys.readouterr()
    head, *rows = said.out.splitlines()
    assert head.split()[:4] == ["layer", "tensor", "basis", "steps"]
    assert [row.split()[:3] for row in rows] == [
        ["layers.0.down", role, "bounds"] for role in ("input", "weight", "grad_output")
    ]
    assert "histogram='codes'" in said.err


def test_json_has_the_clipped_steps(monkeypatch: pytest.MonkeyPatch, capsys: Captured, recorded: Path) -> None:
    """The jump clips one step of the input under delayed scaling; current scaling follows it."""
    assert run(monkeypatch, "whatif", recorded, "--recipe", "current", "--layer", "*.down", "--json") == 0
    first = json.loads(capsys.readouterr().out)["answers"][0]
    assert first["tensor"] == "input"
    assert first["clipped"]["now"] >= 1
    assert first["clipped"]["then"] == 0
    assert first["then"]["saturated_ratio"] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("recipe", "code", "words"), [("nvfp4", 3, "what_if=['nvfp4']"), ("nonsense", 2, "Valid names: ")]
)
def test_what_cannot_be_told_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, recorded: Path, recipe: str, code: int, words: str
) -> None:
    """Too little evidence is exit 3 with what to record; an unknown recipe is wrong usage."""
    assert run(monkeypatch, "whatif", recorded, "--recipe", recipe) == code
    assert words in capsys.readouterr().err
