"""What has been seen becomes rows: finished calls, losses, the step itself; and what triggers a closer look."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fp8dbg.recording.calls import Call
from fp8dbg.recording.dumps import Dumps
from fp8dbg.recording.guard import guarded, sentence
from fp8dbg.recording.ledger import Ledger, Row
from fp8dbg.recording.scalers import unscale
from fp8dbg.recording.steps import StepLog
from fp8dbg.recording.tensors import modes_active, undisturbed
from fp8dbg.recording.triggers import Losses, Ring, past_limit

if TYPE_CHECKING:
    from fp8dbg.recording.sampling import Sampling
    from fp8dbg.runs.writer import RunWriter

_LEFT_OUT = "A gradient scaler left the optimizer's step out: the gradients held Inf or NaN."


class Books:
    """A session's rows before they are written. What training calls is guarded.

    Args:
        writer, sampling, ledger: the run folder, what is asked for, and the emulated scales.
        dump: ``layer:tensor`` globs saved on every step measured in full.
        say: told what is not seen, in a sentence for the user.
    """

    def __init__(
        self,
        writer: RunWriter,
        sampling: Sampling,
        ledger: Ledger,
        dump: tuple[str, ...],
        say: Callable[[str], None],
    ) -> None:
        self.off: set[str] = set()
        self.writer, self.sampling, self.ledger = writer, sampling, ledger
        self.log, self.dumps, self.ring = StepLog(writer, self.loss_seen), Dumps(), Ring()
        self.step = 0
        self._dump, self._say = dump, say
        self._losses = Losses()
        self._done: list[Call] = []
        self._factors: dict[int, float | Tensor] = {}
        self._left_out: list[tuple[int, bool | Tensor]] = []
        self._last_left_out = -1
        self._told_unknown = False

    def lost(self, what: str, error: Exception) -> None:
        """Record that something, of no layer in particular, is no longer seen."""
        self.writer.event(self.step, "error", None, sentence(what, error))

    def __len__(self) -> int:
        """How many calls are finished and no rows yet."""
        return len(self._done)

    def add(self, call: Call) -> None:
        """A call is finished."""
        self._done.append(call)

    @guarded("the loss of backward passes")
    def take_loss(self, microbatch: int, tensors: Any) -> None:
        """The value of a backward pass's root."""
        with undisturbed(None) if modes_active() else contextlib.nullcontext():
            root = self.log.root(tensors)
        self._factors[microbatch] = root.factor
        if root.loss is None and root.factor != 1.0 and not self._told_unknown:
            self._told_unknown = True
            self._say(
                "The loss is not recorded where it is not logged: a GradScaler multiplied it, and the backward pass "
                "began from something that was made of the result. Call run.log(loss=...)."
            )

    def left_out(self, step: int, flag: bool | Tensor) -> None:
        """A gradient scaler may have left out the optimizer's part of a step: where the flag is set, it has."""
        self._left_out.append((step, flag))

    def open(self, step: int, sampled: bool) -> None:
        """The step that begins. After a trigger its tensors are saved at once; before one they are kept, in case."""
        self.step = step
        self._factors.clear()
        if sampled:
            self.settle()
            asked, after = self.sampling.settings.trigger_dump, self.sampling.follows_trigger(step)
            self.dumps = Dumps((*self._dump, *self.sampling.once, *(asked if after else ())))
            self.ring.open(() if after else asked)

    def settle(self) -> None:
        """Turn finished calls into rows and hand them to the writer; waits for an accelerator."""
        done, self._done = self._done, []
        self.write_amaxes(done)
        self.write_figures(done)
        self.write_losses()
        self.write_left_out()

    @guarded("amax")
    def write_amaxes(self, done: list[Call]) -> None:
        """Rows of ``amax``; the emulated scales move on."""
        if done:
            rows = self.ledger.settle(done)
            self.writer.append("amax", rows)
            bad = next((row for row in rows if row["nan"]), None)
            if bad is not None:
                self.trigger(bad["step"], bad["layer"], f"{bad['tensor']} of {bad['layer']} holds {bad['nan']} NaN.")

    @guarded("what is measured in full")
    def write_figures(self, done: list[Call]) -> None:
        """Rows of ``tensors`` and ``gemms``."""
        for call in done:
            if call.probe is not None:
                taken = call.probe.take()
                for table, row in taken:
                    if table == "gemms":
                        unscale(row, self._factors.get(call.microbatch, 1.0))
                    self.writer.append(table, [row])
                self.look_at_figures(call, [row for table, row in taken if table == "tensors"])

    def look_at_figures(self, call: Call, rows: list[Row]) -> None:
        """A figure of an operand past its limit triggers; those of the results come later and are not looked at."""
        limits = self.sampling.settings.figure_limits
        if limits and (found := past_limit(rows, limits)) is not None:
            self.trigger(call.step, *found)

    @guarded("losses that are on a device")
    def write_losses(self) -> None:
        """Rows of ``steps`` that had to wait."""
        self.log.settle()

    @guarded("steps that a gradient scaler left out")
    def write_left_out(self) -> None:
        """Events of steps that no optimizer took."""
        flags, self._left_out = self._left_out, []
        for step, flag in flags:
            if step != self._last_left_out and flag:
                self._last_left_out = step
                self.writer.event(step, "left_out", None, _LEFT_OUT)

    def close_step(self, row: Row, sampled: bool) -> None:
        """The step's own row; after a step measured in full everything is on disk."""
        self.log.close_step(row)
        if sampled:
            self.write_losses()
            self.writer.flush()

    def loss_seen(self, step: int, loss: float) -> None:
        """The loss of a step is known: a spike, or what is not finite, triggers."""
        why = self._losses.unusual(step, loss, float(self.sampling.settings.spike))
        if why is not None:
            self.trigger(step, None, why)

    def trigger(self, step: int, layer: str | None, why: str) -> None:
        """Measure the next steps in full and save the tensors that the ring holds; unless it is too soon for that."""
        if self.sampling.trigger(self.step):
            first, last = self.step + 1, self.step + self.sampling.settings.trigger_steps
            self.writer.event(step, "trigger", layer, f"{why} Steps {first} to {last} are measured in full.")
            self.ring.save(self.writer)
