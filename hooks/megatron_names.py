"""Names of layers in the whole Megatron model, from their names within a pipeline stage."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from fp8dbg.recording.names import named_layers

_NUMBERED = re.compile(r"^(?:.*\.)?layers\.\d+$")


def global_names(model: nn.Module) -> Callable[[str], str]:
    """A function from a layer's name within this pipeline stage to its name in the whole model.

    A stage counts its layers from 0; each carries its 1-based place in the whole model as ``layer_number``. The global
    name counts from 0. Names without such a layer, and other models' names, stay as they are.
    """
    prefixes: dict[str, str] = {}
    for name, _, module in named_layers(model):
        number = getattr(module, "layer_number", None)
        if type(number) is int and _NUMBERED.match(name) and type(module).__module__.startswith("megatron."):
            prefixes[name] = f"{name.rpartition('.')[0]}.{number - 1}"

    def rename(name: str) -> str:
        for local, whole in prefixes.items():
            if name == local or name.startswith(local + "."):
                return whole + name[len(local) :]
        return name

    return rename
