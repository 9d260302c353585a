"""Saved tensors: what is read is what was saved, and what cannot be saved stops nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8dbg.errors import RunFolderError
from fp8dbg.runs.folder import RunWriter, open_folder
from tests.nets import attached, table


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64])
def test_dumps_keep_dtype_and_values(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also of a transposed view, whose memory is not contiguous."""
    tensor = torch.arange(6).reshape(2, 3).to(torch.float32).to(dtype).t()
    with RunWriter(tmp_path) as writer:
        writer.dump(1, "l", {"weight": tensor})
    with open_folder(tmp_path) as run:
        loaded = run.dumps()[0].load()
    assert loaded.dtype == dtype
    assert loaded.shape == (3, 2)
    assert torch.equal(loaded.float(), tensor.float())


def test_a_file_that_is_no_dump_is_passed_over(tmp_path: Path) -> None:
    """Cut, foreign, or with a header that claims to be huge."""
    with RunWriter(tmp_path) as writer:
        [path] = writer.dump(1, "l", {"weight": torch.zeros(3)})
    for name, data in {
        "a": b"",
        "b": b"\xff" * 20,
        "c": path.read_bytes()[:20],
        "d": b"\x02" + bytes(7) + b"{}",
    }.items():
        path.with_name(f"{name}.safetensors").write_bytes(data)
    with open_folder(tmp_path) as run:
        assert [d.path for d in run.dumps()] == [path]


def test_a_cut_dump_is_passed_over_and_a_damaged_one_named(tmp_path: Path) -> None:
    """Whatever its header promises: neither is a traceback of safetensors."""
    with RunWriter(tmp_path) as writer:
        whole, cut, damaged = (writer.dump(step, "l", {"weight": torch.ones(3)})[0] for step in range(3))
    cut.write_bytes(cut.read_bytes()[:-1])
    damaged.write_bytes(damaged.read_bytes().replace(b"F32", b"F99"))
    with open_folder(tmp_path) as run:
        first, last = run.dumps()
        assert (first.path, last.path) == (whole, damaged)
        assert first.load().tolist() == [1.0, 1.0, 1.0]
        with pytest.raises(RunFolderError, match="cannot be read"):
            last.load()


def _block_with_a_file(dumps: Path) -> None:
    dumps.write_text("not a folder")


def _block_with_a_link_to_nowhere(dumps: Path) -> None:
    dumps.symlink_to("nowhere/at/all")


def _block_further_down(dumps: Path) -> None:
    (dumps / "rank=00000").mkdir(parents=True)
    (dumps / "rank=00000" / "step=000001").write_text("not a folder")


BLOCKS = [_block_with_a_file, _block_with_a_link_to_nowhere, _block_further_down]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_blocked_dumps_folder_stops_dumps_alone(tmp_path: Path, block: Callable[[Path], None]) -> None:
    """One event says so, whatever else would be saved; rows are recorded to the end, and the run is finished."""
    with RunWriter(tmp_path) as writer:
        block(tmp_path / "dumps")
        for step in (1, 2):
            assert writer.dump(step, "l", {"input": torch.zeros(3), "weight": torch.zeros(3)}) == []
            writer.append("steps", [{"step": step, "rank": 0, "loss": 1.0}])
        assert writer.stopped == ""
    with open_folder(tmp_path) as run:
        assert run.state == "finished"
        assert run.sql("SELECT step FROM steps ORDER BY step").fetchall() == [(1,), (2,)]
        [(step, kind, layer, detail)] = run.sql("SELECT step, kind, layer, detail FROM events").fetchall()
    assert (step, kind, layer) == (1, "error", "l")
    assert str(tmp_path / "dumps") in detail


def test_a_training_whose_dumps_are_blocked_is_recorded(tmp_path: Path) -> None:
    """Every figure is there; what is not is said once."""
    with attached(tmp_path, every=1, dump=["*:input"]) as (run, step):
        (run.path / "dumps").write_text("not a folder")
        for _ in range(3):
            step()
    assert table(tmp_path / "run", "select distinct step from tensors order by step") == [{"step": s} for s in range(3)]
    assert table(tmp_path / "run", "select step, kind from events") == [{"step": 0, "kind": "error"}]


def test_saving_is_tried_again_in_the_next_session(tmp_path: Path) -> None:
    """Once the way is free."""
    (tmp_path / "dumps").write_text("not a folder")
    with RunWriter(tmp_path) as writer:
        assert writer.dump(1, "l", {"input": torch.zeros(3)}) == []
    (tmp_path / "dumps").unlink()
    with RunWriter(tmp_path) as writer:
        assert len(writer.dump(2, "l", {"input": torch.zeros(3)})) == 1
