"""The documentation does what it says: every command and every code block in it is run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command

from fp8dbg.analysis.verdicts import VERDICTS
from fp8dbg.cli import app
from fp8dbg.recording.sampling import Settings
from tests.demo_run import demo
from tests.generated_docs import pages as generated
from tests.generated_docs import titles

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])

MANUAL = [page for page in PAGES if (ROOT / "docs") in page.parents and "decisions" not in page.parts]
OF_HOSTS = {page for page in MANUAL if page.parent.name == "hosts" and page.name != "pytorch.md"}
"""Their Python needs a host library: tests/hosts runs it."""

GIVEN = """
import torch
model = torch.nn.Sequential()
model.add_module("layers", torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(16, 16))]))
model.add_module("head", torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
tensor = torch.randn(64, 64, dtype=torch.bfloat16)

def train(model, optimizer):
    for _ in range(3):
        model.head(model.layers[0](torch.randn(8, 16))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
"""What the code blocks of the README take for granted."""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(page: Path) -> list[str]:
    """Every line of a page's bash blocks."""
    return [line for block in blocks(page, "bash") for line in block.splitlines() if line and not line.startswith("#")]


def outputs(page: Path) -> dict[str, str]:
    """What a page shows under a bash block: the whole output of the block's last command."""
    text = page.read_text(encoding="utf-8")
    pairs = re.findall(r"```bash\n([^`]*?)```\n\n```text\n(.*?)```", text, flags=re.DOTALL)
    return {block.splitlines()[-1]: output for block, output in pairs}


def _rows(output: str) -> list[list[str]]:
    """Each line's words: a step, which comes first, as it is, other numbers, which differ by machine, as 0."""
    number = r"\d[\d,.]*(e[+-]?\d+)?"
    lines = [re.match(r"( *\d+ )?(.*)", line) for line in output.splitlines() if line.strip()]
    return [[*(m[1] or "").split(), *re.sub(number, "0", m[2]).split()] for m in lines if m]


def test_the_tutorial_shows_tables() -> None:
    """They are found, and so compared: three queries and a what-if."""
    assert len(outputs(ROOT / "docs" / "tutorial.md")) == 4


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out as the checkout is after the README's first blocks: a demo's run, and one of the user's own."""
    place = tmp_path_factory.mktemp("reader")
    (place / "demo_run").symlink_to(demo().folder)
    (place / "examples").symlink_to(ROOT / "examples")
    run_python(place, blocks(ROOT / "README.md", "python")[0])
    return place


def run_python(place: Path, code: str) -> str:
    """A block's output; it must end well."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", GIVEN + code], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_the_pages_write_is_ignored(tmp_path: Path) -> None:
    """Whoever tries them in the checkout has a clean one afterwards, for git and for ruff, which asks .gitignore."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    option = r"--(?:out|junit|markdown|update-baseline --baseline) ([\w./-]+)"
    written = set(re.findall(rf"{option}|attach\(model, \"(\w+)\"|fp8dbg export \w+ ([\w/]+)", text))
    names = {name for found in written for name in found if name and not name.isupper()}
    assert {"advice", "fp8.xml", "run_dir", "fp8dbg-baseline.json", "csv_files"} <= names
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    paths = [f"{name}/file" if "." not in name else name for name in sorted(names)]
    told = subprocess.run(["git", "check-ignore", *paths], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert set(paths) - set(told.stdout.splitlines()) == set()


def test_every_page_uses_only_languages_that_are_tested() -> None:
    """A block in another language would be run by nobody."""
    languages = {found for page in PAGES for found in re.findall(r"^```(\S+)", page.read_text(encoding="utf-8"), re.M)}
    assert languages <= {"bash", "python", "text"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page is a file of the project."""
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [t for t in targets if not t.startswith("https://") and not (page.parent / t).exists()] == []


def test_every_command_of_every_page_is_one_that_a_test_runs() -> None:
    """The verbs of ./dev exist, the install is the packaging tests' business, and the rest is fp8dbg itself."""
    verbs = subprocess.run([ROOT / "dev"], capture_output=True, text=True, check=True).stdout
    for command in (line for page in PAGES for line in commands(page)):
        words = shlex.split(command, comments=True)
        assert words[0] in ("./dev", "pip", "fp8dbg"), command
        if words[0] == "./dev":
            assert len(words) == 1 or f"./dev {words[1]} " in verbs, command
        if words[0] == "pip":
            assert command == "pip install ."


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", [line for line in commands(ROOT / "README.md") if line.startswith("fp8dbg ")])
def test_the_readme_commands_run(shell: Path, command: str) -> None:
    """Each ends well and prints something, in a folder with the demo's run in it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=shell,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in MANUAL if commands(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_of_the_manual_run_in_order(shell: Path, page: Path) -> None:
    """Each ends as the page says (well, where it says nothing) and prints something."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = outputs(page)
    for command in commands(page):
        if command == "fp8dbg demo demo_run":
            continue
        code = re.search(r"# exit code (\d)$", command)
        named = [sys.executable if word == "python" else word for word in shlex.split(command, comments=True)]
        words = [sys.executable, "-m", *named]
        done = subprocess.run(words, cwd=shell, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == (int(code[1]) if code else 0), f"{command}\n{done.stderr}"
        assert done.stdout, command
        if command in shown:
            assert _rows(shown[command]) == _rows(done.stdout), command


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page", [page for page in MANUAL if blocks(page, "python") and page not in OF_HOSTS], ids=lambda page: page.stem
)
def test_the_code_of_a_page_of_the_manual_runs(shell: Path, page: Path, tmp_path: Path) -> None:
    """Each block as it stands, after the names that the README's take for granted."""
    (tmp_path / "demo_run").symlink_to(shell / "demo_run")
    for code in blocks(page, "python"):
        run_python(tmp_path, code)


@pytest.mark.parametrize("page", generated(), ids=lambda page: page.stem)
def test_what_is_made_from_the_code_is_current(page: Path) -> None:
    """./dev docs writes these pages; whoever changes the code they are made from runs it."""
    assert page.read_text(encoding="utf-8") == generated()[page], f"./dev docs writes {page.name} anew"


@pytest.mark.parametrize("verdict", VERDICTS, ids=lambda verdict: verdict.CODE)
def test_a_title_of_a_report_leads_to_its_verdict(verdict: ModuleType) -> None:
    """The heading has the code and each title, under an anchor that is the code alone."""
    text = (ROOT / "docs" / "verdicts.md").read_text(encoding="utf-8")
    heading = text.split(f'<a id="{verdict.CODE}"></a>\n\n')[1].split("\n")[0]
    assert heading.startswith(f"## {verdict.CODE}: ")
    assert titles(verdict)
    assert all(title in heading for title in titles(verdict))


def test_the_page_of_control_toml_has_every_key() -> None:
    """And no key that a run would not follow."""
    text = (ROOT / "docs" / "control.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) == [field.name for field in fields(Settings)]


def test_the_manual_lists_every_page() -> None:
    """From docs/README.md, or the page of hosts, each page can be reached."""
    for index in (ROOT / "docs" / "README.md", ROOT / "docs" / "hosts" / "README.md"):
        linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", index.read_text())}
        assert {p for p in index.parent.glob("*.md") if p != index} <= linked


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(len(blocks(ROOT / "README.md", "python"))))
def test_the_readme_code_runs(shell: Path, number: int, tmp_path: Path) -> None:
    """Each block as it stands, after the names that it takes for granted."""
    (tmp_path / "demo_run").symlink_to(shell / "demo_run")
    run_python(tmp_path, blocks(ROOT / "README.md", "python")[number])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_readme_shows_what_the_demo_prints() -> None:
    """Word by word, but for what differs from machine to machine."""
    shown = next(block for block in blocks(ROOT / "README.md", "text") if "demo_run ·" in block)
    assert _words(shown) == _words(demo().out)


def _words(text: str) -> list[str]:
    """Words without what depends on the machine: numbers, trends, what is barely worth watching, a plan's GEMMs."""
    text = re.sub(r"(?m)^watch .*|^docs/verdicts.md explains .*", "", text)
    text = re.sub(r"(?m)^(  layers\S+) .*", r"\1", text)
    return re.sub(r"\d[\d,.]*", "0", re.sub(r"[▁▂▃▄▅▆▇█]+", "", text)).split()


def test_the_readme_lists_every_command() -> None:
    """A row for each verb, and no row for one that does not exist."""
    documented = set(re.findall(r"^\| `fp8dbg (\w+)", README, flags=re.MULTILINE))
    verbs = set(get_command(app).commands)  # type: ignore[attr-defined]  # a group, as there are several verbs
    assert documented == verbs


def test_the_readme_lists_every_verdict() -> None:
    """In the table: its code with spaces for underscores."""
    table = README.split("## What it can find")[1].split("\n## ")[0]
    documented = set(re.findall(r"^\| ([a-z0-9 ]+) \|", table, flags=re.MULTILINE)) - {"verdict"}
    assert documented == {verdict.CODE.replace("_", " ") for verdict in VERDICTS}


def test_every_decision_says_why() -> None:
    """Half a page each: the question, the decision, the reasons."""
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert len(decisions) >= 5
    for page in decisions:
        text = page.read_text(encoding="utf-8")
        assert text.startswith("# ")
        for word in ("**Question.**", "**Decision.**", "**Why"):
            assert word in text, page.name
        assert 150 < len(text.split()) < 450
