"""Which layer, which rank: names that stay the same whatever wraps the model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from fp8dbg.text import in_unicode

if TYPE_CHECKING:
    from torch import nn

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_fpw_module)(?:\.|$)"
)
_LEADING = re.compile(r"^(?:module(?:\.|$))+")


def canonical_name(name: str) -> str:
    """A module's path without the segments that wrappers add.

    ``module.`` is dropped only in front (DistributedDataParallel, Megatron's Float16Module), where no model has it of
    its own accord; torch.compile's ``_orig_mod``, FSDP's and the checkpoint wrapper's are dropped anywhere.
    """
    bare = _LEADING.sub("", _WRAPPERS.sub("", name))
    return bare.rstrip(".")


def named_layers(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Canonical name, path and module of every module of a model, each module once.

    A model that is a single layer is called by its class. Where two paths become one name, both keep their path. Both
    are Unicode.
    """
    paths = [(in_unicode(path), module) for path, module in model.named_modules()]
    names = [canonical_name(path) or type(module).__name__ for path, module in paths]
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    for name, (path, module) in zip(names, paths, strict=True):
        yield (name if counts[name] == 1 or not path else path), path, module


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether a name is one of the globs or fits one (case matters; ``*`` crosses dots)."""
    return any(name == glob or fnmatchcase(name, glob) for glob in globs)


def rank() -> int:
    """Global rank: torch.distributed's where it is initialised, else the RANK variable's, else 0."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else 0
