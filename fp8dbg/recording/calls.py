"""One call of a layer: what is known of it until its gradient arrives."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8dbg.numerics.census import Amax, amax_of
from fp8dbg.recording.guard import guarded
from fp8dbg.recording.layer import Gradients, ScaleInForce
from fp8dbg.recording.tensors import local, modes_active, undisturbed

if TYPE_CHECKING:
    from fp8dbg.recording.probe import Probe
    from fp8dbg.recording.watch import Watch


class Call:
    """One call of a layer in a training pass: what is known of it until its gradient arrives.

    It lives in the autograd graph alone, so that a pass that is never followed by a backward leaves no trace.
    """

    __slots__ = (
        "__weakref__",
        "dtype",
        "finished",
        "grad_output",
        "index",
        "input",
        "microbatch",
        "off",
        "probe",
        "read",
        "scales",
        "slot",
        "step",
        "watch",
        "weight",
    )

    def __init__(self, watch: Watch, step: int, microbatch: int, index: int) -> None:
        self.watch, self.off = watch, watch.off
        self.step, self.microbatch, self.index = step, microbatch, index
        self.input: Amax | None = None
        self.weight: Amax | None = None
        self.grad_output: Amax | None = None
        self.dtype = torch.float32
        self.scales: dict[str, ScaleInForce] | None = None
        self.probe: Probe | None = None
        self.slot = 0
        self.read: Callable[[tuple[Tensor | None, ...]], Gradients] | None = None
        self.finished = False

    def lost(self, what: str, error: Exception) -> None:
        """As the layer's."""
        self.watch.lost(what, error)

    @guarded("its gradients")
    def gradient(self, grads: tuple[Tensor | None, ...]) -> None:
        """The output's gradient has arrived: the call belongs to a training pass.

        Serves as a pre-hook of the GEMM's autograd node: there the gradient is what the GEMMs will read (after any
        tensor hook of the user's on the output), and FSDP has its weights together.
        """
        grad = grads[self.slot]
        recorder = self.watch.recorder
        if self.finished or grad is None or recorder.paused:
            return
        start = perf_counter()
        self.finished = True
        if modes_active():
            with undisturbed(grad):
                self._take(local(grad))
        else:
            self._take(local(grad))
        recorder.finish(self)
        recorder.spent += perf_counter() - start

    def _take(self, grad: Tensor) -> None:
        if self.scales is not None:
            self.scales["grad_output"] = self.watch.layer.scale("grad_output")
        if self.probe is not None:
            self.probe.gradient(grad)
        if self.grad_output is None:
            self.grad_output = amax_of(grad)

    @guarded("its grad_input and grad_weight")
    def results(self, gradients: tuple[Tensor | None, ...], _: Any) -> None:
        """The GEMMs of the backward are done; a hook of their autograd node, on sampled steps only."""
        if self.probe is not None and self.read is not None and not self.watch.recorder.paused:
            start = perf_counter()
            self.probe.results(*self.read(gradients))
            self.watch.recorder.spent += perf_counter() - start
