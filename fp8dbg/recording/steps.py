"""Which optimizers make a step, and the rows of ``steps``: loss, learning rate, time."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fp8dbg.errors import UsageError
from fp8dbg.recording.scalers import Root, root_of

if TYPE_CHECKING:
    from fp8dbg.recording.ledger import Row
    from fp8dbg.runs.writer import RunWriter


class Optimizers:
    """The optimizers whose steps are this model's.

    Args:
        model: without ``given``, an optimizer is this model's if it holds one of its parameters.
        given: one optimizer or several; wrappers (Accelerate's, Lightning's) are looked into. None: find them.

    Raises:
        UsageError: something given is no torch optimizer, so its steps cannot be seen.
    """

    def __init__(self, model: nn.Module, given: object = None) -> None:
        self._model = weakref.ref(model)
        several = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
        self._found: dict[int, Optimizer] = {}
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._given = bool(several)
        for one in several:
            optimizer = _unwrapped(one)
            self._found[id(optimizer)] = optimizer

    def ours(self, optimizer: Optimizer) -> bool:
        """Whether it is this model's; decided when it is first seen."""
        if id(optimizer) in self._found:
            return True
        if self._given or optimizer in self._strangers:
            return False
        if self._holds(optimizer):
            self._found[id(optimizer)] = optimizer
            return True
        self._strangers.add(optimizer)
        return False

    def counted(self, optimizer: Optimizer) -> Optimizer | None:
        """Whose steps are counted where this one is to step: its own, or those of one that it wraps; None: neither."""
        held = _parameters(optimizer)
        wrapped = (one for one in self._found.values() if not held.isdisjoint(_parameters(one)))
        if id(optimizer) in self._found or (known := next(wrapped, None)) is None:
            hooked = getattr(type(optimizer).step, "hooked", False)  # else nobody sees its steps
            return optimizer if hooked and self.ours(optimizer) else None
        return known

    def not_given(self, optimizer: Optimizer) -> bool:
        """Whether it steps the model, which none of those given do; True once for each."""
        if not self._given or optimizer in self._strangers:
            return False
        self._strangers.add(optimizer)
        return self._holds(optimizer) and not any(map(self._holds, self._found.values()))

    def _holds(self, optimizer: Optimizer) -> bool:
        model = self._model()
        held = _parameters(optimizer)
        return model is not None and any(id(p) in held for p in model.parameters())

    def count(self) -> int:
        """How many there are, as far as is known."""
        return len(self._found)

    def strangers(self) -> int:
        """How many have stepped that hold none of the model's parameters."""
        return len(self._strangers)

    def learning_rate(self) -> float | Tensor | None:
        """Of the first parameter group of the first optimizer."""
        for optimizer in self._found.values():
            for group in optimizer.param_groups:
                rate = group.get("lr")
                return rate.detach().clone() if isinstance(rate, Tensor) else rate
        return None

    def names(self) -> list[str]:
        """Their classes, for run.json."""
        return [type(o).__name__ for o in self._found.values()]


def _parameters(optimizer: Optimizer) -> set[int]:
    """Ids of what it updates."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _unwrapped(optimizer: object) -> Optimizer:
    found = optimizer
    while isinstance(inner := getattr(found, "optimizer", None), Optimizer) and inner is not found:
        found = inner
    if not isinstance(found, Optimizer):
        raise UsageError(
            f"optimizer= got {type(optimizer).__name__}, which is no torch optimizer.",
            "Leave it out, and call run.step() at the end of each step.",
        )
    return found


class StepLog:
    """Writes ``steps``: one row at the end of a step, another that adds to it when something is logged late.

    A loss that is on an accelerator stays there until ``settle``, and its row with it.

    Args:
        writer: where rows go.
        seen: told step and loss whenever a row with a loss is written.
    """

    def __init__(self, writer: RunWriter, seen: Callable[[int, float], None]) -> None:
        self._writer, self._seen = writer, seen
        self._losses: list[float | Tensor] = []
        self._unknown = False
        self._logged: Row = {}
        self._held: list[Row] = []
        self._last_step: int | None = None
        self._last_reason: str | None = None

    def root(self, tensors: Any) -> Root:
        """Take the value of a backward pass's root as a microbatch's loss; roots that are no scalars are none.

        Returns:
            the loss, and what a gradient scaler multiplied it by. Where the loss is not known the step has none.
        """
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not roots or not all(isinstance(t, Tensor) and t.numel() == 1 for t in roots):
            return Root(None)
        found = [root_of(t) for t in roots]
        losses = [one.loss for one in found if one.loss is not None]
        if len(losses) == len(roots):
            values = [t.item() if t.is_cpu else t.detach().float().reshape(()).clone() for t in losses]
            self._losses.append(sum(values[1:], values[0]))
        self._unknown = self._unknown or len(losses) < len(roots)
        return next((one for one in found if one.loss is None), found[0])

    def total(self) -> float | Tensor | None:
        """Sum of the roots of the step that is running, for hosts whose microbatch losses add up; None without any."""
        return sum(self._losses[1:], self._losses[0]) if self._losses and not self._unknown else None

    def log(self, values: Row, late: bool) -> None:
        """Take over values for the step that is running or, ``late``, for the one that has just ended."""
        if not late or self._last_step is None:
            self._logged |= values
            return
        for row in self._held:
            if row["step"] == self._last_step:
                row |= values
                return
        self._write({"step": self._last_step, "rank": self._writer.rank, **values}, self._last_reason)

    def close_step(self, row: Row) -> None:
        """Finish the step's row."""
        self._last_step, self._last_reason = row["step"], row.get("reason")
        losses, self._losses = self._losses if not self._unknown else [], []
        logged, self._logged, self._unknown = self._logged, {}, False
        if losses and "loss" not in logged:
            row["loss"] = sum(losses[1:], losses[0]) / len(losses)
        row |= logged
        if any(isinstance(v, Tensor) and not v.is_cpu for v in row.values()):
            self._held.append(row)
        else:
            self._write(row)

    def settle(self) -> None:
        """Write the rows whose values are still on a device; waits for it."""
        held, self._held = self._held, []
        for row in held:
            self._write(row)

    def _write(self, row: Row, sampled_because: str | None = None) -> None:
        row = {name: float(v) if isinstance(v, Tensor) else v for name, v in row.items()}
        loss = row.get("loss")
        if loss is not None and not math.isfinite(loss):
            because = row.get("reason") or sampled_because
            row["reason"] = "; ".join(filter(None, [because, f"loss is {loss}"]))
        self._writer.append("steps", [row])
        if loss is not None:
            self._seen(row["step"], loss)


def numbers(values: Iterable[tuple[str, Any]]) -> Row:
    """Values to log as they can be kept: numbers as float, one-element tensors as they are now; None is left out.

    Raises:
        UsageError: something is neither.
    """
    kept: Row = {}
    for name, value in values:
        if value is None:
            continue
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta and not value.is_complex():
            kept[name] = _number(name, value.detach()) if value.is_cpu else value.detach().clone().reshape(())
        elif isinstance(value, Tensor):
            what = f"has {value.numel()} elements" if value.numel() != 1 else "is a tensor without one real value"
            raise UsageError(f"{name} {what}.", "Log one number.")
        else:
            kept[name] = _number(name, value)
    return kept


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last where a tensor is complex
        raise UsageError(f"{name}={value!r:.100} is no number.", "Log one number.") from None
