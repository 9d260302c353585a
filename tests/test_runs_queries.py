"""Questions and queries: what may be asked, what is refused, and that every report says what it returns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from fp8dbg import reports
from fp8dbg.errors import QueryError, UnknownNameError
from fp8dbg.runs import queries
from fp8dbg.runs.folder import Folder, RunWriter, open_folder
from fp8dbg.runs.queries import QUESTIONS, VIEWS, ask
from fp8dbg.runs.questions import header, parse_question
from fp8dbg.runs.schema import TABLES
from fp8dbg.runs.views import TENSOR_RATIOS
from tests.recorded import rows_of


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """A run in which nothing was recorded."""
    path = tmp_path_factory.mktemp("empty")
    RunWriter(path).close()
    with open_folder(path) as folder:
        yield folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """Three steps, in parts."""
    path = tmp_path_factory.mktemp("run")
    with RunWriter(path) as writer:
        for step in range(3):
            for table, rows in rows_of(step).items():
                writer.append(table, rows)
    with open_folder(path) as folder:
        yield folder


# Every report.

HEADER_LINES = {
    "Question": r".+\?",
    "Reads": r"\w+(, \w+)*",
    "Parameters": r"none|\w+ \((text|integer|number|boolean), default .+?\): .+",
    "Columns": r"\w+: .+",
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_report_starts_with_its_header(name: str) -> None:
    """Question, Reads, Parameters, Columns, in this order, each line in its form, nothing else before the SQL."""
    lines = reports.text(f"{name}.sql").splitlines()
    comments = lines[: next(i for i, line in enumerate(lines) if not line.startswith("--"))]
    starts = [m[1] for line in comments if (m := re.match(r"-- (\w+):", line))]
    assert [s for s in starts if s in HEADER_LINES] == list(HEADER_LINES)
    for field, content in header(reports.text(f"{name}.sql")).items():
        assert all(re.fullmatch(HEADER_LINES[field], line) for line in content), (field, content)
        assert content or field == "Parameters"
    continued = [line for line in comments if not re.match(r"-- (Question|Reads|Parameters|Columns):", line)]
    assert all(line.startswith("--   ") for line in continued)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_report_returns_the_columns_it_describes(name: str, empty: Folder, run: Folder) -> None:
    """In that order, also on an empty run; it reads what it says and takes the parameters it says."""
    question = QUESTIONS[name]
    values = question.values({})
    for folder in (empty, run):
        ask(folder, name)
        assert folder.sql(question.sql, values).columns == list(question.columns)
    code = re.sub(r"--.*", "", question.sql)
    assert set(re.findall(r"\$(\w+)", code)) == set(question.parameters)
    read = {view for view in VIEWS if re.search(rf"\b(from|join)\s+{view}\b", code, re.IGNORECASE)}
    assert set(question.reads) == read


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_report_only_reads(name: str, empty: Folder) -> None:
    """It passes the same check as a user's query, and takes NULL for every parameter."""
    question = QUESTIONS[name]
    ask(empty, name, **dict.fromkeys(question.parameters))


def test_a_header_is_read_into_data() -> None:
    """Parameters with and without defaults of every type; columns in order; later comments are SQL's own."""
    sql = """-- Question: Which layers underflow, and
--   since when?
-- Reads: tensors, steps
-- Parameters: layer (text, default NULL): only this layer; NULL is all
--   least (number, default 0.5): smallest ratio
--   rows (integer, default 20): how many: at most
--   all (boolean, default false): every step
--   format (text, default 'e4m3'): number format
-- Columns:
--   layer: the layer
--   ratio: the ratio: worst
select 1 as layer, 2 as ratio
-- Columns: not this
"""
    question = parse_question("q", sql)
    assert question.question == "Which layers underflow, and since when?"
    assert question.reads == ("tensors", "steps")
    assert question.values({}) == {"layer": None, "least": 0.5, "rows": 20, "all": False, "format": "e4m3"}
    assert question.parameters["rows"].meaning == "how many: at most"
    assert dict(question.columns) == {"layer": "the layer", "ratio": "the ratio: worst"}


