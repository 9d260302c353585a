"""What the report of a big run costs: ``python -m tests.benchmarks.page [layers] [samples] [ranks] [operands]``.

Without arguments the run has 500 layers, 1,000 sampled steps and 1 rank, six tensors and three GEMMs per layer, with
histograms, ten steps per sampled one, and figures drawn at random: 3 million rows of ``tensors`` and 15 million of
``amax``, about 800 MB in a temporary folder. ``500 1000 8 operands`` is a run of 8 ranks and the three operands alone:
12 million rows of ``tensors`` and no other table, 1.7 GB. Summary and page are made in a process of their own. CPU time
is that process's, over all threads; on a shared machine it is the one to trust. Opening is measured in headless
Chromium, beside an empty page's: the first time in a fresh browser, until what is on the screen is drawn.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import duckdb

from fp8dbg.analysis.run import open_run
from fp8dbg.analysis.summary import summarise
from fp8dbg.render.html import write_report
from fp8dbg.runs.folder import RunWriter
from fp8dbg.runs.schema import TABLES, arrow_schema
from tests.browser import start
from tests.pages import empty

T = TypeVar("T")

_NAME = "'model.layers.' || l // 5 || ['.attn.qkv', '.attn.proj', '.mlp.gate', '.mlp.up', '.mlp.down'][l % 5 + 1]"
_KEYS = f"s * 10 as step, 0 as microbatch, 0 as call, k as rank, {_NAME} as layer, 'simulated' as host"
_GRID = "range({samples}) a(s), range({ranks}) b(k), range({layers}) c(l)"

TENSORS = f"""
select {_KEYS}, r as tensor, 1000000 as numel, 12 as zeros, 0 as nan, 0 as inf, 3 + random() as amax,
    1e-6 * random() as amin, 0.5 + random() as rms, 3 + random() as kurtosis, 5 + random() as peak_to_median,
    'bfloat16' as dtype, '2048x512' as shape,
    struct_pack(exponent := (-20)::smallint, counts := list_transform(range(26), lambda x: (random() * 1e5)::bigint),
        codes := null::usmallint[]) as histogram,
    if(operand, 'delayed', null) as recipe, if(operand, if(r = 'grad_output', 'e5m2', 'e4m3'), null) as format,
    if(operand, 'tensor', null) as granularity, if(operand, (1e5 * random() ** 12)::bigint, null) as underflow,
    if(operand, (10 * random() ** 40)::bigint, null) as saturated, if(operand, 100 + random(), null) as scale,
    if(operand, 100 + random(), null) as scale_current, if(operand, random() - 0.5, null) as scale_delta,
    if(operand, 0.0265 + 0.001 * random(), null) as rel_l2, if(operand, 1.0, null) as norm_ratio
from {_GRID}, (values ('input', true), ('weight', true), ('grad_output', true), ('output', false),
    ('grad_input', false), ('grad_weight', false)) d(r, operand)
order by step, rank
"""
GEMMS = f"""
select {_KEYS}, g as gemm, 'delayed' as recipe, 2048 as m, 512 as n, 512 as k, 64 as rows_measured,
    0.03 + 0.01 * random() as rel_l2, 0.02 + 0.01 * random() as error_from_a, 0.02 + 0.01 * random() as error_from_b,
    0.002 as error_unexplained, 1.0 as norm_ratio, random() as impact, random() as sensitivity
from {_GRID}, (values ('fprop'), ('dgrad'), ('wgrad')) d(g)
order by step, rank
"""
AMAX = f"""
select s as step, 0 as microbatch, k as rank, {_NAME} as layer, r as tensor, 3 + random() as amax,
    100 + random() as scale, 0 as nan, 0 as inf
from range({{samples}} * 10) a(s), range({{ranks}}) b(k), range({{layers}}) c(l),
    (values ('input'), ('weight'), ('grad_output')) d(r)
order by step, rank
"""
STEPS = """
select s as step, k as rank, 2 + random() as loss, 1 + random() as grad_norm, 0.1 as seconds, s % 10 = 0 as sampled
from range({samples} * 10) a(s), range({ranks}) b(k)
order by step, rank
"""


OPERANDS = TENSORS.replace(", ('output', false),\n    ('grad_input', false), ('grad_weight', false)", "")


def write(path: Path, layers: int, samples: int, ranks: int, whole: bool) -> Path:
    """A finished run of that size; each rank has one part of each table. Not whole: operands alone."""
    tables = {"tensors": TENSORS, "gemms": GEMMS, "amax": AMAX, "steps": STEPS} if whole else {"tensors": OPERANDS}
    connection = duckdb.connect(config={"memory_limit": "4GB", "temp_directory": str(path.parent / "spill")})
    connection.execute("set enable_progress_bar = false")
    for rank in range(ranks):
        RunWriter(path, rank=rank, fingerprint={"recipe": "delayed"}).close()
        for table, query in tables.items():
            connection.register("empty_table", arrow_schema(table).empty_table())
            rows = query.format(layers=layers, samples=samples, ranks=1).replace("k as rank", f"{rank} as rank")
            folder = path / table / f"rank={rank:05d}"
            folder.mkdir(parents=True, exist_ok=True)
            columns = ", ".join(TABLES[table].names)
            connection.execute(
                f"copy (select {columns} from (from empty_table union all by name ({rows}))) "
                f"to '{folder}/part-000001.parquet' (compression zstd)"
            )
    return path


def made(path: Path) -> tuple[Path, dict[str, float]]:
    """The page of a run, and what summary and page took together: CPU and wall seconds, and the most memory in MB."""
    used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    with open_run(path) as run:
        if run.problems:
            raise SystemExit("\n".join(run.problems))
        page = write_report(run, summarise(run))
    now = resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return page, {"wall": time.perf_counter() - began, "cpu": cpu, "peak": now.ru_maxrss / 1024}


def opened(page: Path) -> float:
    """Wall seconds from a fresh browser's first look at the page until what is on the screen is drawn."""
    browser = start()
    try:
        browser.driver.get("about:blank")
        began = time.perf_counter()
        browser.driver.get(page.as_uri())
        browser.wait("document.documentElement.dataset.ready === 'yes'")
        return time.perf_counter() - began
    finally:
        browser.driver.quit()


def apart(work: Callable[..., T], *arguments: Any) -> T:
    """What a function returns in a process of its own, so that its memory is counted alone."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def main(layers: int = 500, samples: int = 1000, ranks: int = 1, whole: bool = True) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as root:
        big = apart(write, Path(root) / "big", layers, samples, ranks, whole)
        page, took = apart(made, big)
        small, _ = made(empty(Path(root) / "empty"))
        times = {name: sorted(opened(p) for _ in range(5)) for name, p in (("empty", small), ("big", page))}
        rows = (39 if whole else 3) * layers * samples * ranks
        print(f"{layers} layers x {samples} samples x {ranks} ranks, {rows:,} rows")
        print(f"report made in   {took['wall']:6.1f} s   ({took['cpu']:.1f} s of CPU, {took['peak']:.0f} MB at most)")
        print(f"page size        {page.stat().st_size / 1e6:6.1f} MB")
        usual, slowest, empty_one = times["big"][2], times["big"][4], times["empty"][2]
        print(f"page opened in   {usual:6.2f} s   (slowest of five {slowest:.2f} s, an empty one {empty_one:.2f} s)")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    size = dict(zip(("layers", "samples", "ranks"), numbers, strict=False))
    main(**size, whole="operands" not in sys.argv)
