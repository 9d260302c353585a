"""What the census promises of itself: parts add up, threads and devices agree, nothing waits, little memory."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8dbg.errors import UsageError
from fp8dbg.numerics.census import Amax, CodeCensus, amax_of, census, read_together
from fp8dbg.numerics.census import _amax_by_torch as amax_by_torch
from fp8dbg.numerics.census import _count_by_torch as count_by_torch
from tests.tensors import assert_same, everything, statistics, tensors


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Whatever a test sets is put back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@settings(deadline=None)  # the first example compiles
@given(tensors(torch.bfloat16) | tensors(torch.float16), st.integers(1, 5))
def test_parts_add_up_exactly(x: torch.Tensor, parts: int) -> None:
    """Censuses of shards added equal the census of the whole, bit for bit, in any order."""
    shards = [census(p) for p in x.reshape(-1).tensor_split(parts)]
    total = shards[-1]
    for shard in shards[:-1]:
        total = total + shard
    assert everything(total) == everything(census(x))


@settings(deadline=None)  # the first example compiles
@given(tensors(torch.float32), st.integers(1, 5))
def test_float32_parts_add_up(x: torch.Tensor, parts: int) -> None:
    """Counts, extremes and histogram exactly; sums to the last bits."""
    shards = [census(p) for p in x.reshape(-1).tensor_split(parts)]
    total = shards[0]
    for shard in shards[1:]:
        total = total + shard
    whole = census(x)
    assert_same(statistics(total), statistics(whole), whole.rms)
    assert total.histogram() == whole.histogram()
    assert_same(asdict(total.quantised("e5m2", 3.0)), asdict(whole.quantised("e5m2", 3.0)), None)


def test_different_dtypes_do_not_add_up() -> None:
    """Codes of one dtype mean nothing in another."""
    found = [census(torch.ones(2, dtype=t)) for t in (torch.bfloat16, torch.float16, torch.float32)]
    for a, b in ((0, 1), (1, 0), (0, 2), (2, 0)):
        with pytest.raises(UsageError, match="do not add up"):
            found[a] + found[b]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_number_of_threads_gives_the_same_bits(dtype: torch.dtype) -> None:
    """One, two and four threads agree to the last bit on five million elements."""
    x = torch.randn(5_000_011, generator=torch.Generator().manual_seed(2)).to(dtype)
    answers = []
    for n in (1, 2, 4):
        torch.set_num_threads(n)
        answers.append(everything(census(x)))
    assert answers[0] == answers[1] == answers[2]


def test_concurrent_callers_do_not_disturb_each_other() -> None:
    """Four threads take large censuses at once and all get the right one."""
    xs = [torch.full((2_000_000,), float(i)).bfloat16() for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(census, xs * 3))
    assert [(c.amax or 0.0, c.numel) for c in found] == [(float(i), 2_000_000) for i in range(4)] * 3


@settings(deadline=None)  # the first example compiles
@given(tensors(torch.bfloat16) | tensors(torch.float16))
def test_torch_twin_counts_the_same(x: torch.Tensor) -> None:
    """The counting that runs on accelerators, here on CPU tensors, gives the same codes."""
    name = str(x.dtype).removeprefix("torch.")
    twin = CodeCensus(name, count_by_torch(x.detach().reshape(-1)))
    assert everything(twin) == everything(census(x))


def test_torch_twin_waits_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting, and looking at the amax, ask the device for nothing; the first figure does."""
    x = torch.randn(1000).bfloat16()

    def refuse(*_: object) -> None:
        raise AssertionError("the host waited for the device")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        twin = CodeCensus("bfloat16", count_by_torch(x))
        pending = Amax((0.0, 0, 0), 1000, amax_by_torch(x, 1))
        with pytest.raises(AssertionError, match="waited"):
            _ = twin.numel
    assert pending.amax == x.abs().max().item()


def test_a_16_bit_tensor_may_change_after_its_census() -> None:
    """The counts were taken at once."""
    x = torch.ones(100).bfloat16()
    c = census(x)
    x.fill_(2.0)
    assert c.amax == 1.0


def test_amaxes_are_read_together() -> None:
    """One transfer fills all that wait; those already there are left alone."""
    x = torch.tensor([1.0, -3.0, math.inf])
    found = [Amax((0.0, 0, 0), 3, amax_by_torch(x * k, 2)) for k in (1, 2)] + [amax_of(x)]
    read_together(found)
    assert [a._pending for a in found] == [None] * 3
    assert [(a.amax, a.inf) for a in found] == [(3.0, 2), (6.0, 2), (3.0, 1)]


