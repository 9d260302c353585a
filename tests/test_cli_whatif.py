"""``fp8dbg whatif`` on the command line: its table, its JSON and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import Run
from tests.synthetic import amax_jump, write_run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One batch that jumps, recorded with counts per binade."""
    return write_run(tmp_path_factory.mktemp("runs") / "run", histograms=True, blocks=1, plant=amax_jump(150))


def test_the_table_says_what_is_bounds(fp8dbg: Run, recorded: Path) -> None:
    """A row for each operand, now and then, with its basis; how to have it exact goes to stderr."""
    said = fp8dbg("whatif", recorded, "--recipe", "current", "--layer", "*.down")
    assert said.code == 0
    head, *rows, _, answer = said.out.splitlines()
    assert head.split()[:4] == ["layer", "tensor", "basis", "steps"]
    assert [row.split()[:3] for row in rows] == [
        ["layers.0.down", role, "bounds"] for role in ("input", "weight", "grad_output")
    ]
    assert all("→" in row and " > " not in row for row in rows)
    assert answer.endswith("record again with attach(histogram='codes').")
    assert "histogram='codes'" in said.err


def test_json_has_the_clipped_steps(fp8dbg: Run, recorded: Path) -> None:
    """The jump clips one step of the input under delayed scaling; current scaling follows it."""
    first = json.loads(fp8dbg("whatif", recorded, "--recipe", "current", "--layer", "*.down", "--json").out)["answers"][
        0
    ]
    assert first["tensor"] == "input"
    assert first["clipped"]["now"] >= 1
    assert first["clipped"]["then"] == 0
    assert first["then"]["saturated_ratio"] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("recipe", "code", "words"), [("nvfp4", 3, "what_if=['nvfp4']"), ("nonsense", 2, "Valid names: ")]
)
def test_what_cannot_be_told_is_said(fp8dbg: Run, recorded: Path, recipe: str, code: int, words: str) -> None:
    """Too little evidence is exit 3 with what to record; an unknown recipe is wrong usage."""
    said = fp8dbg("whatif", recorded, "--recipe", recipe)
    assert said.code == code
    assert words in said.err
