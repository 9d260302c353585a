"""Rules of `check`: what a line such as ``underflow.grad_output < 1 %`` means, and the file that holds them.

skip = ["every loss is finite"]        # defaults to leave out

[[gate]]
rule = "underflow.grad_output < 1 %"
layer = "layers.*.mlp.*"               # a glob or a list of them; all layers by default
from_step = 200                        # the window; the whole run by default
over = "median"                        # or "worst", the default: what must hold is the worst sampled step
because = "E5M2 flushed nothing in the last release"
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8dbg.errors import UsageError
from fp8dbg.runs.schema import GEMMS, ROLES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHARES = ("underflow", "saturated", "at_max", "subnormal", "zeros", "nan", "inf")
_ERRORS = ("rel_l2", "sqnr_db", "cosine", "norm_ratio", "gain")
OF_TENSORS = (*SHARES, "amax", "rms", "kurtosis", "peak_to_median", "scale_delta", *_ERRORS)
_BLAME = ("error_from_a", "error_from_b", "error_unexplained")
OF_GEMMS = (*_ERRORS, *_BLAME, "impact", "sensitivity", "grad_alignment")
OF_RUN = ("loss", "grad_norm")
"""Figures that a rule can name: of tensors, of GEMMs, and of the run, which stand alone."""

WITH_FLOOR = ("rel_l2", "sqnr_db", "cosine")
"""Figures that a format has a floor of."""

TABLES_RULE = "every table has rows"
FP8_RULE = "some layer computes in FP8"
FIGURES_RULE = "every operand has its figures"
FINITE_RULE = "no NaN or Inf"
LOSS_RULE = "every loss is finite"
LOSS_END_RULE = "the loss ends near its best"
SPIKE_RULE = "no loss spike"
LEAP_RULE = "gradients keep their scale"
FINDING_RULE = "no finding"
UNDERFLOW_RULE = "underflow of operands within their format's reach"
SATURATED_RULE = "saturation of operands below harm"
ERROR_RULE = "error of operands near their format's floor"
GAIN_RULE = "casts keep the norm"
UNEXPLAINED_RULE = "GEMMs do what their operands say"
NEW_FINDING_RULE = "no new finding"
NOT_WORSE_RULE = "not worse than baseline beyond noise"

DEFAULTS = (
    TABLES_RULE,
    FP8_RULE,
    FIGURES_RULE,
    FINITE_RULE,
    LOSS_RULE,
    LOSS_END_RULE,
    SPIKE_RULE,
    LEAP_RULE,
    FINDING_RULE,
    UNDERFLOW_RULE,
    SATURATED_RULE,
    ERROR_RULE,
    GAIN_RULE,
    UNEXPLAINED_RULE,
)
AGAINST_BASELINE = (NEW_FINDING_RULE, NOT_WORSE_RULE)
"""Gates that need no configuration, and those that a baseline adds."""

KEYS = ("rule", "layer", "from_step", "to_step", "over", "because")
TOP_KEYS = ("gate", "skip")
OVER = ("worst", "median")

_COMPARED = re.compile(
    r"(\w+)(?:\.(\w+))?\s*(<|>)\s*(?:([-+]?[\d.]+(?:e[-+]?\d+)?)\s*(%|floor)?|(floor))", re.IGNORECASE
)


@dataclass(frozen=True)
class Rule:
    """One rule of a file.

    Attributes:
        text: as it is written.
        figure, of: what is judged: ``underflow`` of ``grad_output``; ``of`` is "" for figures of the run.
        below: whether the figure must stay below the limit, or above.
        limit: the number; a share where it was given in per cent.
        floor: whether the limit is a multiple of the format's floor.
        layers: globs; from_step, to_step: the window; over: "worst" or "median".
        because: the writer's reason; "" if none was given.
        line: of the file.
    """

    text: str
    figure: str
    of: str
    below: bool
    limit: float
    floor: bool
    layers: tuple[str, ...] = ("*",)
    from_step: int = 0
    to_step: int = 2**63 - 1
    over: str = "worst"
    because: str = ""
    line: int = 0


@dataclass(frozen=True)
class Rules:
    """A rules file: rules of its own, and the defaults that it leaves out."""

    path: str = ""
    rules: tuple[Rule, ...] = ()
    phrases: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


def read_rules(path: Path) -> Rules:
    """A rules file.

    Raises:
        UsageError: it cannot be read, is no TOML, or has an unknown key, figure or value; the message names the line
            and what is valid.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}).", "Give a rules file in TOML.") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML: {error}.", "See fp8dbg check --help for a rules file.") from None
    return _Reader(str(path), text).rules(content)