def test_unknown_questions_and_parameters_list_the_valid_ones(run: Folder) -> None:
    """By name."""
    with pytest.raises(UnknownNameError, match=r"No question is called 'underflows'\. Valid names: "):
        ask(run, "underflows")
    with pytest.raises(UnknownNameError, match=r"No parameter of underflow is called 'layre'\. Valid names: .*layer"):
        ask(run, "underflow", layre="x")


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [
        ("layer", "x", True),
        ("layer", None, True),
        ("layer", 1, False),
        ("rows", 3, True),
        ("rows", True, False),
        ("rows", 3.0, False),
        ("rows", "3", False),
        ("least", 3, True),
        ("least", 0.5, True),
        ("least", False, False),
        ("all", True, True),
        ("all", 1, False),
    ],
)
def test_parameters_are_checked_by_type(name: str, value: object, good: bool) -> None:
    """A bool is no number, a number no text."""
    parameters = "layer (text, default NULL): a\n--   rows (integer, default 1): b\n--   least (number, default 1): c"
    sql = (
        f"-- Question: q?\n-- Reads: steps\n-- Parameters: {parameters}\n--   all (boolean, default true): d\nselect 1"
    )
    question = parse_question("q", sql)
    if good:
        assert question.values({name: value})[name] == value
    else:
        with pytest.raises(QueryError, match=rf"Parameter {name} of q is .*, a {type(value).__name__}\. It takes "):
            question.values({name: value})


# A user's SQL.


@pytest.mark.parametrize(
    "query",
    [
        "COPY (SELECT 1) TO '{out}'",
        "COPY tensors TO '{out}' (FORMAT csv)",
        "WITH c AS (COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)) SELECT * FROM c",
        "SELECT * FROM (WITH c AS (COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)) SELECT * FROM c)",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)",
        "SELECT * FROM query('WITH c AS (COPY (SELECT 1) TO ''{part}'' (USE_TMP_FILE false)) SELECT * FROM c')",
        "SELECT 1; COPY (SELECT 1) TO '{out}'",
        "EXPORT DATABASE '{out}'",
        "ATTACH '{out}'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "CREATE TABLE t AS SELECT 1",
        "DROP VIEW tensors",
        "INSERT INTO tensors SELECT * FROM tensors",
        "SET threads = 1",
        "RESET lock_configuration",
        "PRAGMA version",
        "CALL pragma_version()",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_blob('/etc/passwd')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM sniff_csv('/etc/passwd')",
        "SELECT * FROM read_parquet('{part}')",
        "SELECT * FROM parquet_metadata('{part}')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM '/etc/passwd.csv'",
        "SELECT * FROM 'https://example.com/x.parquet'",
        "SELECT (SELECT content FROM read_text('/etc/passwd'))",
        "SELECT * FROM arrow_scan(1, 2, 3)",
        "SELECT * FROM python_map_function(1)",
        "SELECT * FROM json_execute_serialized_sql('{{}}')",
        "SELECT getenv('HOME')",
        "SELECT * FROM duckdb_secrets()",
        "SELECT * FROM local_frame",
        "DESCRIBE SELECT * FROM read_csv('/etc/passwd')",
        "SUMMARIZE '/etc/passwd.csv'",
        "",
        ";",
        "-- nothing",
        "SELEC 1",
        "\ud800",
        "SELECT '\0",
    ],
)
def test_a_query_reads_the_run_and_nothing_else(run: Folder, tmp_path: Path, query: str) -> None:
    """Refused with one line; no file is written, the parts are as they were, and the next query is answered."""
    local_frame = pa.table({"a": [1]})
    [part] = (run.path / "tensors").rglob("*.parquet")
    before = part.read_bytes()
    with pytest.raises(QueryError) as refused:
        run.sql(query.format(out=tmp_path / "out", part=part)).fetchall()
    assert len(str(refused.value).splitlines()) == 1
    assert local_frame.num_rows == 1
    assert part.read_bytes() == before
    assert list(tmp_path.iterdir()) == []
    assert sorted(p.name for p in part.parent.iterdir()) == [part.name]
    assert run.sql("SELECT count(*) FROM tensors").fetchall() == [(72,)]


