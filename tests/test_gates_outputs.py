"""What machines read of check: JUnit XML, Markdown, annotations; and the command line's exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from fp8dbg.analysis.check import Checked, check
from fp8dbg.analysis.gate import Gate
from fp8dbg.analysis.run import open_run
from fp8dbg.render import gates
from tests.command_line import environment, in_a_process
from tests.pages import HOSTILE, empty
from tests.synthetic import outlier, write_run

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy run and a faulty one."""
    place = tmp_path_factory.mktemp("gates")
    write_run(place / "good", blocks=2, steps=60)
    write_run(place / "bad", blocks=2, steps=60, plant=outlier("layers.1.up", step=30))
    empty(place / "empty")
    return place


def hostile_gates() -> Checked:
    """A failed gate for each hostile name."""
    made = [Gate(f"no finding in {n}", False, f"{n} is zero.", f"of {n}", layer=n, line=3) for n in HOSTILE]
    return Checked("run", made, True, list(HOSTILE))


def test_junit_has_a_case_for_each_gate(root: Path) -> None:
    """Failures carry the figure and the limit's basis; whatever a name holds, it stays XML."""
    checked = check(open_run(root / "bad"))
    suite = ElementTree.fromstring(gates.junit(checked))[0]
    assert int(suite.attrib["tests"]) == len(checked.gates) == len(suite)
    failures = [case for case in suite if case.find("failure") is not None]
    assert [case.attrib["name"] for case in failures] == [gate.rule for gate in checked.failed]
    assert int(suite.attrib["failures"]) == len(failures) > 0
    hostile = ElementTree.fromstring(gates.junit(hostile_gates()))[0]
    assert [case.tag for case in hostile] == ["testcase"] * len(HOSTILE)


def test_markdown_is_one_table_whatever_names_hold() -> None:
    """A row for each gate, no HTML, no link, no mention and no line break that a name brought."""
    text = gates.markdown(hostile_gates())
    rows = [line for line in text.splitlines() if line.startswith("| ❌")]
    assert len(rows) == len(HOSTILE)
    assert all(row.count("|") == 6 for row in rows)
    assert "<" not in text
    assert "](" not in text


def test_annotations_are_one_line_each_whatever_names_hold() -> None:
    """Nothing in a name begins another workflow command; a rule's line of the file is named."""
    lines = gates.workflow_commands(hostile_gates(), "fp8dbg.toml").splitlines()
    assert len(lines) == len(HOSTILE)
    assert all(line.startswith("::error file=fp8dbg.toml,line=3,title=fp8dbg%3A no finding in ") for line in lines)


@pytest.mark.parametrize(("run", "code"), [("good", 0), ("bad", 1), ("none", 2), ("empty", 3)])
def test_exit_codes(root: Path, run: str, code: int) -> None:
    """0 passed, 1 a gate failed, 2 unreadable, 3 nothing recorded."""
    done = in_a_process("check", run, place=root)
    assert done.code == code, done.out + done.err
    assert "Traceback" not in done.err


def test_json_has_every_gate_with_its_distance(root: Path) -> None:
    """The stable form."""
    told = json.loads(in_a_process("check", "bad", "--json", place=root).out)
    assert told["passed"] is False
    failing = [gate for gate in told["gates"] if not gate["passed"]]
    assert failing[0]["layer"] == "layers.1.up"
    assert all({"rule", "told", "basis", "distance", "used", "limit"} <= gate.keys() for gate in told["gates"])


def test_update_baseline_then_hold_against_it(root: Path) -> None:
    """The file is written, a good run passes against it, a bad one does not; a run folder is not overwritten."""
    made = in_a_process("check", "good", "--update-baseline", "--baseline", "base.json", place=root)
    assert made.code == 0
    assert "WARNING" not in made.err
    assert in_a_process("check", "good", "--baseline", "base.json", place=root).code == 0
    assert in_a_process("check", "bad", "--baseline", "base.json", place=root).code == 1
    assert in_a_process("check", "bad", "--baseline", "good", place=root).code == 1
    assert in_a_process("check", "good", "--update-baseline", "--baseline", "bad", place=root).code == 2


def test_a_baseline_from_a_failing_run_is_written_with_a_warning(root: Path) -> None:
    """Whoever commits it knows that its faults are accepted from now on."""
    made = in_a_process("check", "bad", "--update-baseline", "--baseline", "bad.json", place=root)
    assert made.code == 1
    assert "WARNING: the run that bad.json was written from fails" in made.err


def test_a_baseline_that_is_not_there_says_how_to_write_one(root: Path) -> None:
    """It is no run folder that is missing."""
    said = in_a_process("check", "good", "--baseline", "none.json", place=root)
    assert said.code == 2
    assert "There is no baseline none.json." in said.err
    assert "--update-baseline --baseline none.json" in said.err


def substituted(text: str, inputs: dict[str, str]) -> str:
    """An expression of the action's as GitHub fills it in."""
    for name, value in inputs.items():
        text = text.replace("${{ inputs." + name + " }}", value)
    return text


