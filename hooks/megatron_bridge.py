"""Megatron-Bridge: a callback that attaches, and gives loss, gradient norm and step.

Written by the callback protocol of Megatron-Bridge 0.3 (``megatron.bridge.training.callbacks``).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from fp8dbg.recording.session import Session

__all__ = ["HOST", "callback"]

HOST = "megatron_bridge"


def callback(run_dir: str | Path, **options: Any) -> Any:
    """A ``megatron.bridge.training.callbacks.Callback`` that records training into ``run_dir``.

    For ``pretrain(config, forward_step_func, callbacks=[...])``. ``options`` are those of ``fp8dbg.attach``: recipe,
    every, rows, layers, ... A model of several chunks (interleaved pipeline stages) is recorded as one.
    """
    return _callback_class()(run_dir, options)


@cache
def _callback_class() -> Any:
    """The class, made when it is first needed: its base is the host's."""
    from megatron.bridge.training.callbacks import Callback

    class Fp8dbgCallback(Callback):  # type: ignore[misc, unused-ignore] # the host may be absent
        """Attaches from the start of the training loop to its end.

        Megatron's optimizer is none of torch's, so a step ends when the loop says so. The loss is the first of the
        reduced ones that the step returned, of the ranks that have it (the last pipeline stage).
        """

        def __init__(self, run_dir: str | Path, options: dict[str, Any]) -> None:
            self.run_dir, self.options = run_dir, options
            self.session: Session | None = None

        def on_train_start(self, context: Any) -> None:
            """Attach to the model's chunks, from the training's step on."""
            from fp8dbg.recording.attach import attach

            chunks = list(context.model)
            model = chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
            self.session = attach(model, self.run_dir, **{"first_step": context.state.train_state.step, **self.options})

        def on_train_step_end(self, context: Any) -> None:
            """Log loss and gradient norm, and end the step; one that was skipped (a NaN in its gradients) counts."""
            if self.session is None:
                return
            loss = next(iter((context.loss_dict or {}).values()), None)
            self.session.log(loss=loss, grad_norm=context.grad_norm)
            self.session.step()

        def on_train_end(self, context: Any) -> None:
            """Finish the run folder; where training breaks off instead, the process's end does."""
            if self.session is not None:
                self.session.close()
                self.session = None

    return Fp8dbgCallback