@pytest.mark.parametrize(
    ("query", "params", "answer"),
    [
        ("SELECT count(*) FROM steps", None, [(3,)]),
        ("FROM steps SELECT max(step)", None, [(2,)]),
        ("SELECT max(step) FROM steps;", None, [(2,)]),
        ("SELECT step FROM steps WHERE step = ?", [1], [(1,)]),
        ("SELECT step FROM steps WHERE step = $s AND $s > 0", {"s": 1}, [(1,)]),
        ("WITH a AS (FROM steps) SELECT count(*) FROM a", None, [(3,)]),
        (
            "WITH RECURSIVE r AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM r WHERE i < 3) SELECT sum(i) FROM r",
            None,
            [(6,)],
        ),
        ("SELECT sum(i) FROM range(4) AS t(i)", None, [(6,)]),
        ("SELECT unnest([1, 2])", None, [(1,), (2,)]),
        ("SELECT count(*) FROM (SELECT 1 UNION ALL SELECT 2)", None, [(2,)]),
        ("PIVOT (SELECT step, rank FROM steps) ON rank IN (0) USING count(*) ORDER BY step LIMIT 1", None, [(0, 1)]),
        ("SELECT column_name FROM (DESCRIBE steps) LIMIT 1", None, [("step",)]),
        ("SELECT 'COPY_QUERY_NODE'", None, [("COPY_QUERY_NODE",)]),
        ("SELECT count(*) FROM tensors WHERE layer = '''; DROP VIEW tensors; --'", None, [(0,)]),
    ],
)
def test_what_reads_is_answered(run: Folder, query: str, params: queries.Parameters, answer: list[object]) -> None:
    """Every way of asking that is not writing."""
    assert run.sql(query, params).fetchall() == answer


def test_unknown_columns_and_tables_are_named(run: Folder) -> None:
    """With the valid ones of the tables that the query reads."""
    with pytest.raises(QueryError, match=r"\"losss\" not found.* Columns of steps: step, rank, loss, .*reason\.$"):
        run.sql("SELECT losss FROM steps")
    with pytest.raises(QueryError, match=r"stepz does not exist.* The tables are steps, amax, tensors, gemms, events"):
        run.sql("FROM stepz")


def test_what_fails_while_running_is_a_query_error(run: Folder) -> None:
    """`rows` runs the query."""
    with pytest.raises(QueryError, match="Could not convert string 'x' to INT32"):
        run.rows("SELECT CAST(CASE WHEN step = 1 THEN 'x' ELSE '1' END AS INTEGER) FROM steps")


# The views.


@pytest.mark.parametrize(
    ("counts", "ratios"),
    [
        (
            {"numel": 100, "zeros": 10, "nan": 5, "inf": 5, "underflow": 20, "saturated": 9, "at_max": 18},
            (20 / 80, 9 / 90, 18 / 90, 5 / 100, 20.0, "non-finite"),
        ),
        (
            {"numel": 4, "zeros": 0, "nan": 0, "inf": 0, "underflow": 0, "saturated": 0, "at_max": 1},
            (0.0, 0.0, 0.25, 0.0, 0.0, "ok"),
        ),
        (
            {"numel": 4, "zeros": 4, "nan": 0, "inf": 0, "underflow": 0, "saturated": 0, "at_max": 0},
            (None, 0.0, 0.0, 0.0, 0.0, "all zero"),
        ),
        (
            {"numel": 0, "zeros": 0, "nan": 0, "inf": 0, "underflow": 0, "saturated": 0, "at_max": 0},
            (None, None, None, None, None, "empty"),
        ),
        (
            {"numel": 2, "zeros": 0, "nan": 2, "inf": 0, "underflow": 0, "saturated": 0, "at_max": 0},
            (None, None, None, 1.0, 0.0, "non-finite"),
        ),
        ({}, (None, None, None, None, None, None)),
        ({"numel": 8, "zeros": 0, "nan": 0, "inf": 0}, (None, None, None, 0.0, None, "ok")),
    ],
)
def test_ratios_follow_from_the_counts(tmp_path: Path, counts: dict[str, int], ratios: tuple[object, ...]) -> None:
    """Metrics.md's edge cases: empty, all zero, non-finite, never counted."""
    with RunWriter(tmp_path) as writer:
        writer.append("tensors", [{"step": 0, "rank": 0, **counts}])
    with open_folder(tmp_path) as run:
        assert run.sql(f"SELECT {', '.join(TENSOR_RATIOS)} FROM tensor_ratios").fetchall() == [ratios]


def test_no_view_returns_nan(run: Folder) -> None:
    """Every float column of every table, over all rows."""
    for view in TABLES:
        for row in run.rows(f"SELECT * FROM {view}"):
            assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))


def test_results_come_as_pandas_and_arrow(run: Folder) -> None:
    """With the types of the schema."""
    relation = run.sql("SELECT step, layer, mse FROM tensors")
    assert list(relation.df().dtypes.astype(str)) in (["int64", "str", "float64"], ["int64", "object", "float64"])
    assert relation.to_arrow_table().schema.types == [pa.int64(), pa.string(), pa.float64()]
