"""``fp8dbg watch``: a live run in the terminal, and the keys that tell it to measure more."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Sparkline, Static

from fp8dbg.errors import Fp8dbgError, UsageError
from fp8dbg.recording.control import Control
from fp8dbg.render.live import (
    HEAVY_SECONDS,
    HEAVY_SHARE,
    LIGHT_SECONDS,
    LIGHT_SHARE,
    Judgement,
    Pulse,
    Ration,
    changed,
    judgement,
    pulse,
)
from fp8dbg.render.names import shorten
from fp8dbg.render.terminal import STYLES

T = TypeVar("T")

USUAL = 100
"""Cadence that a run with none is given."""

FIGURES = ("underflow_ratio", "saturated_ratio", "scale_delta", "rel_l2")
TITLES = ("underflow", "saturated", "log2 off", "rel_l2")
BESIDE_A_LAYER = 58
"""Cells that the other columns of the wider table take: the name of a layer gets the rest, so that 80 suffice."""


class Watch(App[None]):
    """The live view of one run folder.

    Args:
        folder: the run folder.
    """

    CSS = """
    Screen { layout: vertical; }
    #facts, #headline, #losses { height: auto; padding: 0 1; }
    #headline { text-style: bold; }
    Sparkline { height: 3; margin: 0 1; }
    DataTable { height: 1fr; min-height: 4; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,m", "cadence(True)", "more often", key_display="m"),
        Binding("minus,l", "cadence(False)", "less often", key_display="l"),
        Binding("d", "dump", "dump tensor"),
        Binding("s", "pause", "stop/go"),
        Binding("u", "reset", "undo"),
        Binding("q", "quit", "quit"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._light, self._heavy = Ration(LIGHT_SHARE, LIGHT_SECONDS), Ration(HEAVY_SHARE, HEAVY_SECONDS)
        self._seen: dict[str, Any] = {}
        self._places: dict[str, list[tuple[str | None, str | None]]] = {"findings": [], "worst": []}
        self._busy = False

    def compose(self) -> ComposeResult:
        """Facts, loss, findings, worst tensors, keys."""
        yield Static("", id="facts", markup=False)
        yield Static("", id="losses", markup=False)
        yield Sparkline([], id="loss", summary_function=max)
        yield Static("looking ...", id="headline", markup=False)
        yield DataTable(id="findings", cursor_type="row", zebra_stripes=False)
        yield DataTable(id="worst", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        """Lay out the tables, and look once a second whether it is time to look."""
        self._table("findings").add_columns("", "layer", "tensor", "since", "what")
        self._table("worst").add_columns("layer", "tensor", *TITLES)
        self.set_interval(1.0, self._tick)
        self._tick()

    def _table(self, name: str) -> DataTable[Any]:
        table: DataTable[Any] = self.query_one(f"#{name}", DataTable)
        return table

    def _tick(self) -> None:
        if self._busy or not (self._light.is_due() or self._heavy.is_due()):
            return
        self._busy = True
        self._look()

    @work(thread=True)
    def _look(self) -> None:
        """In a thread of its own, so that keys are answered meanwhile."""
        try:
            now = changed(self.folder)
            if self._light.is_due():
                self._take("pulse", now, self._light, partial(pulse, self.folder), self.show_pulse)
            if self._heavy.is_due():
                self._take("judgement", now, self._heavy, partial(judgement, self.folder), self.show_judgement)
        finally:
            self._busy = False

    def _take(self, what: str, now: object, ration: Ration, read: Callable[[], T], show: Callable[[T], None]) -> None:
        """Read and show, unless nothing has been written since the last time.

        The first look is not charged: it imports what looking takes, which would make the second wait for a minute.
        """
        used, first = time.process_time(), what not in self._seen
        try:
            if self._seen.get(what) != now:
                found = read()
                self._seen[what] = now
                self.call_from_thread(show, found)
        except Fp8dbgError as error:
            self.call_from_thread(self._say, str(error))
        ration.spent(0.0 if first else time.process_time() - used)

    def show_pulse(self, now: Pulse) -> None:
        """State, step and loss."""
        losses = [loss for loss in now.losses if loss is not None]
        step = "no step yet" if now.step is None else f"step {now.step}"
        measured = "" if now.sampled_step is None else f" · measured in full at {now.sampled_step}"
        self._write("facts", f"{shorten(now.path, 60)} · {now.state} · {step}{measured} · {self._cadence()}")
        self._write("losses", _loss_line(now, losses))
        self.query_one("#loss", Sparkline).data = losses

    def show_judgement(self, now: Judgement) -> None:
        """Headline and tables; the cursor stays where it was."""
        self._write("headline", now.headline)
        width = max(12, self.size.width - BESIDE_A_LAYER)

        def named(layer: str | None) -> str | None:
            return None if layer is None else shorten(layer, width)

        findings = [
            (
                (f.layer, f.tensor),
                [Text(f.severity, STYLES[f.severity]), named(f.layer), f.tensor or f.gemm, f.first_step, f.title],
            )
            for f in now.findings
        ]
        worst = [((r["layer"], r["tensor"]), [named(r["layer"]), r["tensor"], *map(r.get, FIGURES)]) for r in now.worst]
        self._fill("findings", findings)
        self._fill("worst", worst)

    def _fill(self, name: str, rows: list[tuple[tuple[str | None, str | None], list[Any]]]) -> None:
        table = self._table(name)
        at = table.cursor_row
        table.clear()
        for _, cells in rows:
            table.add_row(*(cell if isinstance(cell, Text) else Text(_cell(cell)) for cell in cells))
        self._places[name] = [place for place, _ in rows]
        table.move_cursor(row=min(at, max(0, len(rows) - 1)))

    def _write(self, name: str, text: str) -> None:
        self.query_one(f"#{name}", Static).update(text)

    def _say(self, sentence: str) -> None:
        self.notify(sentence, markup=False)

    def _cadence(self) -> str:
        try:
            every = self._settings()["every"]
        except Fp8dbgError:
            return "its control file cannot be read"
        return f"every {every}" if every else "measures nothing in full"

    def _settings(self) -> dict[str, Any]:
        return {row["setting"]: row["value"] for row in Control(self.folder).in_force()}

    def _tell(self, **values: Any) -> None:
        """Change the control file, and say what was written or why not."""
        try:
            control = Control(self.folder)
            control.change(values)
            told = ", ".join(f"{name} = {value}" for name, value in values.items())
            self._say(f"{told}: {'the run is finished' if control.finished else 'the run follows within a second'}.")
            self._seen.clear()
        except Fp8dbgError as error:
            self._say(str(error))

    def action_cadence(self, more: bool) -> None:
        """Measure in full twice, or half, as often."""
        try:
            every = int(self._settings()["every"])
        except Fp8dbgError as error:
            self._say(str(error))
            return
        self._tell(every=(max(1, every // 2) if more else every * 2) or USUAL)

    def action_dump(self) -> None:
        """Save the tensor under the cursor whole, once, at the next step."""
        name = "findings" if self._table("findings").has_focus else "worst"
        places, at = self._places[name], self._table(name).cursor_row
        layer, tensor = places[at] if at < len(places) else (None, None)
        if layer is None or tensor is None:
            self._say("Choose a row with a layer and a tensor: Tab changes the table, the arrows the row.")
        else:
            self._tell(dump=[f"{layer}:{tensor}"])

    def action_pause(self) -> None:
        """Stop recording, or go on."""
        try:
            self._tell(stop=not self._settings()["stop"])
        except Fp8dbgError as error:
            self._say(str(error))

    def action_reset(self) -> None:
        """Forget what the control file said."""
        try:
            Control(self.folder).reset()
            self._say("As attached again.")
            self._seen.clear()
        except Fp8dbgError as error:
            self._say(str(error))


def watch(folder: Path) -> None:
    """Show a run until q is pressed.

    Raises:
        RunFolderError: it is no run folder.
        UsageError: this is no terminal.
    """
    Control(folder)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("fp8dbg watch needs a terminal.", "fp8dbg watch RUN --json prints what it would show, once.")
    Watch(folder).run()


def _loss_line(now: Pulse, losses: list[float]) -> str:
    if not losses:
        return "no loss recorded yet"
    norms = [norm for norm in now.grad_norms if norm is not None]
    norm = f" · gradient norm {norms[-1]:.4g}" if norms else ""
    span = f"over {len(now.losses)} steps {min(losses):.4g} to {max(losses):.4g}"
    return f"loss {losses[-1]:.5g} · {span}{norm}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else shorten(str(value), 60)
