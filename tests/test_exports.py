"""Getting data out: other programs' formats, data frames, notebooks, and folders that lie elsewhere."""

from __future__ import annotations

import csv
import json
import math
import os
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest

import fp8dbg
from fp8dbg.errors import RunFolderError, UnknownNameError, UsageError
from fp8dbg.render.exports import export
from fp8dbg.runs.queries import ask
from fp8dbg.runs.schema import TABLES
from tests.command_line import Run, in_a_process
from tests.nets import Net
from tests.synthetic import outlier, write_run

HOSTILE = "layers.0/../../<b>é"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of two ranks with an outlier."""
    path = tmp_path_factory.mktemp("exports") / "run"
    return write_run(path, blocks=1, steps=60, ranks=2, plant=outlier("layers.0.up", step=30))


def curves(folder: Path) -> dict[tuple[int, str], float]:
    with fp8dbg.open_run(folder) as run:
        return {(row["step"], row["name"]): row["value"] for row in ask(run, "exported")}


def test_a_curve_is_the_figure_of_the_whole_step(folder: Path) -> None:
    """All ranks together, as the merged views have it; no value that is NULL becomes a point."""
    found = curves(folder)
    with fp8dbg.open_run(folder) as run:
        for row in run.rows("select * from tensor_steps where layer = 'layers.0.up' and tensor = 'weight'"):
            assert found[row["step"], "underflow_ratio/layers.0.up/weight"] == row["underflow_ratio"]
        loss = run.rows("select step, avg(loss) as loss from steps group by step")
    assert all(found[row["step"], "loss"] == row["loss"] for row in loss)
    assert all(math.isfinite(value) for value in found.values())
    assert not [
        name for _, name in found if "output" in name.split("/")[-1] and name.startswith("rel_l2/layers.0.up/output")
    ]


def test_parquet_and_csv_hold_every_row(folder: Path, tmp_path: Path) -> None:
    """One file a table, histograms included."""
    with fp8dbg.open_run(folder) as run:
        done = [export(run, to, tmp_path / to) for to in ("parquet", "csv")]
        counts = {name: run.rows(f"select count(*) as n from {name}")[0]["n"] for name in TABLES}
        assert [one.rows for one in done] == [sum(counts.values())] * 2
        for name in TABLES:
            assert pq.read_table(tmp_path / "parquet" / f"{name}.parquet").equals(run.arrow(name))
            with (tmp_path / "csv" / f"{name}.csv").open(newline="") as file:
                rows = list(csv.DictReader(file))
            assert len(rows) == counts[name]
            if name == "tensors":
                first = run.rows("select histogram from tensors limit 1")[0]["histogram"]
                assert (json.loads(rows[0]["histogram"]) if rows[0]["histogram"] else None) == first


def test_the_rows_of_steps_come_in_order(tmp_path: Path) -> None:
    """They are put together of several, in parallel: a loss curve is drawn from them as they come."""
    folder = write_run(tmp_path / "run", blocks=1, steps=3000, every=1000, ranks=2)
    with fp8dbg.open_run(folder) as run:
        steps = run.arrow("steps").select(["step", "rank"]).to_pylist()
    assert steps == [{"step": step, "rank": rank} for step in range(3000) for rank in (0, 1)]


def test_tensorboard_reads_back_what_was_recorded(folder: Path, tmp_path: Path) -> None:
    """Every point of the loss in the event file, as TensorBoard's own protocol has it."""
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with fp8dbg.open_run(folder) as run:
        done = export(run, "tensorboard", tmp_path / "tb")
    events = [Event.FromString(data) for data in records(next((tmp_path / "tb").iterdir()))]
    found = {(e.step, v.tag): v.simple_value for e in events for v in e.summary.value}
    expected = curves(folder)
    assert len(found) == done.rows == len(expected)
    assert all(found[key] == pytest.approx(value, rel=1e-6) for key, value in expected.items())


