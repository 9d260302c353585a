"""A fallback plan for plain PyTorch: as Python that simulates it."""

from __future__ import annotations

import json

from fp8dbg.hooks import plans


def write_fallback(plan: plans.Plan) -> str:
    """The plan as Python: the call of ``fp8dbg.simulate`` that rehearses it."""
    head = plans.comment("fp8dbg fallback plan for a simulated run: pass the recipe that the run was made with.")
    entries = [f"    {json.dumps(layer)}: {json.dumps(recipes)}," for layer, recipes in plans.by_layer(plan).items()]
    body = ["import fp8dbg", "", "FALLBACK = {", *entries, "}", "", 'fp8dbg.simulate(model, "delayed", FALLBACK)']
    return plans.text_of([*head, *plans.described(plan), *body])
