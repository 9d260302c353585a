"""Writes a recommended plan where training will look for it: plan.json and the host's own configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fp8dbg.errors import UsageError

if TYPE_CHECKING:
    from fp8dbg.analysis.run import Run
    from fp8dbg.runs.plan import Plan

TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
SUFFIXES = {"megatron": ".yaml", "nvidia_te": ".yaml"}
"""Of a host's configuration; the others' are Python."""


def require_host(host: str) -> None:
    """Refuse a host that nothing writes for.

    Raises:
        UnknownNameError: its message lists the hosts.
    """
    from fp8dbg.hooks import writer

    writer(host)


def recipe_of(run: Run) -> str:
    """Label of the recipe that a run's layers compute by, or are compared with where none is FP8; "" if they differ."""
    facts = run.evidence.run
    labels = list(facts["recipes"] or facts["what_if"] or [])
    return labels[0] if len(labels) == 1 else ""


def write_plan(plan: Plan, host: str | None, out: Path, recipe: str = "") -> list[Path]:
    """Write plan.json and, for a plan with entries, the host's configuration, fallback_HOST.yaml or .py.

    Args:
        plan: the plan; an empty one is written too, so that no earlier one stays in force.
        host: a name of ``hooks.WRITERS``; None: plan.json alone.
        out: the folder; made if it is missing.
        recipe: label of the run's recipe, for the configurations that name it; "": not known.

    Returns:
        the files written.

    Raises:
        UsageError: the folder cannot be written.
    """
    texts = {"plan.json": plan.to_json() + "\n"}
    if host is not None and plan:
        from fp8dbg.hooks import writer

        named = {"recipe": recipe} if recipe and _names_recipe(host, recipe) else {}
        texts[f"fallback_{host}{SUFFIXES.get(host, '.py')}"] = writer(host).write_fallback(plan, **named)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}).", "Give another folder with --out.") from None
    return [out / name for name in texts]


def _names_recipe(host: str, recipe: str) -> bool:
    """Whether the host's configuration names the run's recipe, and knows this one."""
    return host == "pytorch" or (host in ("torchao_float8", "huggingface") and recipe in TORCHAO_RECIPES)
