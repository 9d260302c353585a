"""Hugging Face's Trainer: a callback that attaches, and gives loss, gradient norm and step."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8dbg.hooks.huggingface_fallback import write_fallback

if TYPE_CHECKING:
    from fp8dbg.recording.session import Session

__all__ = ["HOST", "callback", "write_fallback"]

HOST = "huggingface"


def callback(run_dir: str | Path, **options: Any) -> Any:
    """A ``transformers.TrainerCallback`` that records training into ``run_dir``.

    For ``Trainer(callbacks=[...])``. ``options`` are those of ``fp8dbg.attach``: recipe, every, rows, layers, ...
    """
    return _callback_class()(run_dir, options)


@cache
def _callback_class() -> Any:
    """The class, made when it is first needed: its base is the host's."""
    from transformers import TrainerCallback

    class Fp8dbgCallback(TrainerCallback):  # type: ignore[misc] # the host publishes no types
        """Attaches for the duration of a training.

        The Trainer scales each microbatch's loss so that they add up to the step's; their sum is what is recorded.
        """

        def __init__(self, run_dir: str | Path, options: dict[str, Any]) -> None:
            self.run_dir, self.options = run_dir, options
            self.session: Session | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Attach to the model, from the trainer's global step on."""
            from fp8dbg.recording.attach import attach

            options = {"first_step": state.global_step, **self.options}
            self.session = attach(kwargs["model"], self.run_dir, optimizer=kwargs.get("optimizer"), **options)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Log the loss of the step whose microbatches are all done."""
            if self.session is not None:
                self.session.log(loss=self.session.recorder.books.log.total())

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            """Log the gradient norm that the Trainer reports."""
            norm = (logs or {}).get("grad_norm")
            if self.session is not None and norm is not None:
                self.session.log(grad_norm=norm)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Finish the run folder."""
            if self.session is not None:
                self.session.close()
                self.session = None

    return Fp8dbgCallback
