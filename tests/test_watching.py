"""The live view, without a terminal: what it shows of a run, what its keys write, what it costs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fp8dbg.recording.control import Control
from fp8dbg.render.live import Ration, judgement, pulse, snapshot
from fp8dbg.runs.folder import RunWriter
from tests.command_line import in_a_process
from tests.synthetic import outlier, write_run

pytest.importorskip("textual")

from textual.pilot import Pilot
from textual.widgets import DataTable, Sparkline, Static

from fp8dbg.watching import Watch

HOSTILE = "[bold]layers.0[/bold]\x1b[31m"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with an outlier."""
    return write_run(tmp_path / "run", blocks=2, steps=120, plant=outlier("layers.1.up", step=60))


def show(
    folder: Path, then: Callable[[Watch, Pilot[None]], Awaitable[None]], size: tuple[int, int] = (100, 30)
) -> None:
    """Run the app headless until it has shown its first findings, then go on as told."""

    async def session() -> None:
        app = Watch(folder)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: text(app, "headline") != "looking ...")
            await then(app, pilot)

    asyncio.run(session())


async def until(pilot: Pilot[None], happened: Callable[[], bool]) -> None:
    """Wait for something to be on the screen, a minute at most."""
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        await pilot.pause(0.05)


def text(app: Watch, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).render())


def rows(app: Watch, name: str) -> list[list[str]]:
    table: DataTable[Any] = app.query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in table.get_row_at(i)] for i in range(table.row_count)]


def test_it_shows_loss_findings_and_worst_tensors(folder: Path) -> None:
    """What `report` says, with the loss of the last steps."""

    async def look(app: Watch, pilot: Pilot[None]) -> None:
        assert "step 119" in text(app, "facts")
        assert "finished" in text(app, "facts")
        assert text(app, "headline") == judgement(folder).headline
        assert rows(app, "findings")[0][:4] == ["act", "layers.1.up", "weight", "60"]
        assert rows(app, "worst")[0][:2] == ["layers.1.up", "weight"]
        assert app.query_one("#loss", Sparkline).data == [v for v in pulse(folder).losses if v is not None]

    show(folder, look)


def test_keys_change_what_the_run_measures(folder: Path) -> None:
    """More often, less often, dump, stop, and back to what attach said: as `fp8dbg control` would."""
    first = {row["setting"]: row["value"] for row in Control(folder).in_force()}

    def now() -> dict[str, Any]:
        return {row["setting"]: row["value"] for row in Control(folder).in_force()}

    async def press(app: Watch, pilot: Pilot[None]) -> None:
        await pilot.press("m")
        assert now()["every"] == first["every"] // 2
        await pilot.press("l", "l")
        assert now()["every"] == first["every"] // 2 * 4
        app.query_one("#findings", DataTable).focus()
        await pilot.press("d")
        assert list(now()["dump"]) == ["layers.1.up:weight"]
        await pilot.press("s")
        assert now()["stop"] is True
        await pilot.press("s")
        assert now()["stop"] is False
        await pilot.press("u")
        assert now() == first

    show(folder, press)


def test_a_finding_appears_while_it_is_watched(tmp_path: Path) -> None:
    """Rows that are written after it was opened are on the screen some seconds later."""
    source = write_run(tmp_path / "whole", blocks=1, steps=120, plant=outlier("layers.0.up", step=60))
    part = write_run(tmp_path / "run", blocks=1, steps=40)

    async def grow(app: Watch, pilot: Pilot[None]) -> None:
        assert rows(app, "findings") == []
        for path in source.rglob("*.parquet"):
            (part / path.relative_to(source)).write_bytes(path.read_bytes())
        (part / "run.json").write_bytes((source / "run.json").read_bytes() + b"\n")
        await until(pilot, lambda: rows(app, "findings") != [])
        assert rows(app, "findings")[0][1:3] == ["layers.0.up", "weight"]
        await until(pilot, lambda: "step 119" in text(app, "facts"))

    show(part, grow)


def test_a_hostile_layer_name_is_only_text(tmp_path: Path) -> None:
    """No markup, no escape sequence gets through to the terminal."""
    with RunWriter(tmp_path, 0, {"recipe": "delayed"}) as writer:
        row = {"step": 0, "rank": 0, "layer": HOSTILE, "tensor": "weight", "nan": 5, "numel": 10, "inf": 0, "zeros": 0}
        writer.append("tensors", [{**row, "recipe": "delayed", "format": "e4m3", "microbatch": 0, "call": 0}])

    async def look(app: Watch, pilot: Pilot[None]) -> None:
        shown = rows(app, "findings") + rows(app, "worst")
        assert any("[bold]layers.0[/bold]" in cell for row in shown for cell in row)
        assert not any("\x1b" in cell for row in shown for cell in row)

    show(tmp_path, look)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_it_fits_a_small_terminal(folder: Path, size: tuple[int, int]) -> None:
    """Everything is on the screen at 80 columns; nothing is wider than it."""

    async def look(app: Watch, pilot: Pilot[None]) -> None:
        for widget in app.query("Static, Sparkline, DataTable, Footer"):
            assert widget.region.bottom <= size[1]
            assert widget.region.right <= size[0]
            assert widget.region.height > 0

    show(folder, look, size)


def test_looking_is_rationed() -> None:
    """After a look that took a second of CPU the next comes when that is its share of the time."""
    ration = Ration(share=0.02, seconds=0.0)
    assert ration.is_due()
    ration.spent(0.002)
    assert not ration.is_due()
    time.sleep(0.12)
    assert ration.is_due()


def test_a_snapshot_is_plain_data(folder: Path) -> None:
    """What `watch --json` prints."""
    found = json.loads(json.dumps(snapshot(folder)))
    assert found["pulse"]["step"] == 119
    assert found["findings"][0]["layer"] == "layers.1.up"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("sys.modules['textual'] = None", "textual is not installed. pip install 'fp8dbg[watch]' brings it."),
        ("pass", "fp8dbg watch needs a terminal."),
    ],
)
def test_what_is_missing_is_a_sentence(folder: Path, code: str, says: str) -> None:
    """The library, or the terminal."""
    done = in_a_process("watch", folder, before=code)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
