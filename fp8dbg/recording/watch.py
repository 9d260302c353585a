"""One layer while training: which of its calls are training, which are recomputation, and which gradient is whose."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8dbg.numerics.census import Amax, amax_of
from fp8dbg.recording.calls import Call
from fp8dbg.recording.guard import guarded
from fp8dbg.recording.layer import Layer
from fp8dbg.recording.passes import checkpointed, in_function, will_be_repeated
from fp8dbg.recording.repeats import DIFFERS, Repeats
from fp8dbg.recording.tensors import gemm_node, local, modes_active, undisturbed

if TYPE_CHECKING:
    from fp8dbg.numerics.recipes import DelayedState, Recipe
    from fp8dbg.recording.ledger import Emulated
    from fp8dbg.recording.probe import Probe
    from fp8dbg.recording.recorder import Recorder

_graph_task = torch._C._current_graph_task_id
_grad_enabled = torch.is_grad_enabled
_OTHERWISE = (
    "Activation checkpointing ran its forward again and it read another input: elements differ by up to {:.2g} of amax."
)

_NOT_FOUND = "Grad_input and grad_weight are not seen: no GEMM was found behind the output's autograd node {}."


class Watch:
    """What the recorder keeps about one layer; made by ``Recorder.watch``.

    An adapter calls ``forward`` with the tensors of each call, or has ``Recorder.hook`` do it from a module hook.
    """

    __slots__ = (
        "_calls",
        "_owed",
        "_repeats",
        "_tick",
        "_told_step",
        "_weight",
        "_weight_stamp",
        "emulated",
        "layer",
        "number",
        "off",
        "place",
        "ran_in_fp8",
        "recorder",
        "seen",
        "states",
        "told",
        "weight_probe",
        "weight_row_step",
    )

    def __init__(self, layer: Layer, recorder: Recorder, number: int = 0) -> None:
        self.layer, self.recorder, self.number = layer, recorder, number
        self.off: set[str] = set()
        self.place: int | None = None  # among the recorder's layers, by their first calls
        self.seen = self.told = False
        self.ran_in_fp8: bool | None = None  # not known before its first call
        self.states: dict[tuple[str, str], DelayedState] = {}
        self.emulated: tuple[Recipe | None, tuple[Emulated, ...]] | None = None
        self._calls, self._tick = 0, -1
        self._weight: Amax | None = None
        self._weight_stamp, self.weight_row_step = (-1, 0), -1
        self.weight_probe: weakref.ref[Probe] | None = None
        self._owed: deque[tuple[int, int, int]] = deque(maxlen=1024)
        self._repeats, self._told_step = Repeats(), -1

    def lost(self, what: str, error: Exception) -> None:
        """Record that something of this layer is no longer seen."""
        self.recorder.lost_at(self.layer.name, what, error)

    @guarded("a look ahead at its operands")
    def coming(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The module is about to be called: take the amaxes that ``called`` will ask for, if it will."""
        recorder = self.recorder
        if recorder.sampled:
            self.compare(self.layer.ahead(args, kwargs)[0])
        if recorder.paused or recorder.sampled or modes_active():
            return
        if not (_grad_enabled() if _graph_task() == -1 else self._owed):
            return
        start = perf_counter()
        x, weight = self.layer.ahead(args, kwargs)
        if isinstance(x, Tensor) and x.is_floating_point():
            recorder.inputs.amax(local(x))
        if weight is not None:
            self._weigh(None)
        recorder.spent += perf_counter() - start

    @guarded("its calls")
    def called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """A call of the module, the tensors still to be picked."""
        place = self._place()
        compared = self.recorder.sampled and not self.layer.looks_ahead
        if place is None and not compared:
            return
        x, y = self.layer.pick(args, kwargs, output)
        if compared:
            self.compare(x)
        if place is not None:
            self._take(place, x, y, None)

    @guarded("its calls")
    def forward(self, input: Any, output: Any, weight: Tensor | None = None) -> Call | None:
        """A call of the layer with these tensors; to be called inside the module's forward or its forward hook.

        Args:
            input, output: the GEMM's, any shape with features last; None where it cannot be seen. Where the output
                carries an autograd node, its gradient is followed.
            weight: for a host whose weight is not the layer's (a tied output layer); else the layer is asked.

        Returns:
            The call, whose ``gradient`` a host without a visible output gradient may call itself, with a tuple that
            holds it; None when this pass is not recorded: evaluation, recomputation, a paused recorder.
        """
        place = self._place()
        if self.recorder.sampled:
            self.compare(input)
        return None if place is None else self._take(place, input, output, weight)

    @guarded("whether activation checkpointing repeats its forward")
    def compare(self, x: Any) -> None:
        """On a sampled step: remember what a checkpointed first pass reads, or compare what its repetition reads.

        Before the module's call where that is possible: a recompute ends inside the last layer it needs.
        """
        again, start = _graph_task() != -1, perf_counter()
        if self.recorder.paused or not (again or will_be_repeated()):
            return
        if isinstance(x, Tensor) and x.is_floating_point():
            with undisturbed(x):
                if again:
                    self._tell_of(self._repeats.again(self.recorder.step, local(x)))
                else:
                    self._repeats.first(self.recorder.step, local(x))
        self.recorder.spent += perf_counter() - start

    def _tell_of(self, difference: float | None) -> None:
        """Once a step: what one layer reads otherwise, the next ones do as well."""
        if difference is not None and difference > DIFFERS and self._told_step != self.recorder.step:
            self._told_step = self.recorder.step
            self.recorder.event("recompute", self.layer.name, _OTHERWISE.format(difference))

    def _place(self) -> tuple[int, int] | None:
        """Microbatch and index of this call, or None if it is not to be recorded (now)."""
        recorder = self.recorder
        if recorder.paused:
            return None
        if _graph_task() != -1:
            return self._recomputed()
        if not _grad_enabled():
            if in_function():
                self._owed.append((recorder.step, recorder.microbatch, self.next_index()))
            return None
        if recorder.stepped and self.layer.module.training:
            recorder.next_step()
        return recorder.microbatch, self.next_index()

    def next_index(self) -> int:
        """Counts the calls of a microbatch; those in evaluation mode, most likely no training, are not counted."""
        recorder = self.recorder
        if self._tick != recorder.tick:
            if self.place is None:
                self.place = next(recorder.places)
            self._tick, self._calls = recorder.tick, 0
        index = self._calls
        if self.layer.module.training:
            recorder.calls += 1
            self._calls = index + 1
        return index

    def _recomputed(self) -> tuple[int, int] | None:
        """Running inside a backward: None where the first pass was recorded, else the place that pass left open.

        Reentrant checkpointing runs its first pass without a graph; its second is the one whose gradients come. Within
        a microbatch the last call made is the first to be recomputed; microbatches come back in order.
        """
        recorder = self.recorder
        if checkpointed("_recomputation_hook"):
            return None
        while self._owed and self._owed[0][0] != recorder.step:
            self._owed.popleft()
        if not self._owed:
            return None
        microbatches = [microbatch for _, microbatch, _ in self._owed]
        mine = recorder.microbatch if recorder.microbatch in microbatches else microbatches[0]
        place = max(i for i, microbatch in enumerate(microbatches) if microbatch == mine)
        _, microbatch, index = self._owed[place]
        del self._owed[place]
        return microbatch, index

    def _take(self, place: tuple[int, int], x: Any, y: Any, weight: Tensor | None) -> Call | None:
        start = perf_counter()
        recorder = self.recorder
        call = Call(self, recorder.step, *place)
        if modes_active():
            with undisturbed(next((t for t in (y, x) if isinstance(t, Tensor)), None)):
                self._measure(call, x, y, weight)
        else:
            self._measure(call, x, y, weight)
        self._follow(call, y)
        recorder.spent += perf_counter() - start
        return call

    def _measure(self, call: Call, x: Any, y: Any, weight: Tensor | None) -> None:
        recorder, layer = self.recorder, self.layer
        made = y if isinstance(y, Tensor) else x
        if isinstance(made, Tensor):
            if not layer.as_given:
                call.dtype = made.dtype
            recorder.on_host &= made.is_cpu
        self._weigh(weight)
        call.weight = self._weight
        if layer.recipe is not None:
            call.scales = {"input": layer.scale("input"), "weight": layer.scale("weight")}
        if recorder.sampled:
            call.probe = recorder.probe(call, weight)
            if call.probe is not None:
                call.probe.forward(x, y)
        if isinstance(x, Amax):
            call.input = x
        elif call.input is None and isinstance(x, Tensor) and x.is_floating_point():
            call.input = recorder.inputs.amax(local(x))

    def _weigh(self, given: Tensor | None) -> None:
        """The weight's amax, once a step."""
        stamp = self._stamp(given)
        if self._weight_stamp != stamp:
            if self._weight_stamp[0] == stamp[0]:
                self.recorder.rewritten(self)
            weight = self.layer.weight() if given is None else given
            self._weight = None if weight is None else amax_of(local(weight))
            self._weight_stamp = stamp

    def _stamp(self, given: Tensor | None) -> tuple[int, int]:
        """Changes with the step, and within it where somebody writes into the weight: an LBFGS step is many passes."""
        held = self.layer.module._parameters.values() if given is None else (given,)
        versions = [local(p)._version for p in held if p is not None and not p.is_inference()]
        return self.recorder.step, sum(versions)

    def _follow(self, call: Call, y: Any) -> None:
        """Have the gradient find the call; a call that no gradient can reach waits for its microbatch's backward.

        At the GEMM's own node, where it is found: an output that is a view loses its node to an in-place activation.
        """
        node = y.grad_fn if isinstance(y, Tensor) and y.requires_grad else None
        if node is None:
            if self.layer.module.training:
                self.recorder.waiting.append(call)
            return
        found = gemm_node(node, self.layer.nodes, self.layer.passing)
        if found is None:
            call.slot = y.output_nr
            self._tell_not_found(node.name())
        else:
            node, call.slot = found
        node.register_prehook(call.gradient)
        if call.probe is not None and found is not None:
            call.read = self.layer.reader(node)
            call.probe.shadows.real_to_come = True
            node.register_hook(call.results)

    def _tell_not_found(self, name: str) -> None:
        if self.layer.gemms and not self.told:
            self.told = True
            self.recorder.event("gap", self.layer.name, _NOT_FOUND.format(name))
