"""The page as a file: whole or not there, and nothing in its data can end its script."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fp8dbg.analysis.run import open_run
from fp8dbg.analysis.summary import summarise
from fp8dbg.errors import UsageError
from fp8dbg.render.cards import CHART_TITLES, CHARTS_OF
from fp8dbg.render.evidence_table import evidence_table
from fp8dbg.render.html import charts, write_report
from fp8dbg.render.markup import Heading, number, table
from fp8dbg.render.page_data import PageData
from fp8dbg.render.page_words import false_alarm, fingerprint
from fp8dbg.runs.folder import RunWriter
from fp8dbg.runs.queries import ask
from tests.pages import HOSTILE, faulted, hostile
from tests.test_analysis_finding import finding


def test_the_page_lies_in_the_run_folder_by_default(tmp_path: Path) -> None:
    """And nothing else is left beside it."""
    run = open_run(faulted(tmp_path / "r"))
    before = set(os.listdir(tmp_path / "r"))
    assert write_report(run, summarise(run)) == tmp_path / "r" / "report.html"
    assert set(os.listdir(tmp_path / "r")) - before == {"report.html"}


def test_a_page_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    """The target is a folder: the error names it, and what was there stays."""
    run = open_run(faulted(tmp_path / "r"))
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match=r"Cannot write .*taken: .*--html"):
        write_report(run, summarise(run), tmp_path / "taken")
    assert sorted(os.listdir(tmp_path)) == ["r", "taken"]


def test_data_cannot_leave_its_script_element(tmp_path: Path) -> None:
    """No ``<`` of any name is in the embedded JSON, and it reads back."""
    run = open_run(hostile(tmp_path / "r"))
    text = write_report(run, summarise(run)).read_text(encoding="utf-8")
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    assert "<" not in found[1]
    titles = [layer["title"] for layer in json.loads(found[1])["layers"]]
    assert titles[0] == HOSTILE[0]
    assert len(titles) == len(HOSTILE)


def test_the_fingerprint_tells_the_recipe_in_force_from_the_one_compared_with(tmp_path: Path) -> None:
    """run.json has the latter alone, which looked like the run's."""
    facts = {"layers": [{"layer": "a"}], "recipe": {"name": "block", "parameters": {}}}
    RunWriter(tmp_path / "r", rank=0, fingerprint=facts).close()
    run = summarise(open_run(tmp_path / "r"))
    groups = fingerprint(replace(run, run=replace(run.run, recipes=["delayed:history=16"])))
    assert "recipe" not in groups
    assert groups["compared with"]["name"] == "block"
    assert groups["in force"] == {"recipes": ["delayed:history=16"]}


