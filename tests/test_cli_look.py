"""The verbs that look at a run: what report, query and tensors print, and where."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from fp8dbg.runs.folder import RunWriter
from tests.command_line import Run
from tests.synthetic import outlier, write_run

HOSTILE = 'a/../b"; DROP TABLE tensors; --\n\x1b[31m<script>alert(1)</script>🙂[bold]'

# report


def test_report_names_the_layer_and_writes_the_page(fp8dbg: Run, faulty: Path) -> None:
    """The terminal names the faulty layer; the page is in the run folder, and where it is goes to stderr."""
    result = fp8dbg("report", faulty)
    assert result.code == 0
    assert result.out.startswith("layers.2.up")
    assert result.err == f"The page is {faulty / 'report.html'}\n"
    assert "layers.2.up" in (faulty / "report.html").read_text(encoding="utf-8")


def test_report_json_is_the_summary_and_nothing_else(fp8dbg: Run, faulty: Path) -> None:
    """stdout is one JSON document."""
    result = fp8dbg("report", faulty, "--json", "--no-html")
    summary = json.loads(result.out)
    assert result.err == ""
    assert summary["findings"][0]["layer"] == "layers.2.up"
    assert summary["findings"][0]["first_step"] == 100
    assert summary["healthy"] is False


def test_report_html_goes_where_it_is_told(fp8dbg: Run, faulty: Path, tmp_path: Path) -> None:
    """--html names the file."""
    page = tmp_path / "page.html"
    assert fp8dbg("report", faulty, "--html", page).err == f"The page is {page}\n"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_run_folder_that_cannot_be_written_still_reports(fp8dbg: Run, tmp_path: Path) -> None:
    """The page is lost, the report is not; a page asked for by name is an error."""
    run = write_run(tmp_path / "run", plant=outlier())
    (run / "report.html").mkdir()
    result = fp8dbg("report", run)
    assert result.code == 0
    assert result.out.startswith("layers.2.up")
    assert "Cannot write" in result.err
    assert fp8dbg("report", run, "--html", tmp_path).code == 2


def test_hostile_names_stay_names(fp8dbg: Run, tmp_path: Path) -> None:
    """A layer's name from a stranger moves no cursor, opens no tag and is no SQL; as data it comes out whole."""
    row = {
        "step": 0,
        "rank": 0,
        "microbatch": 0,
        "call": 0,
        "layer": HOSTILE,
        "tensor": "input",
        "numel": 4,
        "zeros": 0,
    }
    writer = RunWriter(tmp_path / "run")
    writer.append("tensors", [row])
    writer.close()
    for arguments in (("report", tmp_path / "run"), ("tensors", tmp_path / "run")):
        result = fp8dbg(*arguments)
        assert result.code == 0
        assert "\x1b" not in result.out + result.err
    rows = json.loads(fp8dbg("query", tmp_path / "run", "select layer from tensors", "--json").out)
    assert rows == [{"layer": HOSTILE}]
    assert "<script>alert" not in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


# query


def test_query_json_is_a_list_of_row_objects(fp8dbg: Run, faulty: Path) -> None:
    """Counts stay integers, NULL is null, and what JSON cannot hold is null."""
    sql = "select count(*) as n, sum(numel) as total, 1.5 as half, 'nan'::float as nan, null as nothing from tensors"
    (row,) = json.loads(fp8dbg("query", faulty, sql, "--json").out)
    assert row["n"] == 20 * 20 * 6
    assert isinstance(row["total"], int)
    assert (row["half"], row["nan"], row["nothing"]) == (1.5, None, None)


def test_query_csv_reads_back(fp8dbg: Run, faulty: Path) -> None:
    """A header, a line for each row, an empty field for NULL."""
    result = fp8dbg("query", faulty, "select step, loss, null as nothing from steps order by step", "--csv")
    rows = list(csv.DictReader(io.StringIO(result.out)))
    assert [int(row["step"]) for row in rows] == list(range(200))
    assert rows[0]["nothing"] == ""
    assert float(rows[0]["loss"]) > 0


def test_query_without_rows(fp8dbg: Run, faulty: Path) -> None:
    """No rows is an answer, in every form."""
    sql = "select step from steps where false"
    assert fp8dbg("query", faulty, sql, "--json") == (0, "[]\n", "")
    assert fp8dbg("query", faulty, sql, "--csv") == (0, "step\n", "")
    assert fp8dbg("query", faulty, sql) == (0, "", "No rows.\n")


def test_query_shows_some_rows_and_says_that_there_are_more(fp8dbg: Run, faulty: Path) -> None:
    """A table on a screen has an end; the other forms have all rows."""
    result = fp8dbg("query", faulty, "select step, layer from tensors")
    assert len(result.out.splitlines()) == 201
    assert "first 200" in result.err
    assert len(json.loads(fp8dbg("query", faulty, "select step from tensors", "--json").out)) == 2400


# tensors


def test_tensors_lists_what_was_recorded_and_saved(fp8dbg: Run, tmp_path: Path) -> None:
    """Roles with their steps, and the tensors saved whole."""
    import torch

    run = write_run(tmp_path / "run")
    with_dump = RunWriter(run)
    with_dump.dump(120, "layers.1.up", {"input": torch.ones(2, 3)})
    with_dump.close()
    found = json.loads(fp8dbg("tensors", run, "--layer", "layers.1.up", "--json").out)
    assert {row["tensor"] for row in found["recorded"]} >= {"input", "weight", "grad_output", "output"}
    assert {row["layer"] for row in found["recorded"]} == {"layers.1.up"}
    one = next(row for row in found["recorded"] if row["tensor"] == "input")
    assert (one["first_step"], one["last_step"], one["sampled_steps"], one["amax_rows"]) == (0, 199, 20, 200)
    (saved,) = found["saved"]
    assert (saved["step"], saved["layer"], saved["tensor"]) == (120, "layers.1.up", "input")
    assert Path(saved["file"]).is_file()
    assert "layers.1.up" in fp8dbg("tensors", run).out
