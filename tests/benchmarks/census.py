"""What the per-tensor figures cost, as ratios measured in one run: ``python -m tests.benchmarks.census``.

A 4096x4096 BF16 tensor. The variants take turns, so that whatever else the machine does hits all alike; medians are
compared. Times are the process's own CPU time (all threads) beside the wall's: on a shared machine the first is the
one to trust. The chain of torch operations is the obvious program for the same figures, in float32; it runs eagerly
and under torch.compile, and once more compiled without the median and the histogram, which do not fuse.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8dbg.numerics.census import Census, amax_of, census

SIDE = 4096
LARGEST, BOUNDARY, NORMAL = 448.0, 464.0, 2.0**-6


def fusable(x: Tensor, scale: Tensor) -> list[Tensor]:
    """Every figure of one tensor and one E4M3 cast that is a sum or an extreme."""
    v = x.float()
    finite, magnitude = v.isfinite(), v.abs()
    f = torch.where(finite, v, 0.0)
    n = finite.sum()
    nonzero = finite & (v != 0)
    amax, amin = f.abs().amax(), torch.where(nonzero, magnitude, torch.inf).amin()
    mean, x2 = f.sum() / n, (f * f).sum()
    d = torch.where(finite, v - mean, 0.0)
    variance = (d * d).sum() / n
    kurtosis = (d**4).sum() / n / variance**2
    product = f * scale
    q = product.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()
    y = q / scale
    error = y - f
    d2, y2, xy = (error * error).sum(), (y * y).sum(), (f * y).sum()
    counts = [(v == 0).sum(), v.isnan().sum(), v.isinf().sum(), (nonzero & (q == 0)).sum()]
    counts += [(product.abs() > BOUNDARY).sum(), (q.abs() == LARGEST).sum(), ((q != 0) & (q.abs() < NORMAL)).sum()]
    rel_l2, rms = (d2 / x2).sqrt(), (x2 / n).sqrt()
    errors = [d2 / n, rel_l2, -20 * rel_l2.log10(), xy / (x2 * y2).sqrt(), (y2 / x2).sqrt(), error.sum() / n / rms]
    return [*counts, amax, amin, mean, rms, kurtosis, *errors]


def chain(x: Tensor, scale: Tensor) -> list[Tensor]:
    """All figures: those above, the median of the non-zero magnitudes and the counts per binade."""
    magnitude = x.float().abs()
    used = magnitude[magnitude.isfinite() & (magnitude != 0)]
    binades = torch.bincount(torch.frexp(used).exponent + 149)
    return [*fusable(x, scale), used.max() / used.median(), binades]


def cast_figures(c: Census, scale: float) -> list[Any]:
    """One recipe's figures of a census."""
    return [c.quantised("e4m3", scale)]


def all_figures(x: Tensor, scale: float) -> list[Any]:
    """The same figures as ``chain``, from the census."""
    c = census(x)
    counts = [c.numel, c.zeros, c.nan, c.inf, c.amax, c.amin, c.mean, c.rms]
    return [*counts, c.kurtosis, c.peak_to_median, c.histogram(), *cast_figures(c, scale)]


def on_one_thread(work: Callable[[], object]) -> None:
    """Run with a single thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    work()
    torch.set_num_threads(before)


def variants(x: Tensor) -> dict[str, Callable[[], object]]:
    """What is timed, by name; the second is what the others are compared with."""
    scale = LARGEST / float(amax_of(x))
    factor, kept = torch.tensor(scale), census(x)
    all_figures(x, scale)
    cast_figures(kept, scale)
    compiled, compiled_part = torch.compile(chain), torch.compile(fusable)
    return {
        "one bare read (torch.aminmax)": lambda: torch.aminmax(x),
        "all figures, one recipe": lambda: all_figures(x, scale),
        "all figures, one recipe, one thread": lambda: on_one_thread(lambda: all_figures(x, scale)),
        "each further recipe": lambda: cast_figures(kept, scale),
        "chain of torch operations": lambda: chain(x, factor),
        "chain, torch.compile": lambda: compiled(x, factor),
        "chain, torch.compile, no median, no histogram": lambda: compiled_part(x, factor),
    }


def rows(rounds: int = 9, warm_up: int = 2) -> list[dict[str, Any]]:
    """One row per variant: median seconds, CPU and wall, and both over those of "all figures, one recipe"."""
    work = variants(torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)).bfloat16())
    cpu: dict[str, list[float]] = {name: [] for name in work}
    wall: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + warm_up):
        for name, run in work.items():
            time.sleep(0.1)  # torch's threads spin for a while after they have worked
            began = time.process_time(), time.perf_counter()
            run()
            if turn >= warm_up:
                cpu[name].append(time.process_time() - began[0])
                wall[name].append(time.perf_counter() - began[1])
    base = "all figures, one recipe"
    found = []
    for name in work:
        row: dict[str, Any] = {"variant": name}
        for kind, times in (("cpu", cpu), ("wall", wall)):
            row[f"{kind}_seconds"] = statistics.median(times[name])
            row[f"{kind}_ratio"] = row[f"{kind}_seconds"] / statistics.median(times[base])
        found.append(row)
    return found


def main() -> None:
    """Print the table."""
    print(f"{SIDE}x{SIDE} bfloat16, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'':46}{'CPU':>11}{'ratio':>9}{'wall':>11}{'ratio':>9}")
    for row in rows():
        print(
            f"{row['variant']:46}{1e3 * row['cpu_seconds']:9.2f}ms{row['cpu_ratio']:9.3f}"
            f"{1e3 * row['wall_seconds']:9.2f}ms{row['wall_ratio']:9.3f}"
        )


if __name__ == "__main__":
    main()
