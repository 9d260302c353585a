"""A fallback plan for plain PyTorch: as Python that simulates it."""

from __future__ import annotations

import json

from fp8dbg.hooks import plans


def write_fallback(plan: plans.Plan, recipe: str = "") -> str:
    """The plan as Python: the call of ``fp8dbg.simulate`` that rehearses it.

    ``recipe`` is the label of the run's; "": not known, so the reader is asked to put it in place of "delayed".
    """
    known = "under the recipe that the run was made with" if recipe else "pass the recipe that the run was made with"
    head = plans.comment(f"fp8dbg fallback plan for a simulated run: {known}.")
    entries = [f"    {json.dumps(layer)}: {json.dumps(recipes)}," for layer, recipes in plans.by_layer(plan).items()]
    call = f"fp8dbg.simulate(model, {json.dumps(recipe or 'delayed')}, FALLBACK)"
    body = ["import fp8dbg", "", "FALLBACK = {", *entries, "}", "", call]
    return plans.text_of([*head, *plans.described(plan), *body])
