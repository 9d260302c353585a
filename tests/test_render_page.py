"""report.html in a real browser: nothing leaves it, nothing in it acts, and everything in it can be reached."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from fp8dbg.analysis.run import Run, open_run
from fp8dbg.analysis.summary import summarise
from fp8dbg.render.html import write_report
from tests.browser import Browser, opens_silently_and_fits
from tests.pages import HOSTILE, empty, faulted, hostile
from tests.synthetic import swiglu_outlier, write_run

KINDS = ("faulted", "healthy", "hostile", "empty", "ranks", "block", "compared")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run folder of each kind."""
    root = tmp_path_factory.mktemp("runs")
    return {
        "faulted": faulted(root / "faulted"),
        "healthy": write_run(root / "healthy", blocks=2, steps=60),
        "hostile": hostile(root / "hostile"),
        "empty": empty(root / "empty"),
        "ranks": write_run(root / "ranks", blocks=2, steps=60, ranks=3, plant=swiglu_outlier(block=1, step=30)),
        "block": write_run(root / "block", blocks=2, steps=60, recipe="block"),
        "compared": write_run(root / "compared", blocks=2, steps=60, what_if=True),
    }


@pytest.fixture(scope="module")
def pages(runs: dict[str, Path]) -> dict[str, Path]:
    """The page of each run."""
    return {name: written(open_run(path)) for name, path in runs.items()}


def written(run: Run) -> Path:
    return write_report(run, summarise(run))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "dark"), [(1440, False), (390, True)])
def test_a_page_opens_silently_offline_and_fits(
    browser: Browser, pages: dict[str, Path], kind: str, width: int, dark: bool
) -> None:
    """No console message, no request; nothing wider than the window, no text of a chart outside it."""
    opens_silently_and_fits(browser, pages[kind], width, dark)


def test_hostile_names_are_text(browser: Browser, pages: dict[str, Path]) -> None:
    """No script of a name runs, no element of it exists, and what is shown of a name is the name."""
    browser.open(pages["hostile"])
    browser.draw_everything()
    for number in range(len(HOSTILE)):
        browser.js("showTensor(arguments[0], 'input')", number)
    assert browser.js("typeof window.pwned") == "undefined"
    assert (
        browser.js("document.querySelectorAll('main img, main b, main a[href^=javascript], main script').length") == 0
    )
    assert browser.js("document.querySelectorAll('.main-svg a').length") == 0
    listed = [link.text for link in browser.all("#layer-list a")]
    assert HOSTILE[0] in listed
    assert HOSTILE[5] in listed
    assert any(text.startswith("a\\nb\\u001b") for text in listed)
    assert browser.console() == []


def test_a_long_name_is_cut_and_shown_on_hover(browser: Browser, pages: dict[str, Path]) -> None:
    """200 kB of name are at most 72 characters of text; hover shows 1,000; the fallback plan has it whole."""
    browser.open(pages["hostile"])
    names = browser.js("[...document.querySelectorAll('.name')].map((e) => [e.textContent, e.title])")
    cut = [(text, title) for text, title in names if text.startswith("long.")]
    assert cut
    assert all(len(text) <= 72 and len(title) == 1000 for text, title in cut)
    assert HOSTILE[-1] in browser.js("document.getElementById('fallback').textContent")


def test_a_script_that_gets_in_does_not_run(browser: Browser, pages: dict[str, Path]) -> None:
    """The page's policy allows its own two scripts and nothing else, so that an escape that fails is not the end."""
    browser.open(pages["healthy"])
    browser.js(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.pwned=1\">') || "
        "document.body.appendChild(Object.assign(document.createElement('script'), { text: 'window.pwned=2' }))"
    )
    assert browser.js("typeof window.pwned") == "undefined"
    assert any("Content Security Policy" in message for message in browser.console())


def test_from_a_finding_to_its_tensor_by_click(browser: Browser, pages: dict[str, Path]) -> None:
    """The first card's link opens the explorer at that layer and tensor."""
    browser.open(pages["faulted"])
    where = browser.find("#finding-1 .where").text
    link = browser.find("#finding-1 .explore")
    ActionChains(browser.driver).scroll_to_element(link).perform()
    link.click()
    layer, tensor = where.split(" · ")
    browser.wait(f"document.getElementById('explorer-title').textContent === '{layer}'")
    assert browser.find("#tensor-tabs [aria-current]").text == tensor
    browser.wait("document.activeElement.id === 'explorer-title'")
    browser.wait("document.querySelector('#explorer-charts .main-svg') !== null")


