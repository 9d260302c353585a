"""``Session``: hooks go on, hooks come off, and training is what it would have been."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import import_module
from typing import Any, Protocol

from torch import nn

from fp8dbg.errors import UnknownNameError
from fp8dbg.recording import boundaries
from fp8dbg.recording.guard import logger, report
from fp8dbg.recording.layer import OperandsOnly
from fp8dbg.recording.names import matches
from fp8dbg.recording.recorder import Parts, Recorder
from fp8dbg.recording.shadows import KEPT_BYTES
from fp8dbg.recording.steps import numbers
from fp8dbg.recording.triggers import RING_BYTES
from fp8dbg.recording.watch import Watch


class _Handle(Protocol):
    def remove(self) -> None: ...


class Session:
    """A recording in progress, made by ``attach``. As a context manager it closes itself; errors of yours pass through.

    Attributes:
        recorder: what adapters talk to.
        path: the run folder.
    """

    def __init__(self, parts: Parts, first_step: int) -> None:
        self.recorder = Recorder(parts, first_step)
        self.path = parts.writer.path
        self._parts = parts
        self._handles: list[_Handle] = []
        self._closed = False

    def start(self, model: nn.Module, also: Iterable[type[nn.Module]]) -> None:
        """Put the hooks on: each host's adapter takes the modules it claims, the general one what is left."""
        recorder = self.recorder
        for adapter in _adapters():
            try:
                self._handles.append(adapter.attach(model, recorder))
            except Exception as error:  # noqa: BLE001  a host we cannot read must not stop the training
                report(recorder, f"what the adapter for {adapter.HOST} would record", error)
        types = tuple(also)
        for name, path, module in list(recorder.unclaimed(model, lambda m: isinstance(m, types))):
            self._handles.append(recorder.hook(OperandsOnly(name, module, path)))
        recorder.asked = _asked(model)
        kept = KEPT_BYTES - (RING_BYTES if self._parts.sampling.settings.trigger_dump else 0)
        recorder.probing.kept_bytes = kept // max(len(recorder.watches), 1)
        self._remember()
        self._describe()
        recorder.described = self._describe
        self._say_what_is_odd(model)
        boundaries.listen(recorder)
        atexit.register(self.close)
        recorder.decide()

    def _remember(self) -> None:
        """Which layers computed in BF16 when an earlier session recorded them: FP8 begins anew in these."""
        before = {one.get("layer"): one.get("recipe") for one in self._parts.writer.facts.get("layers", ())}
        for watch in self.recorder.watches:
            if before.get(watch.layer.name, "") is None:
                watch.ran_in_fp8 = False

    def _describe(self) -> None:
        """What run.json says of the layers: at first, and again when a step was measured, for only their calls tell the
        order of execution, and in some hosts whether a layer is in FP8."""
        self._parts.writer.update_fingerprint(layers=[self._facts(watch) for watch in self.recorder.in_order()])

    def _facts(self, watch: Watch) -> dict[str, Any]:
        layer = watch.layer
        try:
            if layer.gemms and layer.weight() is None and not self.recorder.calls:
                self.recorder.event("gap", layer.name, "Its weight is not seen: it is computed or not floating point.")
            return layer.facts()
        except Exception as error:  # noqa: BLE001  an adapter's own reading of its host
            report(watch, "what run.json says of it", error)
            return {"layer": layer.name, "module": layer.path, "host": layer.host}

    def _say_what_is_odd(self, model: nn.Module) -> None:
        self._say_what_is_recorded_again()
        names = [watch.layer.name for watch in self.recorder.watches]
        for glob in (*self._parts.layers, *(one.rpartition(":")[0] for one in self._parts.dump)):
            if not any(matches(name, [glob]) for name in names) and (names or glob != "*"):
                self._warn(str(UnknownNameError("layer that is recorded here", glob, names)))
        if not names:
            self._warn("The model has no layer that could be recorded: see attach(layers=..., also=...).")
        self.recorder.silence.look_at(model)

    def _say_what_is_recorded_again(self) -> None:
        last, first = self._parts.writer.last_step, self.recorder.step
        if last is None or first > last:
            return
        detail = (
            f"The run folder holds steps up to {last} and this session counts from {first}: from there on its rows "
            f"take the place of those recorded before. To go on counting give attach(first_step={last + 1})."
        )
        self.recorder.event("config", None, detail)
        logger.warning("fp8dbg: %s", detail)

    def _warn(self, detail: str) -> None:
        self.recorder.event("gap", None, detail)
        logger.warning("fp8dbg: %s", detail)

    def log(self, *, loss: Any = None, grad_norm: Any = None, learning_rate: Any = None) -> None:
        """Give figures of the current step; after the optimizer's step, of the step that has just ended.

        Numbers or one-element tensors. A loss given here is recorded instead of the backward roots' mean. NaN and
        infinities are recorded as NULL; the step's reason says which the loss was.

        Raises:
            UsageError: something is not one number.
        """
        given = {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate}
        values = numbers(given.items())
        if not self._closed and not self.recorder.paused:
            self.recorder.logged(values)

    def step(self) -> None:
        """End the step, for a loop without a torch optimizer. From the first use on optimizers are not counted."""
        if not self._closed:
            self.recorder.end_step()

    def close(self) -> None:
        """Take the hooks off and finish the run folder. Closing twice does nothing; attaching again is possible."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        boundaries.unlisten(self.recorder)
        for handle in self._handles:
            try:
                handle.remove()
            except Exception:  # noqa: BLE001  the others must still come off
                logger.exception("fp8dbg: a hook could not be removed")
        self.recorder.close()
        facts = {"coverage": self.recorder.coverage(), "optimizers": self._parts.optimizers.names()}
        self._parts.writer.update_fingerprint(**facts)
        self._parts.writer.close()

    def _repr_html_(self) -> str:
        """The session in a notebook: where it records, how far it is, and what it sees."""
        recorder, stopped = self.recorder, self._parts.writer.stopped
        state = "closed" if self._closed else f"stopped ({stopped})" if stopped else "recording"
        facts = f"{state} · step {recorder.step} · {len(recorder.watches)} layers"
        return f"<div><p><b>{escape(str(self.path))}</b></p><p>{escape(facts)}</p></div>"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Adapter(Protocol):
    HOST: str

    def attach(self, model: nn.Module, recorder: Recorder) -> _Handle: ...


def _adapters() -> Sequence[_Adapter]:
    """The adapters, which are plug-ins of this room: found by name, so that nothing here imports a room above."""
    found: Sequence[_Adapter] = import_module("fp8dbg.hooks").adapters()
    return found


def _asked(model: nn.Module) -> Callable[[], str | None]:
    """What says where FP8 is asked for; it keeps no model alive."""
    alive = weakref.ref(model)

    def ask() -> str | None:
        model = alive()
        said: str | None = None if model is None else import_module("fp8dbg.hooks.asked").asked_for_fp8(model)
        return said

    return ask
