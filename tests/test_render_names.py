"""Names on screen: nothing in them acts, and they fit."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fp8dbg.render.names import clipped, common_prefix, initials, middle, shorten, visible


def test_control_characters_become_escapes_that_json_reads_back() -> None:
    """What would move a cursor or reverse text is written out, and a JSON text keeps its meaning."""
    name = "a\nb\x1b[31m\u202e\x7f\x85\U000e0001\ud800"
    assert visible(name) == "a\\nb\\u001b[31m\\u202e\\u007f\\u0085\\udb40\\udc01\\ud800"
    assert json.loads(f'"{visible(name)}"') == name


def test_what_shows_is_left_alone() -> None:
    """Letters of any script and emoji built of several code points stay as they are."""
    name = "слой.層.émile.👩‍💻.❤️"
    assert visible(name) == name


def test_the_middle_is_cut_and_both_ends_stay() -> None:
    """Layer names differ at their ends."""
    assert middle("model.layers.12.mlp.up_proj", 16) == "model…lp.up_proj"
    assert middle("short", 16) == "short"


def test_a_name_of_200_kilobytes_is_shortened_from_its_ends() -> None:
    """The result is that of the whole name, without walking it."""
    assert shorten("first." + "x" * 200_000 + ".last", 20) == "first.…xxxxxxxx.last"


@given(st.text(st.characters(), max_size=80), st.integers(1, 60))
def test_any_name_fits_and_holds_nothing_that_acts(name: str, width: int) -> None:
    """Whatever the name, it takes at most the cells it is given."""
    for text in (shorten(name, width), clipped(name, width), initials(name, width)):
        assert cell_len(text) <= width
        assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in text)


@pytest.mark.parametrize(
    ("name", "brief"),
    [
        ("layers.0.attention.qkv", "l.0.a.qkv"),
        ("layers.10.mlp.gate", "l.10.mlp.gate"),
        ("blocks.1.mlp.up", "blocks.1.mlp.up"),
        ("31.self_attention.linear_proj", "31.s…inear_proj"),
        ("head", "head"),
    ],
)
def test_initials_keep_what_tells_a_layer_from_its_neighbours(name: str, brief: str) -> None:
    """Numbers and the end; only as many parts are cut as it takes."""
    assert initials(name, 15) == brief


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["model.layers.0.up", "model.layers.1.down"], "model.layers."),
        (["model.a", "model.b"], "model."),
        (["a", "b"], ""),
        (["model", "model.a"], ""),
        (["model.only"], ""),
        ([], ""),
    ],
)
def test_the_shared_prefix_ends_at_a_dot(names: list[str], prefix: str) -> None:
    """A name never becomes empty without it."""
    assert common_prefix(names) == prefix
