"""A fallback plan for Hugging Face's Trainer: Python that converts the model before the Trainer gets it."""

from __future__ import annotations

from fp8dbg.hooks import plans, torchao_float8_fallback

_ACCELERATE = '''

def accelerate_handler(recipe=@RECIPE@):
    """For Accelerator(mixed_precision="fp8", kwargs_handlers=[accelerate_handler()]): Accelerate then converts.

    It knows one configuration for all layers, so layers that the plan names stay in BF16 with all their GEMMs.
    """
    from accelerate.utils import AORecipeKwargs

    return AORecipeKwargs(config=config_for(recipe), module_filter_func=module_filter_fn)
'''


def write_fallback(plan: plans.Plan, recipe: str = "rowwise") -> str:
    """The plan as a Python file: ``convert(model)`` before ``Trainer(model=...)``, or a handler for Accelerate.

    ``recipe`` is torchao's: tensorwise, rowwise or rowwise_with_gw_hp. Models built from Transformer Engine layers
    take the plan of host nvidia_te instead.
    """
    head = plans.comment(
        "fp8dbg fallback plan for Hugging Face's Trainer: model = convert(model) before Trainer(model=model, ...); "
        "TrainingArguments stays at bf16=True."
    )
    body = torchao_float8_fallback.write_fallback(plan, recipe)
    return plans.text_of(head) + body + _ACCELERATE.replace("@RECIPE@", repr(recipe))
