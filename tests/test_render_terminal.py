"""The report in a terminal: it fits, it says what to do, and nothing in it acts."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from fp8dbg.analysis.plan import Plan
from fp8dbg.analysis.run import open_run
from fp8dbg.analysis.summary import Summary, summarise
from fp8dbg.render.terminal import report
from fp8dbg.render.trends import by_step, sparkline, trends
from tests.pages import empty, faulted, hostile
from tests.synthetic import write_run

MAKERS = {"healthy": write_run, "faulted": faulted, "hostile": hostile, "empty": empty}


@pytest.fixture(scope="module")
def summaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Summary, list[str]]]:
    """Each kind of run, summarised, with its sparklines."""
    out = {}
    for name, make in MAKERS.items():
        run = open_run(make(tmp_path_factory.mktemp("runs") / name))
        summary = summarise(run)
        out[name] = (summary, trends(run, summary.findings))
    return out


def printed(found: tuple[Summary, list[str]], width: int = 80, height: int = 24, *, colour: bool = False) -> str:
    """What a terminal of this size is sent."""
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, force_terminal=True, markup=False, highlight=False,
                      color_system="standard" if colour else None)  # fmt: skip
    report(found[0], console, found[1])
    return file.getvalue()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (120, 40)])
def test_every_report_fits_one_screen(
    summaries: dict[str, tuple[Summary, list[str]]], name: str, width: int, height: int
) -> None:
    """No line is wider than the terminal, and the page's line and the prompt still fit below."""
    lines = plain(printed(summaries[name], width, height)).rstrip("\n").split("\n")
    assert max(map(cell_len, lines)) <= width
    assert len(lines) <= height - 2


def test_a_faulted_run_says_what_where_since_when_and_what_to_do(
    summaries: dict[str, tuple[Summary, list[str]]],
) -> None:
    """The worst first, its onset, how it went, the loss spike, the fallback list and the gap."""
    text = printed(summaries["faulted"])
    first = next(line for line in text.splitlines() if line.startswith("act"))
    assert re.match(r"act +layers\.2\.(down +input|up +weight) +100 ▁▁▁▁▁█████ ", first)
    assert "Loss spike at step 150" in text
    plan = text[text.index("Keep in BF16") :]
    assert re.search(r"layers\.2\.down +fprop, wgrad", plan)
    assert re.search(r"layers\.2\.up +fprop, dgrad", plan)
    assert "Not seen: The disk was full." in text


def test_the_verdicts_of_the_table_can_be_looked_up(summaries: dict[str, tuple[Summary, list[str]]]) -> None:
    """Their codes, worst first, each once, under the findings; and what a mark in a trend means, where there is one."""
    summary, lines = summaries["faulted"]
    assert re.search(r"^docs/verdicts\.md explains outlier, coverage$", printed((summary, lines)), re.MULTILINE)
    broken = printed((summary, ["▁▁!!", *lines[1:]]))
    assert re.search(r"^! is NaN or Inf; docs/verdicts\.md explains outlier, coverage$", broken, re.MULTILINE)
    assert "verdicts.md" not in printed(summaries["healthy"])


def test_a_plan_of_more_than_bf16_is_not_headed_bf16_alone(summaries: dict[str, tuple[Summary, list[str]]]) -> None:
    """A layer that gets another recipe says so, and so does the heading."""
    summary, lines = summaries["faulted"]
    first, *rest = summary.plan.entries
    mixed = Plan((replace(first, recipe="mxfp8"), *rest))
    text = printed((replace(summary, plan=mixed), lines))
    assert "Keep in BF16, or as said (fallback plan):" in text
    assert re.search(rf"{first.layer} +{', '.join(first.gemms)} -> mxfp8", text)


def test_a_healthy_run_is_said_to_be_healthy(summaries: dict[str, tuple[Summary, list[str]]]) -> None:
    """No table, no plan: one sentence and what was run."""
    text = printed(summaries["healthy"])
    assert text.startswith("Healthy: nothing found in 20 layers over 20 sampled steps.")
    assert "Keep in BF16" not in text
    assert "act" not in text.split()


