"""The comparison's page in a real browser, and the command line of compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8dbg.analysis.compare import compare
from fp8dbg.analysis.run import open_run
from fp8dbg.render.compare_page import write_comparison
from tests.browser import Browser, opens_silently_and_fits
from tests.command_line import in_a_process
from tests.pages import HOSTILE, hostile
from tests.synthetic import non_finite, outlier, write_run

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("same", "outlier", "nan", "hostile", "recipes", "no loss")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A pair of run folders of each kind."""
    root = tmp_path_factory.mktemp("pairs")
    base = write_run(root / "base", blocks=2, steps=60)

    def other(name: str, **options: object) -> Path:
        return write_run(root / name, **{"blocks": 2, "steps": 60, "seed": 3} | options)  # type: ignore[arg-type]

    strange = hostile(root / HOSTILE[5].replace("/", "-"))
    return {
        "same": (base, other("same")),
        "outlier": (base, other("outlier", plant=outlier("layers.1.up", step=30))),
        "nan": (base, other("nan", plant=non_finite("layers.1.gate", step=30))),
        "hostile": (_healthy(strange, root / "names"), strange),
        "recipes": (base, other("recipes", recipe="block", gradients="e4m3")),
        "no loss": (base, other("no-loss", plant=[{"table": "steps", "loss": None}])),
    }


def _healthy(strange: Path, path: Path) -> Path:
    """A run whose layers have the same hostile names, and in which nothing happens."""
    from fp8dbg.runs.folder import RunWriter

    with open_run(strange) as run:
        tables = {
            name: run.sql(f"select * from {name}").to_arrow_table().to_pylist()
            for name in ("steps", "amax", "tensors", "gemms")
        }
        layers = run.meta["layers"]
    with RunWriter(
        path, rank=0, fingerprint={"layers": layers, "recipe": HOSTILE[0], HOSTILE[1]: HOSTILE[3]}
    ) as writer:
        for name, rows in tables.items():
            writer.append(
                name, [row | ({"underflow": 0, "rel_l2": 0.027} if row.get("underflow") else {}) for row in rows]
            )
    return path


@pytest.fixture(scope="module")
def pages(runs: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of each pair."""
    root = tmp_path_factory.mktemp("pages")
    made = {}
    for kind, (one, other) in runs.items():
        with open_run(one) as a, open_run(other) as b:
            made[kind] = write_comparison(a, b, compare(a, b), root / f"{kind.replace(' ', '-')}.html")
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "dark"), [(1440, False), (390, True)])
def test_a_page_opens_silently_offline_and_fits(
    browser: Browser, pages: dict[str, Path], kind: str, width: int, dark: bool
) -> None:
    """No console message, no request; nothing wider than the window, no text of a chart outside it."""
    opens_silently_and_fits(browser, pages[kind], width, dark)


def test_the_page_says_what_compare_says(browser: Browser, pages: dict[str, Path]) -> None:
    """Verdict, first layer, a chart and a row for what differs, each with both runs."""
    browser.open(pages["outlier"])
    browser.draw_everything()
    assert browser.find("h1").text.startswith("Drifting since step 30: first saturated of layers.1.up weight")
    assert browser.js("document.querySelectorAll('[data-compare^=difference] .main-svg').length") > 0
    assert browser.js("document.querySelectorAll('[data-compare=loss] .scatterlayer .trace').length") == 2
    assert browser.find("#differences tbody tr").text.startswith("30 layers.1.up weight")


def test_the_same_has_nothing_to_show(browser: Browser, pages: dict[str, Path]) -> None:
    """No chart of a difference, and the figures side by side all the same."""
    browser.open(pages["same"])
    assert browser.find("h1").text.startswith("Same within noise")
    assert browser.all("[data-compare^=difference]") == []
    assert len(browser.all("#figures tbody tr")) > 20


def test_sorting_and_dark_mode(browser: Browser, pages: dict[str, Path]) -> None:
    """Headings sort their column; the button switches the theme."""
    browser.open(pages["outlier"])
    browser.js("document.querySelector('#figures th:nth-child(5) button').click()")
    first = browser.js("document.querySelector('#figures tbody tr td:nth-child(5)').dataset.value")
    values = browser.js("[...document.querySelectorAll('#figures tbody td:nth-child(5)')].map((e) => +e.dataset.value)")
    assert float(first) == max(values)
    browser.find("#theme").click()
    assert browser.js("document.documentElement.dataset.shown") == "dark"


def test_hostile_names_are_text(browser: Browser, pages: dict[str, Path]) -> None:
    """No script of a name runs and no element of it exists, in tables, charts and fingerprint alike."""
    browser.open(pages["hostile"])
    browser.draw_everything()
    assert len(browser.all("#differences tbody tr")) >= len(HOSTILE)
    assert browser.js("typeof window.pwned") == "undefined"
    assert (
        browser.js("document.querySelectorAll('main img, main b, main a[href^=javascript], main script').length") == 0
    )
    assert browser.js("document.querySelectorAll('.main-svg a').length") == 0
    assert browser.console() == []


def test_the_command_line(runs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Text of at most 80 columns, JSON with the verdict, the page where it was asked for; flat runs are exit code 2."""
    page = tmp_path / "page.html"
    told = in_a_process("compare", *runs["outlier"], "--html", page, COLUMNS="80", NO_COLOR="1")
    assert told.code == 0
    assert told.out.startswith("Drifting since step 30")
    assert max(map(len, told.out.splitlines())) <= 80
    assert page.exists()
    found = json.loads(in_a_process("compare", *runs["outlier"], "--json").out)
    assert (found["verdict"], found["since"], found["first"]["layer"]) == ("drifting", 30, "layers.1.up")
    flat = write_run(tmp_path / "flat", blocks=1, steps=60, plant=[{"table": "steps", "loss": 5.0}])
    refused = in_a_process("compare", flat, flat)
    assert refused.code == 2
    assert "no evidence" in refused.err