def test_many_samples_are_thinned_and_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the budget buckets hold several steps; layers that findings name are drawn finer; the page says both."""
    monkeypatch.setattr("fp8dbg.render.page_data.VALUES", 1)
    monkeypatch.setattr("fp8dbg.render.page_data.FEWEST_BUCKETS", 5)
    run = open_run(faulted(tmp_path / "r"))
    data = PageData(run, ["layers.2.up"], [100])
    assert [bucket.sampled for bucket in data.grid.buckets] == [4, 4, 4, 4, 4]
    assert data.close is not None
    assert len(data.close.buckets) == 20
    assert set(data.close.tensors.keys["layer"]) == {"layers.2.up"}
    text = write_report(run, summarise(run)).read_text(encoding="utf-8")
    assert "up to 4 sampled steps share one point or cell" in text


def test_a_recipe_only_compared_with_is_not_mixed_with_the_one_in_force(tmp_path: Path) -> None:
    """Where both were measured, every chart draws the one in force."""
    writer = RunWriter(tmp_path / "r", rank=0, fingerprint={})
    counts = {"numel": 100, "zeros": 0, "nan": 0, "inf": 0, "saturated": 0, "amax": 1.0, "format": "e4m3"}
    keys = {"step": 0, "microbatch": 0, "call": 0, "rank": 0, "layer": "a", "tensor": "input"}
    histogram = {"exponent": 0, "counts": [100], "codes": None}
    for what_if, lost, scale in ((None, 1, 448.0), ("mxfp8", 50, 2.0)):
        figures = {"underflow": lost, "scale": scale, "what_if": what_if, "histogram": histogram}
        row = keys | counts | figures | {"recipe": what_if or "delayed"}
        writer.append("tensors", [row, row | {"rank": 1}])
    writer.close()
    run = open_run(tmp_path / "r")
    for question, places in (("page_tensors", 1), ("page_ranks", 2)):
        (row,) = ask(run, question)
        assert row["underflow_ratio"] == [pytest.approx(0.01)] * places
    (row,) = ask(run, "page_histograms", steps="[0]")
    assert row["scale"] == 448.0


def test_numbers_line_up_and_missing_ones_are_dashes() -> None:
    """Three digits, thousands apart, a true minus; ratios as per cent; what is not there is an en dash."""
    shown = [number(v) for v in (0, 1234567, 0.123456, -5.0, 1.5e-7, 2.5e6, None, float("nan"))]
    assert shown == ["0", "1\u202f234\u202f567", "0.123", "−5", "1.50e−07", "2.50e+06", "–", "–"]
    cells = table([Heading("r", "ratio", "%", "percent")], [{"r": 0.0123}, {"r": None}])
    assert '<td class="n" data-value="0.0123">1.23</td>' in cells
    assert '<td class="n" data-value="">–</td>' in cells


def test_every_verdict_says_when_it_is_a_false_alarm() -> None:
    """The page takes the sentence from the verdict's own documentation."""
    from fp8dbg.analysis.verdicts import VERDICTS

    assert [verdict.CODE for verdict in VERDICTS if not false_alarm(verdict.CODE)] == []


def test_cards_name_charts_and_verdicts_that_exist() -> None:
    """A chart's name that is mistyped would leave a card without its chart."""
    from fp8dbg.analysis.verdicts import VERDICTS

    assert set(CHARTS_OF) <= {verdict.CODE for verdict in VERDICTS}
    assert {name for names in CHARTS_OF.values() for name in names} <= set(charts())
    assert set(CHART_TITLES) == set(charts())


HISTORY = {"layer": "up", "first_step": 0, "last_step": 499, "rows": 500, "rows_at_one": 1, "high_reach": 8.81}


def test_the_history_of_an_amax_is_told_under_names_that_say_what() -> None:
    """Of one that clips, how far it reached; its scale's start and the record's own steps are left out."""
    evidence = [{**HISTORY, "highest_reach": 12.6, "highest_at": 428, "margin_needed": 5}]
    clips = evidence_table(finding("saturation", layer="up", evidence=evidence))
    told = ("usual scale x amax <log2>", "largest scale x amax <log2>", "largest at step", "margin that holds it")
    assert headings(clips) == list(told)
    frozen = headings(evidence_table(finding("frozen_scale", layer="up", evidence=evidence)))
    assert frozen[:4] == ["first step", "last step", "amaxes recorded", "amaxes under a scale of 1"]


def test_what_verdicts_reckon_with_is_not_shown() -> None:
    """Positions among the sampled steps tell a reader nothing."""
    row = {"figure": "rel_l2", "limit": 0.1, "first_step": 300, "before": 290, "position": 31, "total_steps": 51}
    shown = headings(evidence_table(finding("outlier", evidence=[row])))
    assert shown == ["figure", "limit", "first step", "last step without it"]


def headings(table: str) -> list[str]:
    """A table's titles, units in angle brackets."""
    cells = re.findall(r"<th(?: class=\"n\")?>(.*?)</th>", table)
    return [re.sub(r'<span class="unit">(.*?)</span>', r"<\1>", cell) for cell in cells]