def steps_of(action: dict[str, object], inputs: dict[str, str]) -> Iterable[tuple[str, dict[str, str]]]:
    """Script and environment of each step of a composite action."""
    runs = action["runs"]
    assert isinstance(runs, dict)
    assert runs["using"] == "composite"
    for step in runs["steps"]:
        yield step["run"], {key: substituted(value, inputs) for key, value in step.get("env", {}).items()}


@pytest.mark.parametrize(("run", "code", "passed"), [("good", 0, "true"), ("bad", 1, "false")])
def test_the_action_runs(root: Path, run: str, code: int, passed: str, tmp_path: Path) -> None:
    """Its own script, as GitHub runs it: exit code, summary, output and JUnit file; a hostile input stays a name."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    given = {"run": run, "baseline": "good"}
    inputs = {name: given.get(name, entry.get("default", "")) for name, entry in action["inputs"].items()}
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "fp8dbg").write_text(f'#!/bin/sh\nexec {sys.executable} -m fp8dbg "$@"\n')
    (bin_ / "fp8dbg").chmod(0o755)
    files = {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"), "GITHUB_OUTPUT": str(tmp_path / "output")}
    ((script, variables),) = steps_of(action, inputs | {"junit": str(tmp_path / "junit.xml")})
    path = {"PATH": f"{bin_}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=root, env=environment() | path | files | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert (tmp_path / "output").read_text() == f"passed={passed}\n"
    assert "### " in (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().tag == "testsuites"
    assert ("::error" in done.stderr) is (code == 1)


def test_no_input_of_the_action_becomes_script() -> None:
    """They come as variables: an input with a quote or a ``$(...)`` in it is a name."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    assert all("${{" not in script for script, _ in steps_of(action, {}))


def test_the_example_workflow_and_hook_use_what_there_is() -> None:
    """Inputs that the action has, and a hook that the repository offers."""
    examples = ROOT / "examples" / "ci"
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    workflow = yaml.safe_load((examples / "workflow.yml").read_text(encoding="utf-8"))
    used = workflow["jobs"]["smoke"]["steps"][-1]["with"]
    assert used.keys() <= action["inputs"].keys()
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    example = yaml.safe_load((examples / "pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert {hook["id"] for hook in example["repos"][0]["hooks"]} <= {hook["id"] for hook in hooks}


def test_the_pre_commit_hook_runs(root: Path) -> None:
    """Its entry with the example's arguments, on a run that is well and on one that is not."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    program, *words = hook["entry"].split()
    assert program == "fp8dbg"
    assert hook["pass_filenames"] is False
    assert in_a_process(*words, "good", "--baseline", "good", place=root).code == 0
    assert in_a_process(*words, "bad", "--baseline", "good", place=root).code == 1


def git(place: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A git command in a folder, by an author of its own."""
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    known = environment(**variables)
    return subprocess.run(["git", *who, *words], cwd=place, env=known, capture_output=True, text=True, check=False)


def test_pre_commit_refuses_a_push_whose_run_fails(root: Path, tmp_path: Path) -> None:
    """pre-commit itself, installed by the example's configuration: a good run is pushed, a bad one is not."""
    pre_commit = shutil.which("pre-commit")
    if pre_commit is None:
        pytest.skip("pre-commit is not installed (pip install pre-commit)")
    offered, program = tmp_path / "offered", tmp_path / "bin" / "fp8dbg"
    for place in (offered, program.parent):
        place.mkdir()
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", offered)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fp8dbg "$@"\n')
    program.chmod(0o755)
    git(offered, "init", "-q")
    git(offered, "add", "-A")
    git(offered, "commit", "-qm", "hooks")
    rev = git(offered, "rev-parse", "HEAD").stdout.strip()
    example = (ROOT / "examples" / "ci" / "pre-commit-config.yaml").read_text(encoding="utf-8")
    example = example.replace("https://github.com/OWNER/fp8dbg", str(offered)).replace("v0.1.0", rev)
    variables = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PRE_COMMIT_HOME": str(tmp_path / "cache")}
    git(tmp_path, "init", "-q", "--bare", "remote")
    for run, pushed in (("good", True), ("bad", False)):
        work = tmp_path / run
        work.mkdir()
        git(work, "init", "-q")
        arguments = example.replace("smoke_run, --baseline, fp8dbg-baseline.json", str(root / run))
        (work / ".pre-commit-config.yaml").write_text(arguments, encoding="utf-8")
        subprocess.run([pre_commit, "install"], cwd=work, env=environment(**variables), capture_output=True, check=True)
        git(work, "add", "-A", **variables)
        git(work, "commit", "-qm", "work", **variables)
        done = git(work, "push", "-q", "../remote", f"HEAD:{run}", **variables)
        assert (done.returncode == 0) is pushed, done.stderr
        assert pushed or "gates fail" in done.stdout + done.stderr
