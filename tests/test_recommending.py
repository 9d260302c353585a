"""``fp8dbg recommend``: what it prints, writes and returns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from fp8dbg import attach as recording
from fp8dbg.analysis.run import open_run
from fp8dbg.hooks import WRITERS, adapters, writer
from fp8dbg.recommending import recipe_of, write_plan
from fp8dbg.runs.plan import Plan, PlanEntry
from tests.command_line import Run
from tests.synthetic import write_run

PLAN = Plan((PlanEntry("layers.2.up", ("fprop",), reason="97 % is lost."),))


@pytest.mark.parametrize("host", WRITERS)
def test_every_host_gets_a_file_that_names_the_layer(host: str, tmp_path: Path) -> None:
    """plan.json reads back as the plan, and the host's own configuration stands beside it."""
    written = write_plan(PLAN, host, tmp_path / "new" / "folder")
    assert Plan.from_json(written[0].read_text(encoding="utf-8")) == PLAN
    assert written[1].name in (f"fallback_{host}.yaml", f"fallback_{host}.py")
    assert "layers" in written[1].read_text(encoding="utf-8")


@pytest.mark.parametrize("host", WRITERS)
def test_configuration_in_python_compiles(host: str, tmp_path: Path) -> None:
    """A file that ends in .py is Python; one that does not would not be."""
    path = write_plan(PLAN, host, tmp_path)[1]
    text = path.read_text(encoding="utf-8")
    try:
        compile(text, str(path), "exec")
        python = True
    except SyntaxError:
        python = False
    assert python == (path.suffix == ".py")


def test_a_configuration_that_names_a_recipe_names_the_runs(tmp_path: Path) -> None:
    """With its parameters; a recipe that the host does not know leaves the host's default."""

    def written(host: str, recipe: str) -> str:
        return write_plan(PLAN, host, tmp_path, recipe)[1].read_text(encoding="utf-8")

    assert 'fp8dbg.simulate(model, "delayed:history=16", FALLBACK)' in written("pytorch", "delayed:history=16")
    assert "pass the recipe" in written("pytorch", "")
    assert "pass the recipe" not in written("pytorch", "current")
    assert "'tensorwise'" in written("torchao_float8", "tensorwise")
    assert "'rowwise'" in written("torchao_float8", "delayed")
    assert written("nvidia_te", "delayed:history=16") == written("nvidia_te", "")


def test_the_recipe_of_a_run_is_the_one_in_force_else_the_one_compared_with(tmp_path: Path) -> None:
    """A plan for a run in BF16 rehearses what that run was compared with."""
    for only_compared in (False, True):
        path = tmp_path / str(only_compared)
        with open_run(write_run(path, blocks=1, steps=30, recipe="delayed", what_if=only_compared)) as run:
            assert recipe_of(run) == "delayed"


def test_every_adapter_has_its_writer() -> None:
    """The table of writers is kept by hand: what an adapter writes is what a plan for its host is written by."""
    assert {adapter.HOST: adapter.write_fallback for adapter in adapters()}.items() <= {
        host: writer(host).write_fallback for host in WRITERS
    }.items()


def test_plan_is_written_without_torch(tmp_path: Path) -> None:
    """Importing torch takes longer than everything else that recommend does."""
    program = f"""
import sys
from pathlib import Path
from fp8dbg.recommending import write_plan
from fp8dbg.runs.plan import Plan, PlanEntry
for host in {list(WRITERS)}:
    write_plan(Plan((PlanEntry("layers.2.up", ("fprop",)),)), host, Path({str(tmp_path)!r}))
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_recommend_prints_the_plan_and_writes_it_into_the_run(fp8dbg: Run, faulty: Path) -> None:
    """The layer, its GEMM and the reason on stdout; where the files are on stderr."""
    result = fp8dbg("recommend", faulty, "--for", "nvidia_te")
    assert result.code == 0
    assert "layers.2.up: fprop, dgrad in bf16" in result.out
    assert "97 % of weight is flushed" in " ".join(result.out.split())
    assert (faulty / "plan.json").exists()
    assert (faulty / "fallback_nvidia_te.yaml").exists()
    assert "fallback_nvidia_te.yaml" in result.err


def test_recommend_json_holds_plan_curve_and_reasons(fp8dbg: Run, faulty: Path, tmp_path: Path) -> None:
    """The same for programs; the plan in it is plan.json's."""
    result = fp8dbg("recommend", faulty, "--json", "--out", tmp_path)
    found = json.loads(result.out)
    assert found["plan"] == json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert {(p["layer"], p["gemm"]) for p in found["curve"]} == {("layers.2.up", "fprop"), ("layers.2.up", "dgrad")}
    assert {"headline", "instead", "not_fixed", "notes"} <= set(found)


def test_unknown_host_lists_the_known_ones(fp8dbg: Run, faulty: Path) -> None:
    """Exit 2, and the names to choose from."""
    result = fp8dbg("recommend", faulty, "--for", "jax")
    assert result.code == 2
    assert "nvidia_te" in result.err
    assert "torchao_float8" in result.err


def test_healthy_run_gets_an_empty_plan_and_no_configuration(fp8dbg: Run, tmp_path: Path) -> None:
    """Nothing to change is a plan without entries; the host keeps its own settings."""
    result = fp8dbg("recommend", write_run(tmp_path / "run"), "--for", "pytorch", "--out", tmp_path / "out")
    assert result.code == 0
    assert "Nothing to change" in result.out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plan.json"]


def test_too_little_evidence_is_exit_3(fp8dbg: Run, tmp_path: Path) -> None:
    """One sampled step: it says how to record more, and writes nothing."""
    result = fp8dbg("recommend", write_run(tmp_path / "run", steps=5), "--out", tmp_path / "out")
    assert result.code == 3
    assert "attach with a smaller every=" in result.err
    assert not (tmp_path / "out").exists()


def test_a_run_with_every_0_is_told_so(fp8dbg: Run, tmp_path: Path) -> None:
    """It was attached in time; only nothing was to be measured."""
    with recording(nn.Linear(16, 16), tmp_path / "run", every=0) as run:
        run.step()
    for verb in ("report", "recommend"):
        said = fp8dbg(verb, tmp_path / "run")
        assert said.code == 3
        assert "before training" not in said.out + said.err
    assert "It was recorded with every=0" in said.err
