"""What an adapter tells the recorder about one layer: the only thing the recorder knows of a host library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from fp8dbg.runs.schema import GEMMS

if TYPE_CHECKING:
    from fp8dbg.numerics.recipes import Recipe

ScaleInForce = tuple[float | Tensor | None, str | None]
"""A scale, per tensor (None for finer ones), and where it comes from: live or initial."""

Gradients = tuple[Tensor | None, Tensor | None]
"""grad_input, any shape with features last, and grad_weight [out, in]; None where it is not computed."""


class Layer:
    """One GEMM layer: its name, its module, and how its operands, scales and gradients are found.

    This class serves ``nn.Linear`` and anything that looks like one. An adapter subclasses it and overrides what its
    host does differently; what its methods say may change from call to call (Transformer Engine decides at each).
    Every method is called inside a guard: where one raises, what it is for is switched off for this layer, and
    training goes on.

    Args:
        name: canonical global name.
        module: the module whose call is the layer's call; its ``training`` flag is read.
        path: the module's own path in the model that was attached to (run.json keeps it).
    """

    host = "pytorch"
    gemms: tuple[str, ...] = tuple(GEMMS)
    """GEMMs of the layer; empty: operands only."""
    nodes: tuple[str, ...] = ("AddmmBackward0", "MmBackward0", "LinearBackward0")
    """Names of the autograd nodes that run the backward GEMMs, for ``results``."""
    as_given = False
    """Whether FP8 casts read the operands in the dtype they come in; else in the output's, as under autocast."""

    passing: tuple[str, ...] = ()
    """Beginnings of the names of nodes between an output and its GEMM that hand gradients on unchanged."""
    shows_product: bool = True
    """Whether the output that ``pick`` finds is the GEMM's own: not where ranks' parts are summed up after it."""
    shows_dgrad: bool = True
    """Whether grad_input, where it is found, is the GEMM's own, likewise."""

    def __init__(self, name: str, module: nn.Module, path: str = "") -> None:
        self.name, self.module, self.path = name, module, path or name

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> tuple[Any, Any]:
        """Input and output of the GEMM, from the module's call; a tuple's first element is the output.

        Called in the module's forward hook. Either may be None where it cannot be seen. On steps that are not
        sampled an ``Amax`` does for the input.
        """
        given = args[0] if args else next(iter(kwargs.values()), None)
        return given, output[0] if type(output) in (tuple, list) and output else output

    def ahead(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Tensor | None]:
        """Input and weight where both are known before the module's call: there their amaxes cost least.

        What is read then has just been written, and is in the cache for the GEMM, which would come for it anyway.
        Read afterwards it comes from memory once more. (None, None): not known; ``recorder.hook`` then waits.
        """
        return None, None

    @property
    def looks_ahead(self) -> bool:
        """Whether the layer knows its operands before its module is called."""
        return type(self).ahead is not Layer.ahead

    def weight(self) -> Tensor | None:
        """The weight [out, in] that the GEMM reads, or None where it cannot be seen.

        Only what is stored is read: a parametrization's weight is computed on access, and spectral norm changes its
        own state each time it is.
        """
        found = self.module._parameters.get("weight")
        if found is None:
            found = self.module.__dict__.get("weight")
        return found if isinstance(found, Tensor) and found.is_floating_point() else None

    def kept_weight(self) -> Tensor | None:
        """The values, [out, in], of an FP8 copy of the weight that the host made in an earlier call and reads again.

        Asked on measured steps, after the module's forward. None: each call casts the weight anew. A copy that is not
        renewed after the optimizer's step shows in the figures of the weight.
        """
        return None

    def bias(self) -> Tensor | None:
        """What the layer adds to its product, or None: it is taken off before outputs are compared."""
        found = self.module._parameters.get("bias")
        return found if isinstance(found, Tensor) else None

    def scale(self, role: str) -> ScaleInForce:
        """The scale in force for an operand of an FP8 layer.

        Asked after the module's forward for input and weight, and before its backward for grad_output.
        """
        return None, None

    @property
    def recipe(self) -> Recipe | None:
        """The FP8 recipe in force; None: the layer runs in BF16. Read several times a call: keep it cheap."""
        return None

    def recipe_of(self, gemm: str) -> Recipe | None:
        """The FP8 recipe that one GEMM follows; None where it runs in BF16."""
        return self.recipe

    def reader(self, node: Node) -> Callable[[tuple[Tensor | None, ...]], Gradients]:
        """What reads the GEMMs' results from the input gradients of this call's autograd node."""
        return functools.partial(self.results, node.name())

    def results(self, node: str, gradients: tuple[Tensor | None, ...]) -> Gradients:
        """The GEMMs' results among the input gradients of the autograd node of that name (one of ``nodes``)."""
        if node == "LinearBackward0":
            return gradients[0], gradients[1]
        grad_input, turned = gradients[-2:]
        return grad_input, None if turned is None else turned.t()

    def facts(self) -> dict[str, Any]:
        """What run.json keeps about the layer."""
        weight = self.weight()
        return {
            "layer": self.name,
            "module": self.path,
            "host": self.host,
            "type": type(self.module).__name__,
            "shape": list(weight.shape) if weight is not None else None,
            "recipe": self.recipe.label if self.recipe else None,
            "bf16_gemms": [gemm for gemm in self.gemms if self.recipe_of(gemm) is None],
        }


class OperandsOnly(Layer):
    """A module of any type: its first tensor in, its first tensor out, and its ``weight`` if it has one."""

    gemms = ()

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> tuple[Any, Any]:
        """The first tensor among the arguments and the first among the outputs, one level deep."""
        return _first_tensor((*args, *kwargs.values())), _first_tensor(output)


def _first_tensor(values: Any) -> Tensor | None:
    if isinstance(values, Tensor):
        return values
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        values = getattr(values, "__dict__", {}).values()
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)
