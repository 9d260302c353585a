"""Looking at a tensor leaves no trace on it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from fp8dbg import measure
from fp8dbg.numerics.gemm import shadow
from fp8dbg.numerics.memory import array_of
from fp8dbg.numerics.recipes import recipe_named


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_array_is_the_tensors_memory(dtype: torch.dtype) -> None:
    """Same values, shape and address; 16-bit floats as their codes."""
    x = torch.randn(3, 5).to(dtype)
    found = array_of(x)
    assert found.shape == (3, 5)
    assert found.__array_interface__["data"][0] == x.data_ptr()
    copy = torch.from_numpy(found.view(np.float32 if dtype is torch.float32 else np.int16).copy()).view(dtype)
    assert torch.equal(copy, x)
    assert array_of(torch.empty(0, dtype=dtype)).size == 0


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "rowwise", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_measured_tensor_can_still_be_freed_by_resizing_its_storage(recipe: str, dtype: torch.dtype) -> None:
    """FSDP frees gathered weights so; Tensor.numpy() would have forbidden it."""
    x, weight = torch.randn(32, 64).to(dtype), torch.randn(16, 64).to(dtype)
    measure(x, recipe=recipe)
    shadow("fprop", x, weight, recipe_named(recipe))
    for tensor in (x, weight):
        tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize(("threads", "callers"), [(8, 1), (2, 3)])
def test_counts_survive_the_workers_next_part(threads: int, callers: int) -> None:
    """A worker that takes two parts, of one tensor or of two callers', does not count the second over the first."""
    tensors = [torch.full((1 << 23,), float(i + 1)).bfloat16() for i in range(callers)]
    for x in tensors:  # every part of another value
        x.view(8, -1).mul_(2.0 ** torch.arange(8)[:, None])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ThreadPoolExecutor(callers) as pool:
            found = [list(pool.map(lambda x: measure(x).histogram, tensors)) for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    for histograms in found:
        for i, histogram in enumerate(histograms):
            assert histogram == {"exponent": (i + 1).bit_length() - 1, "counts": [1 << 20] * 8, "codes": None}
