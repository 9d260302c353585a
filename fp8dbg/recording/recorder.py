"""From hook calls to the books: which step, which microbatch, which call; what is finished, and when it is written."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fp8dbg.recording.books import Books
from fp8dbg.recording.calls import Call
from fp8dbg.recording.copies import next_pass
from fp8dbg.recording.extents import LastSeen
from fp8dbg.recording.guard import guarded, logger, sentence
from fp8dbg.recording.layer import Layer
from fp8dbg.recording.ledger import Ledger, Row
from fp8dbg.recording.module_hooks import ModuleHandle, hook_module
from fp8dbg.recording.names import matches, named_layers
from fp8dbg.recording.probe import Probe, Probing
from fp8dbg.recording.silence import Silence
from fp8dbg.recording.steps import Optimizers
from fp8dbg.recording.watch import Watch

if TYPE_CHECKING:
    from fp8dbg.recording.sampling import Sampling
    from fp8dbg.runs.writer import RunWriter

_MOST_CALLS = 4096
"""Finished calls kept before they become rows; and calls kept that no gradient can reach."""

_MOST_ON_DEVICE = 1 << 15
"""The same where amaxes wait on an accelerator: reaching it costs one wait for the device."""

_VITAL = frozenset({"root_finished", "optimizer_stepped", "next_step"})
"""Methods without which no row could say which step it is of."""


@dataclass
class Parts:
    """What a recorder works with; ``Session`` puts them together.

    ``layers``: globs of the layers to record; ``dump``: ``layer:tensor`` globs saved on every step measured in full.
    """

    writer: RunWriter
    sampling: Sampling
    ledger: Ledger
    probing: Probing
    optimizers: Optimizers
    layers: tuple[str, ...] = ("*",)
    dump: tuple[str, ...] = ()


class Recorder:
    """Adapters announce layers and bring calls; it keeps step, microbatch and call, and has the books written.

    For adapters: ``unclaimed``, ``watch``, ``hook``, ``event``, ``begin_microbatch`` and ``end_step``. The rest serves
    the session and the watches. What training calls is guarded.

    Args:
        parts: what it works with.
        first_step: number of the first step.
    """

    def __init__(self, parts: Parts, first_step: int = 0) -> None:
        self.off: set[str] = set()
        self.parts, self.writer, self.sampling = parts, parts.writer, parts.sampling
        self.ledger, self.probing = parts.ledger, parts.probing
        self.watches: list[Watch] = []
        self._claimed: set[int] = set()
        self.books = Books(parts.writer, parts.sampling, parts.ledger, parts.dump, self._say)
        self.inputs = LastSeen()
        self.step, self.microbatch, self.tick = first_step, 0, 0
        self.calls = self._calls_at_root = self._calls_at_step = 0
        self.places = count()
        self.stepped: set[int] = set()
        self._last_stepped: set[int] = set()
        self._by_hand = self._own_microbatches = False
        self.on_host = True
        self.waiting: deque[Call] = deque(maxlen=_MOST_CALLS)
        self.silence = Silence()
        self.spent, self._began = 0.0, time.perf_counter()
        self.paused = self.sampled = False
        self.asked: Callable[[], str | None] | None = None
        self.described: Callable[[], None] | None = None
        self.reason: str | None = None

    # For adapters.

    def unclaimed(self, model: nn.Module, claims: Callable[[nn.Module], bool]) -> Iterator[tuple[str, str, nn.Module]]:
        """Canonical name, path and module of each module that was asked for, that fits, and that nobody watches yet."""
        for name, path, module in named_layers(model):
            if id(module) not in self._claimed and matches(name, self.parts.layers) and claims(module):
                yield name, path, module

    def watch(self, layer: Layer) -> Watch:
        """Announce a layer. The adapter then tells the watch of each call (``Watch.forward``)."""
        self._claimed.add(id(layer.module))
        watch = Watch(layer, self, len(self.watches))
        self.watches.append(watch)
        return watch

    def hook(self, layer: Layer) -> ModuleHandle:
        """Announce a layer whose calls are its module's: a forward hook finds the tensors by ``Layer.pick``."""
        return hook_module(self.watch(layer))

    def give_up(self, name: str, module: nn.Module, error: Exception) -> None:
        """Say that a module cannot be attached to; it stays claimed, so that nobody takes it for something else."""
        self._claimed.add(id(module))
        logger.warning("fp8dbg: %s is not recorded (%s: %s)", name, type(error).__name__, error, exc_info=error)
        self.lost_at(name, "everything about it", error)

    def event(self, kind: str, layer: str | None, detail: str) -> None:
        """Record that something happened or is not seen: kind is gap, error, trigger, config, ..."""
        self.writer.event(self.step, kind, layer, detail)

    def begin_microbatch(self, index: int) -> None:
        """Say which microbatch the calls from here on belong to.

        For hosts that interleave them (pipeline parallelism), or whose backward does not pass through
        ``torch.autograd.backward``. From the first use on, backward roots are not counted.
        """
        self._own_microbatches = True
        self.microbatch = index
        self.tick += 1
        next_pass()

    def end_step(self) -> None:
        """Say that the step is over. From the first use on, optimizers are not counted."""
        just_ended = bool(self._last_stepped) and not self._by_hand and self.idle()
        self._by_hand = True
        if not just_ended:
            self.next_step()

    def in_order(self) -> list[Watch]:
        """The layers in the order of their first calls; one that was not called yet follows the one before it."""
        place, found = -1, []
        for watch in self.watches:
            place = place if watch.place is None else watch.place
            found.append((place, watch))
        return [watch for _, watch in sorted(found, key=itemgetter(0))]

    # For watches and probes.

    def finish(self, call: Call) -> None:
        """This call is part of a training pass: of the microbatch whose backward this is."""
        call.finished = call.watch.seen = True
        if call.microbatch != self.microbatch and call.step == self.step and not self._own_microbatches:
            call.microbatch, call.index = self.microbatch, call.watch.next_index()  # forwards went ahead of backwards
        self.books.add(call)
        self.calls += 1

    def probe(self, call: Call, weight: Tensor | None) -> Probe | None:
        """What measures this call in full, or None where that was not asked for."""
        if self.asked is not None:
            self.look_what_is_asked()
        if not matches(call.watch.layer.name, self.sampling.settings.layers):
            return None
        return Probe(self.probing, self, call, weight)

    @guarded("whether FP8 was asked for")
    def look_what_is_asked(self) -> None:
        """Once, in the first call that is measured: an autocast shows only from the inside."""
        asked, self.asked = self.asked, None
        said = asked() if asked is not None else None
        if said is not None:
            self.writer.update_fingerprint(fp8_asked=said)

    def lost(self, what: str, error: Exception) -> None:
        """Record that something, of no layer in particular, is no longer seen; without steps there is nothing."""
        self.event("error", None, sentence(what, error))
        self.paused = self.paused or not _VITAL.isdisjoint(self.off)

    def lost_at(self, layer: str, what: str, error: Exception) -> None:
        """Record that something of a layer is no longer seen."""
        self.event("error", layer, sentence(what, error))

    @guarded("what is logged")
    def logged(self, values: Row) -> None:
        """Figures the user gives: of this step, or of the last one where this one has not begun."""
        self.books.log.log(values, late=self.idle())

    def idle(self) -> bool:
        """Whether the step that began has seen no training yet."""
        return self.calls == self._calls_at_step

    # Boundaries.

    @guarded("what follows the end of a backward pass")
    def root_finished(self, tensors: Any) -> None:
        """A backward pass has finished: the microbatch is over, if any of it was ours."""
        if self.paused or self.calls == self._calls_at_root:
            return
        start = time.perf_counter()
        self._calls_at_root = self.calls
        self.books.take_loss(self.microbatch, tensors)
        for call in self.waiting:
            if not call.finished:
                self.finish(call)
        self.waiting.clear()
        next_pass()
        if not self._own_microbatches:
            self.microbatch += 1
            self.tick += 1
        if self.sampled or len(self.books) >= (_MOST_CALLS if self.on_host else _MOST_ON_DEVICE):
            self.books.settle()
        self.spent += time.perf_counter() - start

    @guarded("what follows the optimizer's next step")
    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped: the step is over when all of this model's have, or when one steps again."""
        if self._by_hand:
            return
        if not self.parts.optimizers.ours(optimizer):
            if self.parts.optimizers.not_given(optimizer):
                self._say_not_counted(optimizer)
            return
        flag = getattr(optimizer, "found_inf", None)  # a fused optimizer leaves its step out by itself, on its device
        if isinstance(flag, Tensor) and not self.paused:
            self.books.left_out(self.step - self._is_late(optimizer), flag)
        key = id(optimizer)
        if key in self.stepped:
            self.next_step()
        elif self._is_late(optimizer):
            self._last_stepped.add(key)
            return
        self.stepped.add(key)
        if len(self.stepped) >= self.parts.optimizers.count():
            self.next_step()

    def _is_late(self, optimizer: Optimizer) -> bool:
        """Whether this is one more optimizer of the step that has just ended."""
        known = id(optimizer) in self._last_stepped
        return bool(self._last_stepped) and not known and not self.stepped and self.idle()

    @guarded("steps that a gradient scaler leaves out")
    def step_left_out(self, optimizer: Optimizer) -> None:
        """A gradient scaler has not called this optimizer: where steps are counted, it is one all the same."""
        counted = self.parts.optimizers.counted(optimizer)
        if counted is not None:
            if not self.paused:
                self.books.left_out(self.step - self._is_late(counted), True)
            self.optimizer_stepped(counted)

    @guarded("what follows the next step")
    def next_step(self) -> None:
        """Close the step's books and open the next one's."""
        start = time.perf_counter()
        if not self.paused:
            self._report_silence()
            if self.sampled or self.on_host:
                self.books.settle()
            self.spent += time.perf_counter() - start
            self.close_step(start)
            start = time.perf_counter()
        self._last_stepped, self.stepped = self.stepped, set()
        self.waiting.clear()
        self.step, self.microbatch, self.tick = self.step + 1, 0, self.tick + 1
        self._calls_at_step = self._calls_at_root = self.calls
        self.decide()
        self.spent += time.perf_counter() - start

    def decide(self) -> None:
        """Whether the step that begins is measured in full; if so, the emulated scales are brought up to date."""
        next_pass()
        self.reason = self.sampling.decide(self.step)
        self.paused = self.sampling.settings.stop or bool(self.writer.stopped) or not _VITAL.isdisjoint(self.off)
        self.sampled = self.reason is not None and not self.paused
        self.books.open(self.step, self.sampled)

    @guarded("the rows of steps")
    def close_step(self, now: float) -> None:
        """The step's own row."""
        row: Row = {
            "step": self.step,
            "rank": self.writer.rank,
            "learning_rate": self.parts.optimizers.learning_rate(),
            "seconds": now - self._began,
            "overhead_seconds": self.spent,
            "sampled": self.sampled,
            "reason": self.reason,
        }
        self._began, self.spent = now, 0.0
        self.books.close_step(row, self.sampled)
        if self.sampled or not self.sampling.settings.every:
            self.describe()

    @guarded("what run.json says of the layers")
    def describe(self) -> None:
        """Once, after the first measured step with a call, or the first of all where none is going to be measured."""
        if self.described is not None and self.calls:
            describe, self.described = self.described, None
            describe()

    def _say_not_counted(self, optimizer: Optimizer) -> None:
        detail = (
            f"Steps are not counted: {type(optimizer).__name__}, which steps the model, was not given as optimizer=, "
            "and what was given holds none of the model's parameters."
        )
        self._say(detail)

    def rewritten(self, watch: Watch) -> None:
        """A weight was written within a step: one that no optimizer ends, if that goes on."""
        detail = None if self.parts.optimizers.count() else self.silence.rewritten(watch)
        if detail is not None:
            self._say(detail)

    def _report_silence(self) -> None:
        detail = self.silence.after_step(self.watches)
        if detail is not None:
            self._say(detail)

    def _say(self, detail: str) -> None:
        self.event("gap", None, detail)
        logger.warning("fp8dbg: %s", detail)

    def close(self) -> None:
        """Write what is finished. A step that no optimizer has ended yet is written as far as it came."""
        self.books.settle()
        if not self.idle() and not self.paused:
            self.close_step(time.perf_counter())
            self.books.settle()

    def coverage(self) -> dict[str, Any]:
        """How much of what was attached to has been seen."""
        unseen = [w.layer.name for w in self.watches if not w.seen]
        return {"layers": len(self.watches), "seen": len(self.watches) - len(unseen), "unseen": unseen[:100]}