def test_from_a_finding_to_its_tensor_by_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    """Tab reaches a closed card, Enter opens it, Tab its link, Enter the explorer; Tab goes on to the tensors."""
    browser.open(pages["faulted"])
    browser.js("document.querySelectorAll('details').forEach((one) => one.removeAttribute('open'))")

    def tab_until(condition: str) -> None:
        for _ in range(60):
            ActionChains(browser.driver).send_keys(Keys.TAB).perform()
            if browser.js(condition):
                return
        raise AssertionError(f"never reached: {condition}")

    tab_until("document.activeElement.parentElement.id === 'finding-2'")
    ActionChains(browser.driver).send_keys(Keys.ENTER).perform()
    assert browser.js("document.getElementById('finding-2').open")
    tab_until("document.activeElement.className === 'explore'")
    ActionChains(browser.driver).send_keys(Keys.ENTER).perform()
    browser.wait("document.activeElement.id === 'explorer-title'")
    assert browser.find("#explorer-title").text == browser.find("#finding-2 .where .name").text
    tab_until("document.activeElement.textContent === 'grad_output'")
    ActionChains(browser.driver).send_keys(Keys.ENTER).perform()
    browser.wait("document.querySelector('#tensor-tabs [aria-current]').textContent === 'grad_output'")


def test_a_heat_cell_holds_the_figure_of_sql(browser: Browser, pages: dict[str, Path], runs: dict[str, Path]) -> None:
    """What the page draws for one layer, tensor and step is what a query gives, to four digits."""
    with open_run(runs["faulted"]) as run:
        (row,) = run.rows(
            "select underflow / (numel - zeros) as ratio from tensors "
            "where layer = 'layers.2.down' and tensor = 'input' and step = 130"
        )
    browser.open(pages["faulted"])
    choose(browser, "heat-figure", "Underflow ratio")
    choose(browser, "heat-name", "input")
    drawn = browser.js(
        "(() => { const trace = document.getElementById('heat-chart').data[0];"
        " const row = heat.shown.rows.findIndex((one) => DATA.layers[one.layer].short === 'layers.2.down');"
        " const column = heat.shown.labels.indexOf('130');"
        " return [trace.z[row][column], heat.shown.rows[row].values[column]]; })()"
    )
    assert drawn == pytest.approx([math.log10(row["ratio"]), row["ratio"]], rel=1e-4)


def choose(browser: Browser, select: str, text: str) -> None:
    """Choose an option as a reader does."""
    option = next(o for o in browser.all(f"#{select} option") if o.text == text)
    option.click()


@pytest.mark.parametrize("name", ["underflow_ratio", "scale", "amax", "sqnr_db"])
def test_the_explorer_draws_the_series_of_sql(
    browser: Browser, pages: dict[str, Path], runs: dict[str, Path], name: str
) -> None:
    """A tensor's line is its figure at every sampled step."""
    columns = {"underflow_ratio": "underflow / (numel - zeros)", "sqnr_db": "-20 * log10(rel_l2)"}
    with open_run(runs["faulted"]) as run:
        rows = run.rows(
            f"select step, {columns.get(name, name)} as figure from tensors "
            "where layer = 'layers.2.up' and tensor = 'weight' order by step"
        )
    browser.open(pages["faulted"])
    number = browser.js("DATA.layers.findIndex((one) => one.short === 'layers.2.up')")
    series = browser.js("seriesOf('tensor', arguments[0], 'weight').columns", number)
    assert series["step"] == [row["step"] for row in rows]
    assert series[name] == pytest.approx([row["figure"] for row in rows], rel=1e-4)


def test_arrows_move_over_the_heat_map_and_enter_opens_the_tensor(browser: Browser, pages: dict[str, Path]) -> None:
    """The readout says what the cell is; Enter marks the step and opens the explorer there."""
    browser.open(pages["faulted"])
    choose(browser, "heat-figure", "Underflow ratio")
    chart = browser.find("#heat-chart")
    chart.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    readout = browser.find("#heat-readout").text
    layer, tensor = readout.split(", ")[:2]
    assert layer == "layers.0.gate"
    assert "step 10" in readout
    chart.send_keys(Keys.ENTER)
    browser.wait(f"document.getElementById('explorer-title').textContent === '{layer}'")
    assert browser.find("#tensor-tabs [aria-current]").text == tensor
    assert browser.js("cursor") == 10


def test_search_finds_a_layer_and_enter_opens_it(browser: Browser, pages: dict[str, Path]) -> None:
    """Words in any order narrow the list; Enter opens the first."""
    browser.open(pages["faulted"])
    find = browser.find("#find")
    find.send_keys("up 3")
    assert [link.text for link in browser.all("#layer-list a")] == ["layers.3.up"]
    assert browser.find("#find-count").text == "1 of 20 layers"
    find.send_keys(Keys.ENTER)
    browser.wait("document.getElementById('explorer-title').textContent === 'layers.3.up'")
    find = browser.find("#find")
    find.clear()
    find.send_keys("no such layer")
    assert browser.all("#layer-list a") == []


