"""The pages of docs/ that are made from the code: ``./dev docs`` (``python -m tests.generated_docs``) writes them."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType

import pyarrow as pa

from fp8dbg.analysis.verdicts import EXPLAINS, VERDICTS
from fp8dbg.runs.merged import MERGED
from fp8dbg.runs.schema import HISTOGRAM, SCHEMA_VERSION, TABLES
from fp8dbg.runs.views import TENSOR_RATIOS

DOCS = Path(__file__).resolve().parent.parent / "docs"
MADE = "<!-- Made from the code by ./dev docs: change it there. -->\n"

_TYPES = {pa.int64(): "integer", pa.int32(): "integer", pa.float64(): "number", pa.string(): "text"} | {
    pa.bool_(): "true or false",
    HISTOGRAM: "struct",
}


def pages() -> dict[Path, str]:
    """Every generated page and its text."""
    return {DOCS / "data-dictionary.md": data_dictionary(), DOCS / "verdicts.md": verdicts()}


def data_dictionary() -> str:
    """Every table and column of a run folder, from runs/schema.py; then the views."""
    parts = [
        f"# Data dictionary\n\n{MADE}",
        f'The tables of a run folder, schema version {SCHEMA_VERSION}, as `fp8dbg query RUN "SQL"` and '
        "`fp8dbg.open_run(RUN)` have them. Every figure may be NULL: what could not be measured is not invented. No "
        "NaN and no infinity is ever stored; the counts `nan` and `inf` say where there were some.\n",
        *(_table(name) for name in TABLES),
        _ratios(),
        _merged(),
    ]
    return "\n".join(parts)


def _table(name: str) -> str:
    table = TABLES[name]
    rows = [f"| `{c.name}` | {_TYPES[c.type]} | {_cell(c.unit)} | {_cell(c.meaning)} |" for c in table.columns]
    keys = f" A row is identified by {', '.join(f'`{k}`' for k in table.keys)}." if table.keys else ""
    head = f"## {name}\n\nA row is {table.row}.{keys}\n"
    return "\n".join([head, "| column | type | unit | meaning |", "|---|---|---|---|", *rows, ""])


def _ratios() -> str:
    rows = [f"| `{name}` | {_cell(meaning)} |" for name, (_, meaning) in TENSOR_RATIOS.items()]
    head = "## tensor_ratios\n\nThe view `tensors` with these columns added:\n"
    return "\n".join([head, "| column | meaning |", "|---|---|", *rows, ""])


def _merged() -> str:
    lines = [
        f"- `{name}`: `{view.table}` with one row for each {', '.join(view.keys)}; added: "
        + ", ".join(f"`{column}`" for column in view.derived)
        for name, view in MERGED.items()
    ]
    told = (
        "Views in which microbatches, calls and ranks are merged: counts add, extremes stay extremes, squares are "
        "averaged by size, so a figure is that of the whole step. Of `kurtosis`, `peak_to_median`, `cosine`, "
        "`norm_ratio`, `scale_delta` and `grad_alignment` it is that of the row furthest from health."
    )
    return "\n".join(["## tensor_steps and gemm_steps\n", f"{told}\n", *lines, ""])


def verdicts() -> str:
    """A section for each verdict, from its docstring."""
    head = (
        f"# Verdicts\n\n{MADE}\n"
        "What `fp8dbg report` can find. Each section: what it is, the **sign** in the figures, the **cause**, the "
        "**remedy** to try first, and when it is a **false alarm**. Thresholds stand with their reasons in each "
        "finding (`basis`) and in `fp8dbg/analysis/limits.py`.\n"
    )
    return "\n".join([head, *(_verdict(verdict) for verdict in VERDICTS)])


def _verdict(verdict: ModuleType) -> str:
    summary, _, rest = (verdict.__doc__ or "").strip().partition("\n\n")
    parts = re.split(r"^([A-Z][a-z ]+): ", rest, flags=re.MULTILINE)[1:]
    told = [f"**{name}.** {_joined(text)}\n" for name, text in zip(parts[::2], parts[1::2], strict=True)]
    explains = sorted(EXPLAINS.get(verdict.CODE, ()))
    also = [f"Where both are found, it explains {', '.join(explains)}.\n"] if explains else []
    anchor = f'<a id="{verdict.CODE}"></a>\n'  # links lead here whatever the titles are
    return "\n".join(
        [anchor, f"## {verdict.CODE}: {' / '.join(titles(verdict))}\n", f"{_joined(summary)}\n", *told, *also]
    )


def titles(verdict: ModuleType) -> list[str]:
    """What reports call a verdict's findings: the ``title`` of each that its file makes."""
    keywords = [node for node in ast.walk(ast.parse(inspect.getsource(verdict))) if isinstance(node, ast.keyword)]
    values = [node.value for node in keywords if node.arg == "title"]
    named = [v.value if isinstance(v, ast.Constant) else getattr(verdict, ast.unparse(v)) for v in values]
    return list(dict.fromkeys(str(name) for name in named))


def _joined(text: str) -> str:
    """On one line, with names of columns and what would be markup kept as they are."""
    return " ".join(text.split()).replace("<", "&lt;").replace("*", "\\*")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Write them."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
