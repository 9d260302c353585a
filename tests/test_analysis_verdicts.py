"""What every verdict has: a documented shape, a code, and a place in the list."""

from __future__ import annotations

import pkgutil
import re
from types import ModuleType

import pytest

from fp8dbg.analysis import verdicts
from fp8dbg.analysis.verdicts import EXPLAINS, VERDICTS

PARTS = ("Sign", "Cause", "Remedy", "False alarm when")


@pytest.mark.parametrize("verdict", VERDICTS, ids=lambda v: v.CODE)
def test_docstring_has_the_fixed_shape(verdict: ModuleType) -> None:
    """A summary sentence, then Sign, Cause, Remedy and False alarm when, in this order and each with text."""
    text = verdict.__doc__ or ""
    summary, _, rest = text.partition("\n\n")
    assert re.fullmatch(r"[A-Z].+\.", summary, re.DOTALL)
    found = re.findall(r"^([A-Z][a-z ]+): \S", rest, re.MULTILINE)
    assert tuple(found) == PARTS


@pytest.mark.parametrize("verdict", VERDICTS, ids=lambda v: v.CODE)
def test_file_is_named_as_its_code(verdict: ModuleType) -> None:
    """The page of the manual is found by the code in a report."""
    assert verdict.__name__.rsplit(".", 1)[1] == verdict.CODE


def test_every_file_is_in_the_list() -> None:
    """A verdict that is added as a file but not listed would never be asked."""
    files = {m.name for m in pkgutil.iter_modules(verdicts.__path__)} - {"shared"}
    assert files == {v.CODE for v in VERDICTS}


def test_verdicts_explain_only_what_exists() -> None:
    """A code in EXPLAINS that no verdict has would fold nothing, silently."""
    codes = {v.CODE for v in VERDICTS}
    assert set().union(*EXPLAINS.values()) <= codes
