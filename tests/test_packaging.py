"""The wheel: built as a user builds it, installed where the source is gone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEFT_BEHIND = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "demo_run"
)


def run(*command: object, cwd: Path) -> str:
    """A command's stdout; it must end well."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist, and the wheel that was built from the sdist alone."""
    source = tmp_path_factory.mktemp("source") / "fp8dbg"
    shutil.copytree(ROOT, source, symlinks=True, ignore=LEFT_BEHIND)
    run(sys.executable, "-m", "build", "--no-isolation", source, cwd=source)
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a fresh environment with the wheel in it.

    The dependencies are those of the environment the tests run in, put on the path as a plain folder: an editable
    install of the source, which works by .pth files, is not seen through it.
    """
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=True, with_pip=False)
    scripts = environment / "bin"
    python = scripts / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=environment).strip()
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=environment,
    )
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return scripts


def test_a_script_beside_the_checkout_imports_what_is_in_it(tmp_path: Path) -> None:
    """Installed as ./dev does: the folder of the checkout, called fp8dbg too, is not taken for the package."""
    source, environment = tmp_path / "fp8dbg", tmp_path / "environment"
    shutil.copytree(ROOT, source, symlinks=True, ignore=LEFT_BEHIND)
    venv.create(environment, symlinks=True, with_pip=False)
    python = environment / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=environment).strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (settings,) = re.findall(r"--config-settings (\S+) -e", (ROOT / "dev").read_text(encoding="utf-8"))
    options = ("-q", "--no-deps", "--no-index", "--no-build-isolation", "--config-settings", settings)
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, "-e", source, cwd=environment)
    (tmp_path / "script.py").write_text("import fp8dbg; print(fp8dbg.__file__)")
    assert run(python, "-E", "script.py", cwd=tmp_path).strip() == str(source / "fp8dbg" / "__init__.py")


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_contains_both_top_level_folders(wheel: Path) -> None:
    """hooks/ and reports/ become fp8dbg.hooks and fp8dbg.reports, with every file they have."""
    for folder, patterns in (("hooks", ["*.py"]), ("reports", ["*.py", "*.sql", "*.html", "*.css", "*.js"])):
        here = {f"fp8dbg/{folder}/{path.name}" for pattern in patterns for path in (ROOT / folder).glob(pattern)}
        assert here
        assert here <= names(wheel)


def test_the_wheel_contains_every_module_and_nothing_else(wheel: Path) -> None:
    """All code, the type marker, the licence; no tests, no second top-level package."""
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fp8dbg").rglob("*.py")}
    assert code | {"fp8dbg/py.typed"} <= names(wheel)
    assert {name.split("/")[0].split("-")[0] for name in names(wheel)} == {"fp8dbg"}
    assert any(name.endswith("licenses/LICENSE") for name in names(wheel))


def test_the_sdist_can_build_the_wheel(built: Path) -> None:
    """``python -m build`` makes the wheel from the sdist, so what is in one is in the other."""
    assert len(list(built.iterdir())) == 2


def test_the_installed_wheel_works_where_the_source_is_gone(installed: Path, tmp_path: Path) -> None:
    """Every room imports, from the environment's own copy; questions and page templates are found."""
    code = """
import importlib, pathlib, pkgutil, sys
import fp8dbg
assert pathlib.Path(fp8dbg.__file__).is_relative_to(sys.prefix), fp8dbg.__file__
for found in pkgutil.walk_packages(fp8dbg.__path__, "fp8dbg."):
    if found.name != "fp8dbg.__main__":
        importlib.import_module(found.name)
from fp8dbg.runs.queries import QUESTIONS
from fp8dbg import reports
assert "underflow" in QUESTIONS and reports.text("page.html")
print(*fp8dbg.__all__)
"""
    assert "attach" in run(installed / "python", "-I", "-c", code, cwd=tmp_path)


def test_the_installed_command_reports_a_run(installed: Path, tmp_path: Path) -> None:
    """The script that a user types, on a run that this environment recorded."""
    code = """
import torch, fp8dbg
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with fp8dbg.attach(model, "run", optimizer=optimizer, every=1):
    for _ in range(3):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    run(installed / "python", "-I", "-c", code, cwd=tmp_path)
    assert "demo" in run(installed / "fp8dbg", "--help", cwd=tmp_path)
    assert (
        run(installed / "fp8dbg", "query", "run", "select count(*) as n from steps", "--csv", cwd=tmp_path) == "n\n3\n"
    )
    run(installed / "fp8dbg", "report", "run", cwd=tmp_path)
    assert (tmp_path / "run" / "report.html").stat().st_size > 1_000_000
