"""Reading back what a host test recorded, and the same figures from the bytes that the host made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8dbg.hooks import nvidia_te_state as state
from fp8dbg.hooks.nvidia_te_modules import layers_of
from fp8dbg.runs.folder import open_folder
from tests.hosts.te_cpu.quantizers import Cast

_BOUNDARY = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440.0}


@dataclass(frozen=True)
class Figures:
    """What a cast did, from its input, its bytes and its scale."""

    amax: float | None
    underflow: int
    saturated: int
    at_max: int
    scale: float | None

    @classmethod
    def of(cls, dense: torch.Tensor, data: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> Figures:
        """``data``: bytes in the order of ``dense``. Saturation is told from dense and scale: bytes cannot show it."""
        x, codes = dense.detach().float(), data.view(torch.uint8) & 0x7F
        largest = torch.tensor(torch.finfo(dtype).max).to(dtype).view(torch.uint8)
        beyond = torch.zeros((), dtype=torch.int64)
        if scale is not None:
            scaled, edge = (x * scale).abs(), _BOUNDARY[dtype]
            beyond = (scaled >= edge).sum() if dtype is torch.float8_e5m2 else (scaled > edge).sum()
        return cls(
            amax=float(x.abs().max()) or None,
            underflow=int(((x != 0) & (codes == 0)).sum()),
            saturated=int(beyond),
            at_max=int((codes == largest).sum()),
            scale=float(scale) if scale is not None else None,
        )


def rows(path: Path, query: str) -> list[dict[str, Any]]:
    """Rows of a query on a run folder, as dictionaries; NULL is None."""
    folder = open_folder(path)
    try:
        relation = folder.sql(query)
        names = relation.columns
        return [dict(zip(names, row, strict=True)) for row in relation.fetchall()]
    finally:
        folder.close()


def figures(path: Path) -> dict[tuple[str, str], list[Figures]]:
    """Layer and operand -> the recorded figures of each cast, in the order of step, microbatch and call."""
    found: dict[tuple[str, str], list[Figures]] = {}
    columns = "layer, tensor, amax, underflow, saturated, at_max, scale"
    query = (
        f"select {columns} from tensors where what_if is null and recipe is not null order by step, microbatch, call"
    )
    for row in rows(path, query):
        key = row.pop("layer"), row.pop("tensor")
        found.setdefault(key, []).append(Figures(**row))
    return found


def _quantizers(module: nn.Module, direction: str) -> list[Any]:
    """A module's quantizers, of which there are none before its first forward."""
    held: Any = module
    if state.kind_of(module) == state.OPERATION:
        return (held._quantizers or {}).get({"fwd": "forward", "bwd": "backward"}[direction], [])  # type: ignore[no-any-return]
    return held.quantizers[f"scaling_{direction}"]  # type: ignore[no-any-return]


def _is_one(a: Any, b: Any) -> bool:
    """The same quantizer; under delayed scaling te.ops may make it anew between calls, with the scale it had."""
    scales = [getattr(quantizer, "scale", None) for quantizer in (a, b)]
    places = [scale.data_ptr() for scale in scales if isinstance(scale, torch.Tensor)]
    return a is b or (len(places) == 2 and places[0] == places[1])


def owner_of(net: nn.Module, cast: Cast) -> tuple[str, str]:
    """Layer and operand of a cast: by the quantizer, or by the weight, which has a copy of it where it is cached."""
    for name, module in net.named_modules():
        for layer in layers_of(name, name, module) if state.kind_of(module) else ():
            weight = layer.weight()
            if weight is not None and weight.data_ptr() == cast.dense.data_ptr():
                return layer.name, "weight"
            for role, direction in (("input", "fwd"), ("weight", "fwd"), ("grad_output", "bwd")):
                slot = getattr(layer.slots, role)
                if any(_is_one(q, cast.quantizer) for q in _quantizers(layer.module, direction)[slot : slot + 1]):
                    return layer.name, role
    raise AssertionError("a cast by a quantizer of no layer")