def test_an_empty_run_says_what_to_do(summaries: dict[str, tuple[Summary, list[str]]]) -> None:
    """Nothing recorded is the finding."""
    assert "fp8dbg.attach" in printed(summaries["empty"])


def test_hostile_names_neither_act_nor_disappear(summaries: dict[str, tuple[Summary, list[str]]]) -> None:
    """Escape sequences, line breaks and rich's own markup come out as text; 200 kB do not come out at all."""
    text = printed(summaries["hostile"], 120, 40)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\r" not in text
    assert "\\u001b[31mred" in text
    assert "[bold red]markup[/]" in text
    assert "🤖" in text
    assert len(text) < 10_000


def test_colours_are_used_where_there_are_some(summaries: dict[str, tuple[Summary, list[str]]]) -> None:
    """What asks to act is red and bold."""
    assert "\x1b[1;31m" in printed(summaries["faulted"], colour=True)


def test_no_color_is_honoured(summaries: dict[str, tuple[Summary, list[str]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR set the console that the command line makes prints no colour; into a file no escape at all."""
    from fp8dbg.output import console

    monkeypatch.setenv("NO_COLOR", "1")
    made = console()
    file = io.StringIO()
    made.file = file
    report(summaries["faulted"][0], made)
    assert "\x1b[" not in file.getvalue()
    forced = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, markup=False)
    report(summaries["faulted"][0], forced)
    shown = forced.file.getvalue() if isinstance(forced.file, io.StringIO) else ""
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", shown)


def test_many_findings_are_counted_not_scrolled(summaries: dict[str, tuple[Summary, list[str]]]) -> None:
    """What does not fit is counted, in findings and in the plan."""
    text = printed(summaries["hostile"])
    assert re.search(r"and \d+ more; report.html", text)
    assert re.search(r"^  and \d+ more$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.0, 0.5, 1.0], "▁▅█"),
        ([0.0, None, 1.0], "▁ █"),
        ([0.3, 0.3, 0.3], "▁▁▁"),
        ([0.0, 1.0, math.nan, math.nan], "▁█!!"),
        ([None, None], ""),
        ([], ""),
    ],
)
def test_a_sparkline_rises_from_the_smallest_to_the_largest(values: list[float | None], text: str) -> None:
    """Gaps are spaces, a flat series is low, nothing is nothing."""
    assert sparkline(values) == text


def test_the_width_of_a_pipe_is_enough(tmp_path: Path, summaries: dict[str, tuple[Summary, list[str]]]) -> None:
    """Into a file, a report has 80 columns and no escapes."""
    with open(tmp_path / "out.txt", "w+", encoding="utf-8") as file:
        report(summaries["faulted"][0], Console(file=file, markup=False, highlight=False))
        file.seek(0)
        text = file.read()
    assert "\x1b" not in text
    assert max(map(cell_len, text.split("\n"))) <= 80


def test_a_trend_is_by_step_however_often_a_stretch_was_sampled() -> None:
    """Extra samples near step 300 of 500 do not move the onset: the seventh tenth is where it is high."""
    steps = sorted({*range(0, 500, 10), *range(290, 310)})
    worst = by_step(steps, [float(step >= 300) for step in steps], 0, 499)
    assert sparkline(worst) == "▁▁▁▁▁▁████"


def test_a_sentence_on_what_was_not_seen_is_wrapped_and_not_cut(
    summaries: dict[str, tuple[Summary, list[str]]],
) -> None:
    """Its end is the instruction: at 80 columns it is there, on a second line."""
    summary, lines = summaries["healthy"]
    said = (
        "No figures of the experts were recorded, as they are called through a fused kernel: attach with every=10 and "
    )
    coverage = replace(summary.coverage, notes=[f"{said}run again with it turned off."])
    text = " ".join(printed((replace(summary, coverage=coverage), lines)).split())
    assert f"{said}run again with it turned off." in text
