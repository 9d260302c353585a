"""The questions that come with fp8dbg: each file of reports/, its header read into data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8dbg import reports
from fp8dbg.errors import QueryError, UnknownNameError

TYPES: dict[str, tuple[type, ...]] = {"text": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}
"""Types a parameter can have, and the Python types that give it; NULL (None) is always allowed."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a question; its type is one of ``TYPES``."""

    name: str
    type: str
    default: Any
    meaning: str


@dataclass(frozen=True, slots=True)
class Question:
    """One file of reports/.

    Attributes:
        name: the file's, without ``.sql``.
        question: what it answers, as a question.
        reads: the tables and views it reads.
        parameters: by name.
        columns: meaning of each output column, in order.
        sql: the whole file; parameters are in it as ``$name``.
    """

    name: str
    question: str
    reads: tuple[str, ...]
    parameters: Mapping[str, Parameter]
    columns: Mapping[str, str]
    sql: str

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A value for every parameter: the given ones, checked, and the defaults.

        Raises:
            UnknownNameError: a given name is no parameter; the message lists those that are.
            QueryError: a value is of the wrong type.
        """
        for name, value in given.items():
            if name not in self.parameters:
                raise UnknownNameError(f"parameter of {self.name}", name, list(self.parameters))
            self._check(self.parameters[name], value)
        return {p.name: given.get(p.name, p.default) for p in self.parameters.values()}

    def _check(self, parameter: Parameter, value: Any) -> None:
        allowed = TYPES[parameter.type]
        if value is None or (isinstance(value, allowed) and isinstance(value, bool) == (bool in allowed)):
            return
        raise QueryError(
            f"Parameter {parameter.name} of {self.name} is {value!r:.100}, a {type(value).__name__}.",
            f"It takes {parameter.type}.",
        )


_FIELD = re.compile(r"-- (Question|Reads|Parameters|Columns):\s*(.*)")
_PARAMETER = re.compile(r"(\w+) \((text|integer|number|boolean), default (.+?)\): (.+)")
_COLUMN = re.compile(r"(\w+): (.+)")


def header(sql: str) -> dict[str, list[str]]:
    """Lines of each field of a report's header; the header ends with the first line that is no comment."""
    fields: dict[str, list[str]] = {"Question": [], "Reads": [], "Parameters": [], "Columns": []}
    current = ""
    for line in sql.splitlines():
        if not line.startswith("--"):
            break
        content = line.removeprefix("--").strip()
        if start := _FIELD.fullmatch(line):
            current, content = start[1], start[2].strip()
        if current and content:
            fields[current].append(content)
    return fields


def parse_question(name: str, sql: str) -> Question:
    """A report's file as data; lines that do not follow the form are left out (a test holds that there are none)."""
    fields = header(sql)
    parameters = [m for m in map(_PARAMETER.fullmatch, fields["Parameters"]) if m]
    return Question(
        name,
        " ".join(fields["Question"]),
        tuple(t.strip() for t in ",".join(fields["Reads"]).split(",") if t.strip()),
        {m[1]: Parameter(m[1], m[2], _literal(m[3]), m[4]) for m in parameters},
        {m[1]: m[2] for m in map(_COLUMN.fullmatch, fields["Columns"]) if m},
        sql,
    )


def _literal(text: str) -> Any:
    """NULL, true, false, a number or a text, as SQL writes it."""
    named = {"null": None, "true": True, "false": False}
    if text.lower() in named:
        return named[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("'\"")


def load_questions() -> dict[str, Question]:
    """Every question in reports/, by name."""
    return {name: parse_question(name, reports.text(f"{name}.sql")) for name in reports.names(".sql")}