def test_an_address_opens_a_tensor(browser: Browser, pages: dict[str, Path]) -> None:
    """A link that somebody kept leads back to the same tensor; one to nowhere does no harm."""
    browser.open(pages["faulted"], fragment="#t/3/grad_output")
    assert browser.find("#explorer-title").text == "layers.0.up"
    assert browser.find("#tensor-tabs [aria-current]").text == "grad_output"
    browser.open(pages["faulted"], fragment="#t/999/weight")
    browser.open(pages["faulted"], fragment="#t/1/<script>")
    assert browser.console() == []


def test_the_histogram_is_shaded_where_the_format_ends(browser: Browser, pages: dict[str, Path]) -> None:
    """Bars are shares of all elements; below and above the representable range lie two shaded zones."""
    browser.open(pages["faulted"], fragment="#t/3/weight")
    browser.draw_everything()
    data = "document.querySelector('#explorer-charts [data-chart=histogram]')"
    assert browser.js(f"{data}.data[0].y.reduce((a, b) => a + b, 0)") == pytest.approx(1.0, abs=0.01)
    zones = browser.js(f"{data}.layout.shapes.map((shape) => [shape.x0, shape.x1])")
    assert len(zones) == 3
    assert zones[2][0] - zones[0][1] == pytest.approx(math.log2(464) + 10, abs=0.01)


def test_the_theme_follows_the_system_and_the_button(browser: Browser, pages: dict[str, Path]) -> None:
    """Dark from the system, light by the button, charts repainted each time."""
    browser.open(pages["faulted"], dark=True)
    colour = "getComputedStyle(document.body).backgroundColor"
    text = "getComputedStyle(document.querySelector('#timeline-chart .xtick text')).fill"
    assert browser.js(colour) == "rgb(20, 23, 27)"
    dark_text = browser.js(text)
    browser.find("#theme").click()
    assert browser.js(colour) == "rgb(255, 255, 255)"
    assert browser.js(text) != dark_text
    browser.open(pages["faulted"])
    assert browser.js(colour) == "rgb(255, 255, 255)"
    browser.set_dark(True)
    browser.wait(f"{colour} === 'rgb(20, 23, 27)'")


def test_a_table_sorts_by_any_heading(browser: Browser, pages: dict[str, Path]) -> None:
    """By a figure, largest first and smallest first, missing ones last; by name."""
    browser.open(pages["faulted"])
    column = "[...document.querySelectorAll('#worst tbody tr')].map((row) => row.children[arguments[0]].dataset.value)"
    button = browser.all("#worst th button")[5]
    browser.js("arguments[0].click()", button)
    values = [float(v) for v in browser.js(column, 5) if v]
    assert values == sorted(values, reverse=True)
    browser.js("arguments[0].click()", button)
    assert [float(v) for v in browser.js(column, 5) if v] == sorted(values)
    assert browser.js("arguments[0].closest('th').getAttribute('aria-sort')", button) == "ascending"


def test_ranks_stand_side_by_side(browser: Browser, pages: dict[str, Path]) -> None:
    """A run of three ranks can be seen across them; a run of one offers no such thing."""
    browser.open(pages["ranks"])
    choose(browser, "heat-figure", "Underflow ratio")
    choose(browser, "heat-across", "ranks")
    assert browser.js("heat.shown.labels") == ["0", "1", "2"]
    assert browser.js("document.getElementById('heat-chart').data[0].z[0].length") == 3
    browser.open(pages["faulted"])
    assert [option.text for option in browser.all("#heat-across option")] == ["steps"]


def test_paper_is_light_and_shows_every_card(browser: Browser, pages: dict[str, Path]) -> None:
    """Printing opens the cards and paints the charts light; afterwards the page is as it was."""
    browser.open(pages["faulted"], dark=True)
    browser.js("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.js("document.documentElement.dataset.shown") == "light"
    assert browser.js("[...document.querySelectorAll('details.finding')].every((one) => one.open)")
    assert browser.js("[...document.querySelectorAll('.finding .chart')].every((one) => one.dataset.done)")
    browser.js("window.dispatchEvent(new Event('afterprint'))")
    assert browser.js("document.documentElement.dataset.shown") == "dark"
    assert browser.console() == []


def test_without_script_everything_in_words_is_there(pages: dict[str, Path]) -> None:
    """Verdict, findings, plan, worst tensors and gaps are in the file itself."""
    text = pages["faulted"].read_text(encoding="utf-8").split('<script id="data"')[0]
    for words in ("layers.2.down", "Keep fprop", "False alarm when", "The disk was full.", "Worst tensors"):
        assert words in text
