"""Getting at a tensor's plain values, and leaving no trace in what the user is running."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

_PASSING = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Alias", "Add")
"""Nodes that stand between a linear layer's output and its GEMM: reshaping, a cast, a bias."""

_PLAIN = (Tensor, Parameter)
_DISPATCH = torch._C._len_torch_dispatch_stack
_FUNCTION = torch._C._len_torch_function_stack


def local(x: Tensor) -> Tensor:
    """This rank's part of a distributed tensor (DTensor), which is what its GEMM reads; any other tensor as it is."""
    if type(x) in _PLAIN or not hasattr(x, "_local_tensor"):
        return x
    part: Tensor = x._local_tensor
    return part


def modes_active() -> bool:
    """Whether somebody's torch function or dispatch mode would see what we compute.

    Selective checkpointing is such a mode: an operation of ours in its cache would be replayed as one of the user's.
    """
    return bool(_DISPATCH() or _FUNCTION())


@contextmanager
def undisturbed(x: Any) -> Iterator[None]:
    """Compute without graph, autocast and modes: nothing of it can be seen from outside."""
    from torch.utils._python_dispatch import _disable_current_modes

    device = x.device.type if isinstance(x, Tensor) else "cpu"
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
        if _DISPATCH():
            stack.enter_context(_disable_current_modes())
        if _FUNCTION():
            stack.enter_context(torch._C.DisableTorchFunction())
        yield


def gemm_node(node: Node, known: Collection[str], passing: tuple[str, ...] = ()) -> tuple[Node, int] | None:
    """The node of the GEMM behind an output's node, and which of its outputs that is; None if it is not found.

    What stands between may only reshape, cast or add, or be a host's own whose names begin as ``passing`` says.
    """
    place = 0
    for _ in range(4):
        name = node.name()
        if name in known:
            return node, place
        if not name.startswith((*_PASSING, *passing)) or not node.next_functions:
            return None
        behind, place = node.next_functions[0]
        if behind is None:
            return None
        node = behind
    return None
