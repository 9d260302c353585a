"""The design, held by tests: who imports whom, who executes SQL, what never appears."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

BELOW: dict[str, set[str]] = {
    "numerics": set(),
    "reports": set(),
    "runs": {"reports"},
    "analysis": {"runs", "reports", "numerics"},
    "render": {"analysis", "runs", "reports", "numerics"},
    "recording": {"runs", "numerics"},
    "hooks": {"recording", "runs", "numerics"},
    "demo": {"recording", "hooks", "analysis", "runs", "reports", "numerics"},
    "cli": {"demo", "render", "recording", "hooks", "analysis", "runs", "reports", "numerics"}
    | {"bisecting", "checking", "comparing", "doctor", "listing", "output", "recommending", "watching"},
}
"""Each room and the rooms below it; what files outside any room do for one verb each stands just below the command
line, and above all other rooms."""

UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def _sources() -> Iterator[Path]:
    """Every source file of the package, hooks and reports through their links."""
    for folder, _, names in os.walk(ROOT / "fp8dbg", followlinks=True):
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(".py"))


SOURCES = sorted(_sources())


def _room(path: Path) -> str:
    """The room a file is in; "" for the files outside any."""
    parts = path.relative_to(ROOT / "fp8dbg").parts
    return parts[0] if len(parts) > 1 else ""


def _imports(path: Path) -> Iterator[str]:
    """Every module and name that a file imports, as dotted names, wherever in the file."""
    package = [*path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _calls(path: Path) -> Iterator[tuple[str, int]]:
    """What a file calls, as written ("torch.load"), with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            yield ast.unparse(node.func), node.lineno


def test_the_rooms_are_those_of_the_design() -> None:
    """A new room needs a place in the table above."""
    assert {_room(path) for path in SOURCES} - {""} == set(BELOW)


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_from_rooms_below_it(room: str) -> None:
    """Data flows one way: what a room may import is written down once, here."""
    allowed = BELOW[room] | {room, "errors", "text", "__version__"}
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        if _room(path) == room
        for name in _imports(path)
        if name.startswith("fp8dbg.") and name.split(".")[1] not in allowed
    ]
    assert not wrong


def test_only_the_package_run_as_a_program_imports_the_command_line() -> None:
    """It stands above everything: what two verbs share is in a file below it."""
    found = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if _room(path) != "cli" and any(name.startswith("fp8dbg.cli") for name in _imports(path))
    }
    assert found == {"fp8dbg/__main__.py"}


def test_no_room_imports_the_public_names() -> None:
    """``import fp8dbg`` reaches every room at once; only the demo, which is written as a user's program, may."""
    assert [path for path in SOURCES if _room(path) not in ("", "demo") and "fp8dbg" in set(_imports(path))] == []


def _modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_fp8dbg_imports_no_torch() -> None:
    """The public names are resolved on first use."""
    assert not {"torch", "numpy", "pyarrow", "duckdb"} & _modules_after("import fp8dbg")


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    """What --help needs is Typer."""
    heavy = {"torch", "numpy", "numba", "pyarrow", "duckdb", "pandas", "plotly", "rich", "pydantic"}
    assert not heavy & _modules_after("import fp8dbg.cli")


def test_only_queries_executes_sql() -> None:
    """One file holds the connection to DuckDB and everything that runs on it."""
    found = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        for call, _ in _calls(path)
        if call.endswith((".execute", ".executemany")) or call in ("duckdb.connect", "duckdb.sql", "duckdb.query")
    }
    # readonly.py has DuckDB parse a query, as a value, to say whether queries.py may run it.
    assert found == {"fp8dbg/runs/queries.py", "fp8dbg/runs/readonly.py"}


def test_nothing_that_runs_code_from_a_file_is_used() -> None:
    """A stranger's run folder is data: no pickle in any guise, no eval, no exec."""
    imported = [f"{p.relative_to(ROOT)}: {n}" for p in SOURCES for n in _imports(p) if n.split(".")[0] in UNSAFE]
    forbidden = {"torch.load", "torch.save", "np.load", "numpy.load", "eval", "exec", "pd.read_pickle"}
    called = [f"{p.relative_to(ROOT)}:{line}: {call}" for p in SOURCES for call, line in _calls(p) if call in forbidden]
    assert imported + called == []


@pytest.mark.parametrize("name", ["hooks", "reports"])
def test_the_link_to_a_top_level_folder_is_committed(name: str) -> None:
    """The checkout imports fp8dbg.hooks and fp8dbg.reports through links that git keeps as links."""
    link = ROOT / "fp8dbg" / name
    assert os.readlink(link) == f"../{name}"
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-s", f"fp8dbg/{name}"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert listed.stdout.startswith("120000 ")


def test_every_folder_of_code_is_packaged() -> None:
    """The list of packages in pyproject.toml is written by hand: nothing may be missing from it."""
    listed = ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8").split("packages = [")[1].split("]")[0]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES}
    assert {line.strip(' ",') for line in listed.splitlines() if line.strip()} == folders
