"""A fallback plan as data, and as the file plan.json: which GEMMs of which layers to keep in BF16, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8dbg.errors import UsageError
from fp8dbg.runs.schema import GEMMS
from fp8dbg.text import in_unicode

VERSION = 1


@dataclass(frozen=True)
class PlanEntry:
    """One layer: its GEMMs, the recipe they should have instead of the run's, and the reason in one sentence."""

    layer: str
    gemms: tuple[str, ...]
    recipe: str = "bf16"
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """Layers to treat differently; empty (and false) for a run that needs none."""

    entries: tuple[PlanEntry, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.entries)

    def as_fallback(self) -> dict[str, dict[str, str]]:
        """layer -> GEMM -> recipe, as ``fp8dbg.simulate(fallback=)`` takes it; of two entries the later."""
        layers: dict[str, dict[str, str]] = {}
        for entry in self.entries:
            layers.setdefault(entry.layer, {}).update(dict.fromkeys(entry.gemms, entry.recipe))
        return layers

    def to_dict(self) -> dict[str, Any]:
        """Plain data; ``from_dict`` reads it back."""
        entries = [
            {"layer": e.layer, "gemms": list(e.gemms), "recipe": e.recipe, "reason": e.reason} for e in self.entries
        ]
        return {"version": VERSION, "entries": entries}

    def to_json(self) -> str:
        """The plan as text, for ``plan.json``."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """A plan from ``to_dict``'s data.

        Raises:
            UsageError: it is no plan, or of a later version.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("entries"), list):
            raise UsageError("This is no fallback plan: it has no list of entries.", "Use a plan.json of fp8dbg.")
        if data.get("version", VERSION) != VERSION:
            raise UsageError(
                f"The plan is of version {data['version']}; this fp8dbg knows {VERSION}.", "Update fp8dbg to read it."
            )
        return cls(tuple(_entry(item) for item in data["entries"]))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan from ``to_json``'s text; raises as ``from_dict`` does."""
        try:
            return cls.from_dict(json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"This is no fallback plan: {error}.", "Use a plan.json of fp8dbg.") from None


def _entry(item: Any) -> PlanEntry:
    if not isinstance(item, Mapping) or not isinstance(item.get("layer"), str):
        raise UsageError("An entry of the plan names no layer.", "Use a plan.json of fp8dbg.")
    gemms = item.get("gemms", list(GEMMS))
    unknown = [g for g in gemms if not isinstance(g, str) or g not in GEMMS] if isinstance(gemms, list) else [gemms]
    if unknown:
        raise UsageError(
            f"The plan names the GEMM {unknown[0]!r:.100} of {item['layer']!r:.200}.", f"GEMMs are {', '.join(GEMMS)}."
        )
    recipe, reason = item.get("recipe", "bf16"), item.get("reason", "")
    if not isinstance(recipe, str) or not isinstance(reason, str):
        raise UsageError(
            f"The plan's recipe or reason for {item['layer']!r:.200} is no text.", "Use a plan.json of fp8dbg."
        )
    return PlanEntry(in_unicode(item["layer"]), tuple(gemms), recipe, reason)
