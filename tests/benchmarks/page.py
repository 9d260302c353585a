"""What the page of a big run costs: ``python -m tests.benchmarks.page [layers] [samples] [ranks]`` (500, 1000, 1).

The run has six tensors and three GEMMs per layer, with histograms, ten steps per sampled one, and figures drawn at
random: 3 million rows of ``tensors`` and 15 million of ``amax`` at the default size, about 800 MB in a temporary
folder. CPU time is the process's own, over all threads; on a shared machine it is the one to trust. Opening is measured
in headless Chromium, beside an empty page's.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import duckdb

from fp8dbg.analysis.plan import Plan
from fp8dbg.analysis.run import Run, open_run
from fp8dbg.analysis.summary import Coverage, RunFacts, Summary
from fp8dbg.render.html import write_report
from fp8dbg.runs.folder import RunWriter
from fp8dbg.runs.schema import TABLES, arrow_schema
from tests.browser import Browser, start
from tests.pages import empty

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


def write(path: Path, layers: int, samples: int, ranks: int) -> Path:
    """A finished run of that size."""
    RunWriter(path, rank=0, fingerprint={"recipe": "delayed"}).close()
    connection = duckdb.connect(config={"memory_limit": "4GB", "temp_directory": str(path.parent / "spill")})
    connection.execute("set enable_progress_bar = false")
    for table, query in (("tensors", TENSORS), ("gemms", GEMMS), ("amax", AMAX), ("steps", STEPS)):
        connection.register("empty_table", arrow_schema(table).empty_table())
        rows = query.format(layers=layers, samples=samples, ranks=ranks)
        folder = path / table / "rank=00000"
        folder.mkdir(parents=True, exist_ok=True)
        columns = ", ".join(TABLES[table].names)
        connection.execute(
            f"copy (select {columns} from (from empty_table union all by name ({rows}))) "
            f"to '{folder}/part-000001.parquet' (compression zstd)"
        )
    return path


def bare(run: Run) -> Summary:
    """A summary without findings: the page's own cost is what is measured here."""
    facts = RunFacts(str(run.path), run.state, 0, None, 0, 0, [0], 0, [], [], [], [], None, None, None, {})
    return Summary(facts, Coverage([], [], [], []), [], [], [], Plan(), True, "A benchmark.")


def made(path: Path) -> tuple[Path, float, float]:
    """The page of a run, and the CPU and wall seconds it took."""
    used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    with open_run(path) as run:
        if run.problems:
            raise SystemExit("\n".join(run.problems))
        page = write_report(run, bare(run))
    now = resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return page, cpu, time.perf_counter() - began


def opened(browser: Browser, page: Path) -> float:
    """Wall seconds until the page's script is done."""
    browser.driver.get("about:blank")
    began = time.perf_counter()
    browser.driver.get(page.as_uri())
    browser.wait("document.documentElement.dataset.ready === 'yes'")
    return time.perf_counter() - began


def main(layers: int = 500, samples: int = 1000, ranks: int = 1) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as root:
        with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # so that its memory is not counted below
            big = apart.submit(write, Path(root) / "big", layers, samples, ranks).result()
        page, cpu, wall = made(big)
        small, *_ = made(empty(Path(root) / "empty"))
        browser = start()
        times = {name: min(opened(browser, p) for _ in range(3)) for name, p in (("empty", small), ("big", page))}
        browser.driver.quit()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{layers} layers x {samples} samples x {ranks} ranks, {39 * layers * samples * ranks:,} rows")
        print(f"page written in  {wall:6.1f} s   ({cpu:.1f} s of CPU, {peak:.0f} MB at most)")
        print(f"page size        {page.stat().st_size / 1e6:6.1f} MB")
        print(f"page opened in   {times['big']:6.2f} s   (an empty one {times['empty']:.2f} s)")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