def test_stream_keeps_no_wide_copy() -> None:
    """All figures of a 64 MiB float32 tensor take less than 24 MiB beside it."""
    code = """
import resource, torch
from fp8dbg.numerics.census import census
def everything(x):
    c = census(x)
    return c.kurtosis, c.peak_to_median, c.histogram(), c.quantised("e4m3", 3.0)
everything(torch.randn(2_000_000))
x = torch.empty(16, 1024, 1024).normal_()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
everything(x)
raise SystemExit(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > 24 * 1024)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_makes_its_own_threads() -> None:
    """A data loader forked after a large census can take one itself."""
    code = """
import os, torch
from fp8dbg.numerics.census import census
torch.set_num_threads(2)
x = torch.ones(8_000_000).bfloat16()
assert census(x).numel == x.numel()
pid = os.fork()
if pid == 0:
    os._exit(0 if census(x).numel == x.numel() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False, timeout=60)
    assert done.returncode == 0


def test_a_census_at_exit_still_counts() -> None:
    """When the interpreter starts no more threads, the one at hand does the work."""
    code = """
import atexit, os, torch
from fp8dbg.numerics.census import census
torch.set_num_threads(2)
x = torch.ones(8_000_000).bfloat16()
census(x)
atexit.register(lambda: os._exit(0 if census(x).numel == x.numel() else 1))
raise SystemExit(2)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_census_where_no_more_threads_can_be_started_is_right() -> None:
    """A process may have as many as it is allowed: those it has count on, and the one at hand does the work."""
    code = """
import threading, torch
from fp8dbg.numerics.census import census
torch.set_num_threads(4)
x = torch.randn(4_194_304).bfloat16()
census(x[: 2**21])  # one more thread
expected = torch.bincount(x.view(torch.int16).long() & 0xFFFF, minlength=65536)

def none_left(self):
    raise RuntimeError("can't start new thread")

threading.Thread.start = none_left
for _ in range(20):
    codes, counts = census(x).codes()
    assert torch.equal(torch.as_tensor(counts).long(), expected[torch.as_tensor(codes).long()])
    assert int(counts.sum()) == x.numel()
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


COUNT = """
import sys, torch
from fp8dbg.numerics.census import census
from fp8dbg.numerics.census_kernels import count_codes
ones = torch.ones(100).bfloat16()
raise SystemExit(census(ones).numel != 100 or bool(count_codes.stats.cache_hits) != {hit})
"""


def counted(cache: Path, before: str = "", hit: bool = False) -> bool:
    """Whether a fresh process with that folder for machine code takes a census, compiling or not as expected."""
    code, environment = before + COUNT.format(hit=hit), {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    return subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


def test_machine_code_is_kept(tmp_path: Path) -> None:
    """The second process compiles nothing."""
    assert counted(tmp_path)
    assert counted(tmp_path, hit=True)


def test_torn_machine_code_is_compiled_again(tmp_path: Path) -> None:
    """Files cut short by a crash cost a compilation, not the census."""
    assert counted(tmp_path)
    kept = [f for f in tmp_path.rglob("*") if f.is_file()]
    assert kept
    for file in kept:
        file.write_bytes(file.read_bytes()[:20])
    assert counted(tmp_path)


def test_kernels_run_on_a_full_disk(tmp_path: Path) -> None:
    """Where no file can grow, nothing is kept and the answer is right."""
    assert counted(tmp_path, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))")


def test_kernels_run_where_nothing_can_be_kept(tmp_path: Path) -> None:
    """With no writable place at all, numba compiles afresh."""
    no_place = """
import numba.core.caching as caching
def refuse(self):
    raise OSError("read-only")
caching._CacheLocator.ensure_cache_path = refuse
"""
    assert counted(tmp_path, no_place)
    assert not list(tmp_path.iterdir())


def test_codes_stored_give_the_census_back() -> None:
    """What ``codes`` gives, ``from_codes`` takes; float32 has none."""
    c = census(torch.randn(1000).half())
    assert isinstance(c, CodeCensus)
    assert everything(CodeCensus.from_codes("float16", *c.codes())) == everything(c)
    assert census(torch.randn(5)).codes() is None
    with pytest.raises(UsageError, match="bfloat16 or float16"):
        CodeCensus.from_codes("float32", [0], [1])
