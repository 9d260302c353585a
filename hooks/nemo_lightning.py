"""Lightning, and NeMo 2 which stands on it: a callback that attaches, and gives loss and step."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8dbg.hooks.nemo_fallback import write_fallback

if TYPE_CHECKING:
    from fp8dbg.recording.session import Session

__all__ = ["HOST", "callback", "write_fallback"]

HOST = "nemo_lightning"


def callback(run_dir: str | Path, **options: Any) -> Any:
    """A ``lightning.pytorch.callbacks.Callback`` that records training into ``run_dir``.

    For ``Trainer(callbacks=[...])`` of Lightning and of NeMo 2 alike. ``options`` are those of ``fp8dbg.attach``:
    recipe, every, rows, layers, ... Recording starts with the fit and ends with it, whatever ends it.
    """
    return _callback_class()(run_dir, options)


@cache
def _callback_class() -> Any:
    """The class, made when it is first needed: its base is the host's."""
    from lightning.pytorch.callbacks import Callback

    class Fp8dbgCallback(Callback):  # type: ignore[misc] # the host publishes no types
        """Attaches for the duration of a fit.

        Lightning divides the loss by ``accumulate_grad_batches`` before the backward; what is recorded is the mean of
        the losses that ``training_step`` returned.
        """

        def __init__(self, run_dir: str | Path, options: dict[str, Any]) -> None:
            self.run_dir, self.options = run_dir, options
            self.session: Session | None = None
            self._losses: list[float] = []
            self._step = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Attach to the module under training, from the trainer's global step on."""
            from fp8dbg.recording.attach import attach

            self._step = trainer.global_step
            options = {"first_step": self._step, **self.options}
            self.session = attach(pl_module, self.run_dir, optimizer=list(trainer.optimizers), **options)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            """Log the loss when this batch was the last of a step."""
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is not None:
                self._losses.append(loss.detach() * trainer.accumulate_grad_batches)
            if self.session is not None and trainer.global_step != self._step:
                self._step = trainer.global_step
                if self._losses:
                    self.session.log(loss=sum(self._losses) / len(self._losses))
                self.session.log(grad_norm=trainer.callback_metrics.get("grad_norm"))
                self._losses.clear()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            """Finish the run folder."""
            self._close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            """Finish it when the fit breaks off, too."""
            self._close()

        def _close(self) -> None:
            if self.session is not None:
                self.session.close()
                self.session = None

    return Fp8dbgCallback