class _Reader:
    """Turns the content of a file into rules, and finds the line of what is wrong with it."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.places = _lines(text)

    def rules(self, content: Mapping[str, Any]) -> Rules:
        for key in content:
            self._one_of(key, TOP_KEYS, "key", (None, key))
        gates = content.get("gate", [])
        if not isinstance(gates, list) or not all(isinstance(g, dict) for g in gates):
            raise self._error("gate is no list of tables", "Begin each rule with [[gate]]", (None, "gate"))
        skip = self._texts(content.get("skip", []), (None, "skip"))
        for name in skip:
            self._one_of(name, (*DEFAULTS, *AGAINST_BASELINE), "default gate", (None, "skip"))
        parsed = [self._gate(i, gate) for i, gate in enumerate(gates)]
        own = tuple(rule for rule in parsed if isinstance(rule, Rule))
        return Rules(self.path, own, tuple(rule for rule in parsed if isinstance(rule, str)), skip)

    def _gate(self, index: int, gate: Mapping[str, Any]) -> Rule | str:
        for key in gate:
            self._one_of(key, KEYS, "key", (index, key))
        text = gate.get("rule")
        if not isinstance(text, str):
            raise self._error("this gate has no rule", 'Add one, as rule = "underflow.weight < 1 %"', (index, None))
        phrase = " ".join(text.split())
        if phrase in (*DEFAULTS, *AGAINST_BASELINE):
            return phrase
        return self._compared(phrase, (index, "rule"), self._options(index, gate))

    def _options(self, index: int, gate: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"line": self.places.get((index, "rule"), 0)}
        for key in ("from_step", "to_step"):
            if key in gate:
                found[key] = self._integer(gate[key], key, (index, key))
        if "over" in gate:
            self._one_of(gate["over"], OVER, "value of over", (index, "over"))
            found["over"] = gate["over"]
        if "layer" in gate:
            found["layers"] = self._texts(gate["layer"], (index, "layer"))
        return found | {"because": str(gate.get("because", ""))}

    def _compared(self, text: str, place: tuple[int, str], options: Mapping[str, Any]) -> Rule:
        found = _COMPARED.fullmatch(text)
        if found is None:
            raise self._error(
                f"the rule {text!r:.120} is not understood",
                "Write FIGURE.TENSOR < NUMBER, as in underflow.grad_output < 1 %, cosine.fprop > floor, loss < 3, or "
                "one of: " + "; ".join((*DEFAULTS, *AGAINST_BASELINE)),
                place,
            )
        figure, of, sign, number, unit, alone = found.groups()
        self._named(figure, of or "", place)
        floor = bool(alone) or unit == "floor"
        if floor and figure not in WITH_FLOOR:
            raise self._error(f"{figure} has no floor", f"Figures with one: {', '.join(WITH_FLOOR)}", place)
        limit = self._number(number, place) if number else 1.0
        share = limit / 100 if unit == "%" else limit
        return Rule(text, figure, of or "", sign == "<", share, floor, **options)

    def _named(self, figure: str, of: str, place: tuple[int, str]) -> None:
        """Refuse a figure that does not exist, or not of that tensor or GEMM."""
        if not of:
            valid = OF_RUN if figure not in (*OF_TENSORS, *OF_GEMMS) else ()
            if not valid:
                raise self._error(
                    f"{figure} of what?",
                    f"As in {figure}.weight; tensors and GEMMs: {', '.join((*ROLES, *GEMMS))}",
                    place,
                )
            self._one_of(figure, (*OF_RUN, *OF_TENSORS, *OF_GEMMS), "figure", place)
            return
        self._one_of(figure, tuple(dict.fromkeys((*OF_TENSORS, *OF_GEMMS))), "figure", place)
        self._one_of(of, (*ROLES, *GEMMS), "tensor or GEMM", place)
        self._one_of(figure, OF_GEMMS if of in GEMMS else OF_TENSORS, f"figure of {of}", place)

    def _one_of(self, name: Any, valid: tuple[str, ...], kind: str, place: tuple[int | None, str | None]) -> None:
        if name not in valid:
            raise self._error(f"no {kind} is called {name!r:.120}", f"Valid: {', '.join(valid)}", place)

    def _texts(self, value: Any, place: tuple[int | None, str | None]) -> tuple[str, ...]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not values or not all(isinstance(v, str) for v in values):
            if values == []:
                return ()
            raise self._error(f"{place[1]} is {value!r:.80}", "It takes a text or a list of texts", place)
        return tuple(values)

    def _integer(self, value: Any, key: str, place: tuple[int | None, str | None]) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._error(f"{key} is {value!r:.80}", "It takes a step, from 0", place)
        return value

    def _number(self, text: str, place: tuple[int | None, str | None]) -> float:
        try:
            return float(text)
        except ValueError:
            raise self._error(f"{text!r:.80} is no number", "Write it as 0.01 or 1 %", place) from None

    def _error(self, what: str, hint: str, place: tuple[int | None, str | None]) -> UsageError:
        line = self.places.get(place) or self.places.get((place[0], None)) or 1
        return UsageError(f"{self.path}, line {line}: {what}.", f"{hint}.")


def _lines(text: str) -> dict[tuple[int | None, str | None], int]:
    """Line of each key, by (number of its [[gate]] or None, key); a gate's own line has no key."""
    found: dict[tuple[int | None, str | None], int] = {}
    gate: int | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*\[\[\s*[\"']?gate[\"']?\s*\]\]", line):
            gate = 0 if gate is None else gate + 1
            found[gate, None] = number
        elif other := re.match(r"\s*\[+\s*[\"']?([\w.-]+)", line):
            found.setdefault((None, other[1]), number)
        elif key := re.match(r"\s*[\"']?([\w-]+)[\"']?\s*=", line):
            found.setdefault((gate, key[1]), number)
    return found
