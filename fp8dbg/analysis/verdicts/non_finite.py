"""NaN or Inf, and the first tensor in execution order that held one.

Sign: nan or inf above 0; the origin is the first such tensor of the first such step: forward layers in order (input,
weight, output), then backward in reverse (grad_output, grad_input), each layer's grad_weight after its grad_input.
Cause: overflow in the layer before the first input; in the layer itself if its input and weight are finite; in the
weight update if a weight is first (its gradient was not finite one step earlier).
Remedy: look at the origin, not at what follows it; skip the step or the batch, clip, and restore a checkpoint.
False alarm when: a loss scaler for float16 probes for overflow and skips the step: gradients of single steps hold Inf,
weights and loss stay finite. What leaves the loss finite and passes within two recorded steps is only watched, unless
every loss since is higher than those before: an FP8 cast makes a finite value of Inf, and training takes that step. So
is what is seen only on steps that a scaler left out, if there are few or training went on after them.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Row
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.wording import period
from fp8dbg.runs.schema import GEMMS

CODE = "non_finite"
EXPLAINS: frozenset[str] = frozenset(
    {"underflow", "saturation", "stale_scale", "outlier", "wrong_format", "gain_error"}
)

FORWARD = {"input": 0, "weight": 1, "output": 2}
BACKWARD = {"grad_output": 0, "grad_input": 1, "grad_weight": 2}

_SEARCH = 20
"""Steps that a scaler may leave out at the end of a run: it starts at 2^16 and halves its scale on each of them."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    """One finding: the origin. What came after it is in the evidence."""
    rows = evidence.ask("non_finite")
    if rows:
        order = evidence.layer_order
        first = min(row["step"] for row in rows)
        origin = min((r for r in rows if r["step"] == first), key=lambda r: execution_key(r, order))
        yield _finding(evidence, origin, rows)


def execution_key(row: Row, order: dict[str, int]) -> tuple[int, int, int, int]:
    """Sort key of a tensor within a step: microbatch, forward before backward, layer, role."""
    place = order.get(row["layer"], len(order))
    if row["tensor"] in FORWARD:
        return (row["microbatch"] or 0, 0, place, FORWARD[row["tensor"]])
    return (row["microbatch"] or 0, 1, -place, BACKWARD.get(row["tensor"], 3))


def _finding(evidence: Evidence, origin: Row, rows: list[Row]) -> Finding:
    step, tensor = origin["step"], origin["tensor"]
    spread = sum(r["step"] == step for r in rows) - 1
    finite = evidence.run["steps_without_loss"] == 0
    left_out = not any(r["taken"] for r in rows)
    longest, last = max(r["steps"] for r in rows), max(r["last_step"] for r in rows)
    goes_on = longest <= _SEARCH or last < evidence.run["last_step"]
    passing = finite and ((longest <= 2 and not _broke(evidence, step)) or (left_out and goes_on))
    what = "NaN" if origin["nan"] else "Inf"
    return Finding(
        code=CODE,
        title="First NaN or Inf",
        severity="watch" if passing else "act",
        layer=origin["layer"],
        tensor=tensor,
        gemm=next((g for g, result in _RESULTS.items() if result == tensor), None),
        first_step=step,
        last_step=last,
        summary=f"{what} appears first in {tensor} of {origin['layer']}, "
        f"{period(step, origin['last_step'], evidence.end)} ({_count(origin)}, rank {origin['rank']}); "
        f"{spread or 'no'} other tensors hold one on that step.",
        basis=_basis(origin) + ("; the gradient scaler left every such step out" if left_out else ""),
        remedy=_remedy(tensor),
        action="software",
        harm=100.0,
        evidence=[origin, *(r for r in rows if r is not origin)][:20],
    )


def _broke(evidence: Evidence, step: int) -> bool:
    """Whether every loss since is higher than the ten before; three since are needed to tell."""
    losses = [(row["step"], row["loss"]) for row in evidence.ask("losses") if row["loss"] is not None]
    before = [loss for at, loss in losses if at < step][-10:]
    since = [loss for at, loss in losses if at > step]
    return len(before) == 10 and len(since) >= 3 and min(since) > max(before)


_RESULTS = {"fprop": "output", "dgrad": "grad_input", "wgrad": "grad_weight"}


def _count(origin: Row) -> str:
    count, numel = origin["nan"] or origin["inf"], origin["numel"]
    return f"{count:,} of {numel:,} elements" if numel else f"{count:,} elements"


def _basis(origin: Row) -> str:
    before = origin["seen_before"]
    order = "first in execution order on the first step on which any tensor held one"
    return order if before is None else f"{order}; it was finite on step {before}, the recorded step before"


def _remedy(tensor: str) -> str:
    if tensor == "weight":
        return "Its last update wrote it: look at the gradient and the optimizer state of the step before."
    if tensor in _RESULTS.values():
        gemm = next(g for g, result in _RESULTS.items() if result == tensor)
        operands = " and ".join(GEMMS[gemm])
        return f"Its operands ({operands}) were finite: look at this GEMM; restore a checkpoint from before."
    return "Look at what computes it, just before this layer; restore a checkpoint from before."