def records(path: Path) -> list[bytes]:
    """The records of a TFRecord file: length, its checksum, data, its checksum."""
    data, out, at = path.read_bytes(), [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        out.append(data[at + 12 : at + 12 + length])
        at += 16 + length
    return out


@pytest.mark.slow
def test_mlflow_reads_back_what_was_recorded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through its own client; our variable does not stay in the environment."""
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with fp8dbg.open_run(folder) as run:
        export(run, "mlflow", tmp_path / "ml")
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=(tmp_path / "ml").as_uri())
    experiment = client.get_experiment_by_name("fp8dbg")
    assert experiment is not None
    logged = client.search_runs([experiment.experiment_id])[0]
    history = client.get_metric_history(logged.info.run_id, "rel_l2/layers.0.up/weight")
    expected = {s: v for (s, name), v in curves(folder).items() if name == "rel_l2/layers.0.up/weight"}
    assert {m.step: m.value for m in history} == expected


@pytest.mark.slow
def test_wandb_writes_an_offline_run(folder: Path, tmp_path: Path) -> None:
    """A file that `wandb sync` takes, with the curves' names in it; nothing goes over the network."""
    pytest.importorskip("wandb")
    with fp8dbg.open_run(folder) as run:
        export(run, "wandb", tmp_path / "wb")
    files = list((tmp_path / "wb" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 1
    assert b"underflow_ratio/layers.0.up/weight" in files[0].read_bytes()


def test_an_export_never_writes_over_something(folder: Path, tmp_path: Path) -> None:
    """A folder in use is refused, an unknown format lists those there are."""
    (tmp_path / "mine").write_text("x")
    with fp8dbg.open_run(folder) as run:
        with pytest.raises(UsageError, match="not an empty folder"):
            export(run, "csv", tmp_path)
        with pytest.raises(UnknownNameError, match=r"csv, mlflow, parquet, tensorboard, wandb"):
            export(run, "xlsx", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("to", "library"), [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("mlflow", "mlflow")])
def test_a_missing_library_is_a_sentence(folder: Path, tmp_path: Path, to: str, library: str) -> None:
    """Where it is not installed: which, and how to get it; exit code 2 and no traceback."""
    done = in_a_process("export", folder, tmp_path / "out", "--to", to, before=f"sys.modules[{library!r}] = None")
    assert done.code == 2
    assert done.err.strip() == f"fp8dbg: {library} is not installed. pip install 'fp8dbg[{to}]' brings it."


def test_a_hostile_layer_name_stays_below_the_folder(tmp_path: Path) -> None:
    """A tracker that makes files of names gets none that leads out of its folder."""
    pytest.importorskip("mlflow")
    from fp8dbg.render.exports import _tame

    assert _tame(f"amax/{HOSTILE}/input") == "amax/layers.0/__/__/_b__/input"


def test_frames_are_the_tables(folder: Path) -> None:
    """pandas, Arrow and Polars: the same rows in the same columns; an unknown table lists the tables."""
    with fp8dbg.open_run(folder) as run:
        frame, arrow = run.df("tensors"), run.arrow("tensors")
        assert list(frame.columns) == arrow.column_names == list(TABLES["tensors"].names)
        assert len(frame) == arrow.num_rows == run.rows("select count(*) as n from tensors")[0]["n"]
        with pytest.raises(UnknownNameError, match="tensor_ratios"):
            run.df("tensor")
        pytest.importorskip("polars")
        assert run.polars("steps").columns == list(TABLES["steps"].names)


def test_a_notebook_shows_a_run_and_a_session(folder: Path, tmp_path: Path) -> None:
    """Headline and findings as HTML, names escaped."""
    with fp8dbg.open_run(folder) as run:
        shown = run._repr_html_()
        assert shown.startswith("<div><p><b>layers.0.up")
        assert "<td>layers.0.up</td><td>weight</td><td>30</td>" in shown
    with fp8dbg.attach(Net(), tmp_path / "<i>run") as session:
        assert "&lt;i&gt;run" in session._repr_html_()
        assert "recording" in session._repr_html_()
    assert "closed" in session._repr_html_()


def test_a_run_is_read_from_a_file_system_of_fsspec(folder: Path) -> None:
    """By its URL; the same rows as from the disk, saved tensors left where they are."""
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/bucket/run", recursive=True)
    memory.pipe("/bucket/run/dumps/rank=00000/step=000000/x.safetensors", b"big")
    try:
        with fp8dbg.open_run(folder) as here, fp8dbg.open_run("memory://bucket/run") as there:
            assert there.problems == here.problems == []
            for name in TABLES:
                assert sorted(map(repr, there.rows(f"from {name}"))) == sorted(map(repr, here.rows(f"from {name}")))
            assert not (there.path / "dumps").exists()
            copy = there.path
        del there
        assert not copy.exists()
    finally:
        memory.rm("/bucket", recursive=True)


def test_the_command_line_takes_a_url(folder: Path, fp8dbg: Run) -> None:
    """Though pathlib makes one slash of two."""
    sql = "select count(*) as n from steps"
    assert fp8dbg("query", f"file://{folder}", sql, "--csv") == (0, "n\n120\n", "")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("memory://nothing/here", "no run folder at memory://nothing/here"),
        ("nosuch://bucket/run", "nosuch"),
        ("s3://bucket/run", "Install s3fs"),
    ],
)
def test_what_cannot_be_read_from_afar_is_a_sentence(url: str, says: str) -> None:
    """Nothing there; a scheme that nothing knows; a store whose library is missing."""
    if url.startswith("s3:"):
        try:
            import s3fs  # type: ignore[import-not-found]  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("s3fs is installed here")
    with pytest.raises(RunFolderError, match=says):
        fp8dbg.open_run(url)


def test_folders_of_many_ranks_are_one_run(tmp_path: Path) -> None:
    """Each rank wrote a folder of its own on its own disk; opened together they are what one folder would be."""
    whole = write_run(tmp_path / "whole", blocks=1, steps=20, ranks=3)
    apart: list[Any] = []
    for rank in range(3):
        place = tmp_path / f"node{rank}"
        for file in whole.rglob(f"rank={rank:05d}/*.parquet"):
            target = place / file.relative_to(whole)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
        name = "run.json" if rank == 0 else f"run.rank-{rank:05d}.json"
        (place / name).write_bytes((whole / name).read_bytes())
        apart.append(place)
    with fp8dbg.open_run(whole) as one, fp8dbg.open_run(apart) as many:
        assert sorted(map(repr, many.rows("from tensors"))) == sorted(map(repr, one.rows("from tensors")))
        assert [(f.code, f.layer) for f in many.findings()] == [(f.code, f.layer) for f in one.findings()]
