"""Plays one CUDA device on the CPU for libraries that insist on one: "cuda" means "cpu".

Only callers in ``AUDIENCE`` are told that there is a GPU; everybody else (inductor, optimizers, trainers) keeps
seeing none. Process-wide and for good: use it in a process that runs tests or an example, never in a training run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

AUDIENCE = {"transformer_engine"}
"""Top-level packages that see a GPU."""


class _Properties:
    name = "CPU stand-in"
    multi_processor_count = 2
    total_memory = 8 << 30

    def __init__(self, capability: tuple[int, int]) -> None:
        self.major, self.minor = capability


class _Inert:
    """A stream, an event, a device guard, an NVTX range: any method does nothing, ``with`` passes through."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def __enter__(self) -> _Inert:
        return self

    def __exit__(self, *args: Any) -> None:
        return None


class _Generators:
    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator


def _asked_by_audience(depth: int) -> bool:
    return sys._getframe(depth + 1).f_globals.get("__name__", "").split(".")[0] in AUDIENCE


def _on_cpu(device: Any) -> Any:
    is_index = isinstance(device, int) and not isinstance(device, bool)
    if is_index or (isinstance(device, (str, torch.device)) and str(device).startswith("cuda")):
        return torch.device("cpu")
    return device


def _redirected(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same factory with device="cuda" read as "cpu".

    A TorchFunctionMode would be the tidy way, but modes are off inside their own handlers and inside backward.
    """

    @functools.wraps(function, updated=())
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        rest = tuple(_on_cpu(a) if isinstance(a, (str, torch.device)) else a for a in args[1:])
        return function(*args[:1], *rest, **kwargs)

    return factory


# fmt: off
_FACTORIES = (
    "empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "tensor", "as_tensor", "arange", "eye",
    "linspace", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_strided",
)
# fmt: on
_METHODS = ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")


def play(capability: tuple[int, int]) -> None:
    """Start playing a device of that compute capability; a second call changes nothing."""
    if getattr(torch.cuda, "_played_on_cpu", False):
        return
    torch.cuda._played_on_cpu = True  # type: ignore[attr-defined] # a mark of ours
    _replace_queries(capability)
    _replace_random_state()
    _replace_factories()
    _replace_autocast()


def _replace(owner: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)


def _answer(value: Any = None) -> Callable[..., Any]:
    """A function of its own for each name: dynamo refuses one object under two of torch's names."""
    return lambda *args, **kwargs: value


def _replace_queries(capability: tuple[int, int]) -> None:
    properties = _Properties(capability)

    def get_device_properties(*args: Any) -> _Properties:
        if not _asked_by_audience(1):
            raise RuntimeError("No CUDA device: the CPU stand-in plays one for Transformer Engine only.")
        return properties

    cuda = torch.cuda
    _replace(
        cuda,
        is_available=lambda: _asked_by_audience(1),
        current_device=_answer(0),
        device_count=lambda: int(_asked_by_audience(1)),
        get_device_properties=get_device_properties,
        get_device_capability=_answer(capability),
        get_device_name=_answer(properties.name),
        is_current_stream_capturing=_answer(False),
        synchronize=_answer(),
        empty_cache=_answer(),
        set_device=_answer(),
        current_stream=_Inert,
        Stream=_Inert,
        Event=_Inert,
        stream=_Inert,
        device=_Inert,
        memory_allocated=_answer(0),
        max_memory_allocated=_answer(0),
        memory_reserved=_answer(0),
        _lazy_init=_answer(),
        _lazy_call=lambda function, **kwargs: function(),
    )
    _replace(cuda.nvtx, range=_Inert, range_push=_answer(), range_pop=_answer())
    real_is_cuda = torch._C.TensorBase.is_cuda.__get__  # type: ignore[attr-defined] # a C getset descriptor
    torch.Tensor.is_cuda = property(lambda t: _asked_by_audience(1) or real_is_cuda(t))  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _replace_random_state() -> None:
    def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    for module in (torch.cuda, torch.cuda.random):
        _replace(module, get_rng_state=get_rng_state, set_rng_state=set_rng_state)
    _replace(torch.cuda, manual_seed=lambda seed: torch.manual_seed(seed), default_generators=_Generators())


def _replace_factories() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _redirected(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _redirected(getattr(torch.Tensor, name)))
    wrapper_subclass = staticmethod(_redirected(torch.Tensor._make_wrapper_subclass))
    _replace(torch.Tensor, _make_wrapper_subclass=wrapper_subclass)


def _replace_autocast() -> None:
    real_dtype, real_enabled, real_autocast = torch.get_autocast_dtype, torch.is_autocast_enabled, torch.amp.autocast

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        return real_dtype("cpu" if device_type == "cuda" else device_type)

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return real_enabled("cpu" if device_type == "cuda" else device_type)

    class autocast(real_autocast):  # type: ignore[misc, valid-type] # takes torch's own place and name
        def __init__(self, device_type: str = "cuda", *args: Any, **kwargs: Any) -> None:
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    _replace(torch, get_autocast_dtype=get_autocast_dtype, is_autocast_enabled=is_autocast_enabled, autocast=autocast)
    _replace(torch.amp, autocast=autocast)
    _replace(torch.amp.autocast_mode, autocast=autocast)
