"""Which pass of a layer this is: training, evaluation, or one of the two passes of activation checkpointing."""

from __future__ import annotations

import torch

_grad_enabled = torch.is_grad_enabled
_forward_ad_enabled = torch._C._is_fwd_grad_enabled
"""False inside an autograd.Function's forward, and so in the first pass of reentrant checkpointing: a plain no_grad,
as around an evaluation, leaves it True."""


def in_function() -> bool:
    """Whether this runs, without gradients, inside an autograd.Function's forward: reentrant checkpointing's first."""
    return not _grad_enabled() and not _forward_ad_enabled() and not torch.is_inference_mode_enabled()


def will_be_repeated() -> bool:
    """Whether this forward is the first pass of activation checkpointing of either kind."""
    return in_function() or (_grad_enabled() and checkpointed("_checkpoint_hook"))


def checkpointed(hook: str) -> bool:
    """Whether the innermost hooks on saved tensors are those of torch's non-reentrant checkpointing of that name."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith(hook)
