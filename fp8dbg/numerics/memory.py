"""A CPU tensor's memory as an array, without a trace on the tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_TYPES = {torch.float32: "<f4", torch.bfloat16: "<u2", torch.float16: "<u2", torch.float64: "<f8", torch.int32: "<i4"}


class _Memory:
    """What numpy asks for; holds the tensor for as long as there is an array."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": _TYPES[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The values of a contiguous CPU tensor, those of 16-bit floats as their uint16 codes; memory is shared.

    Not ``Tensor.numpy()``, after which torch refuses to resize the storage: FSDP frees gathered weights that way, so a
    look at one would break the training.
    """
    return np.asarray(_Memory(tensor))
