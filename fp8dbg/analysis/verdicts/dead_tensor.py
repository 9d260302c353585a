"""A tensor that is zero in every element.

Sign: zeros equals numel on at least two sampled steps in a row, or at the end of the run; on one already for a weight
that held other values before, which no optimizer does. Its figures are NULL, not 0 %: upstream of a dead gradient
everything looks healthy and nothing is judged.
Cause: a weight that was zeroed or never loaded, a gate that shut, a layer cut off from the loss, a gradient that was
flushed to zero downstream.
Remedy: look at the first dead tensor in execution order; the others follow from it.
False alarm when: the tensor starts at zero by design and wakes up (LoRA's B, zero-initialised projections), or its
layer is frozen, unused or reset on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8dbg.analysis.evidence import Evidence, Row
from fp8dbg.analysis.finding import Finding
from fp8dbg.analysis.verdicts.non_finite import BACKWARD, execution_key
from fp8dbg.analysis.wording import listed, period

CODE = "dead_tensor"
EXPLAINS: frozenset[str] = frozenset({"underflow"})


def judge(evidence: Evidence) -> Iterator[Finding]:
    """One finding per onset: the first dead tensor in execution order, with those that follow from it."""
    if not any(row["steps_all_zero"] for row in evidence.tensors):
        return
    groups: dict[int, list[Row]] = {}
    for row in evidence.ask("all_zero"):
        if _lasting(row, evidence):
            groups.setdefault(row["first_step"], []).append(row)
    for step in sorted(groups):
        yield from _findings(evidence, groups[step])


def _lasting(row: Row, evidence: Evidence) -> bool:
    ends = evidence.end is not None and row["last_step"] >= evidence.end
    starts_dead = row["first_step"] == evidence.run["first_sampled"]
    if starts_dead:
        return bool(row["steps"] == row["total_steps"])
    return bool(row["steps"] >= 2 or ends or _was_zeroed(row))


def _was_zeroed(row: Row) -> bool:
    """Whether it is a weight that held other values before: one that starts at zero, whenever that is, is no news."""
    return row["tensor"] == "weight" and row["before"] is not None


def _findings(evidence: Evidence, rows: list[Row]) -> Iterator[Finding]:
    order = evidence.layer_order
    ranked = sorted(rows, key=lambda r: execution_key({**r, "microbatch": 0}, order))
    origin, rest = ranked[0], ranked[1:]
    if origin["tensor"] in BACKWARD and _flushed_downstream(evidence, origin):
        return  # the gradient was lost by a cast downstream, which has a finding of its own
    follow = [f"{r['layer']} {r['tensor']}" for r in rest]
    yield Finding(
        code=CODE,
        title="All zero",
        severity="watch" if origin["first_step"] == evidence.run["first_sampled"] else "act",
        layer=origin["layer"],
        tensor=origin["tensor"],
        gemm=None,
        first_step=origin["first_step"],
        last_step=origin["last_step"],
        summary=f"Every element of {origin['tensor']} is zero "
        f"{period(origin['first_step'], origin['last_step'], evidence.end)}"
        f"{f'; so are {listed(follow)}' if follow else ''}.",
        basis=f"all of its elements on {origin['steps']} of {origin['total_steps']} sampled steps",
        remedy=_remedy(origin),
        action="software",
        harm=1.5,
        evidence=ranked[:20],
    )


def _remedy(origin: Row) -> str:
    if _was_zeroed(origin):
        return (
            f"Look for what wrote to this weight after step {origin['before']} (a reset, a load): an optimizer does "
            "not bring every element to zero."
        )
    return "Look at this tensor first: other zeros follow from it, and nothing upstream of it is judged."


def _flushed_downstream(evidence: Evidence, origin: Row) -> bool:
    """Whether a later layer's gradient was flushed whole by its cast: what is upstream of it gets zeros."""
    place = evidence.layer_order.get(origin["layer"], 0)
    return any(
        row["tensor"] == "grad_output"
        and evidence.layer_order.get(row["layer"], 0) >= place
        and max(row["worst_underflow_ratio"] or 0, row["initial_underflow_ratio"] or 0) > 0.99
        for row in evidence.operands
    )
