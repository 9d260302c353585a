"""The exact route: Transformer Engine's debug mode as a tap, through a feature of nvdlfw_inspect.

The default route (module hooks) cannot see what fused kernels keep to themselves: the norm's own output, the input of
fc2, the gradient at fc1, the results of their backward GEMMs. Debug mode takes the fusions apart and shows each tensor
beside its cast. It is asked for by hand, because an iteration in debug mode does not compute exactly what others do:

    from fp8dbg.hooks import nvidia_inspect
    nvidia_inspect.start()                         # once a process, before training
    with fp8dbg.attach(model, "run_dir"): ...      # measured steps run in debug mode, the others do not

Where somebody else calls ``nvdlfw_inspect.api.initialize`` (Megatron-Bridge's TensorInspectConfig does), give it
``FOLDER`` among its ``feature_dirs`` and ``configuration(...)`` of what it is configured with.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fp8dbg.errors import UsageError
from fp8dbg.hooks import nvidia_te_state as state

if TYPE_CHECKING:
    from torch import Tensor

FEATURE = "Fp8DbgRecord"
"""The feature's name in a debug configuration."""

FOLDER = Path(__file__).parent / "nvidia_features"
"""What nvdlfw_inspect needs among its ``feature_dirs`` to know the feature."""

TENSORS = ("activation", "weight", "gradient", "output", "dgrad", "wgrad")

_SECTION = {"enabled": True, "tensors": list(TENSORS)}


class Tap(Protocol):
    """Somebody who records one module."""

    def place_of(self, debug_name: str) -> int | None:
        """Which of the module's layers has this name in debug mode; None: none of them."""

    def wanted(self) -> bool:
        """Whether this step is measured."""

    def inspected(self, place: int, tensor_name: str, tensor: Tensor | None, casts: tuple[Any, Any]) -> None:
        """A tensor of a layer, in high precision, and what the GEMMs that read it along rows and columns read."""


_taps: list[Tap] = []
_known: dict[str, list[tuple[Tap, int]]] = {}


def listen(tap: Tap) -> None:
    """Show this tap its module's tensors from now on."""
    _taps.append(tap)
    _known.clear()


def unlisten(tap: Tap) -> None:
    """Show it nothing more."""
    if tap in _taps:
        _taps.remove(tap)
    _known.clear()


def _listeners(name: str) -> list[tuple[Tap, int]]:
    """Who records a layer. Names may still change before the first call: what was found is looked at once more."""
    found = _known.get(name)
    if found is None or any(tap.place_of(name) != place for tap, place in found):
        found = [(tap, place) for tap in _taps if (place := tap.place_of(name)) is not None]
        if found:
            _known[name] = found
    return found


def register() -> None:
    """Make the feature known to nvdlfw_inspect; called by what it executes out of ``FOLDER``.

    Its methods take named arguments, because Transformer Engine leaves out what a method does not name; they answer
    with a tuple, because a bare bool would end debug mode for good; and they raise nothing, because an exception
    inside them ends the training.
    """
    from nvdlfw_inspect.registry import Registry, api_method
    from transformer_engine.debug.features.api import TEConfigAPIMapper

    class Fp8DbgRecord(TEConfigAPIMapper):  # type: ignore[misc] # a class of theirs, untyped
        """fp8dbg records the tensors of the layers that it is attached to, on the steps that it measures."""

        @api_method  # type: ignore[untyped-decorator, unused-ignore]
        def inspect_tensor_enabled(
            self, config: Any, layer_name: str, tensor_name: str, iteration: int
        ) -> tuple[bool, int | None]:
            """Whether this step is measured; in which iteration the next one will be, the tap's own hook says."""
            return any(tap.wanted() for tap, _ in _listeners(layer_name)), None

        @api_method  # type: ignore[untyped-decorator, unused-ignore]
        def inspect_tensor(
            self,
            config: Any,
            layer_name: str,
            tensor_name: str,
            iteration: int,
            tp_group: Any,
            tensor: Any = None,
            rowwise_quantized_tensor: Any = None,
            columnwise_quantized_tensor: Any = None,
            quantizer: Any = None,
            tp_size: int = 1,
        ) -> None:
            """Hand a tensor and its casts over."""
            for tap, place in _listeners(layer_name):
                tap.inspected(place, tensor_name, tensor, (rowwise_quantized_tensor, columnwise_quantized_tensor))

    Registry.register_feature(namespace="transformer_engine")(Fp8DbgRecord)


def running() -> bool:
    """Whether debug mode is on in this process and knows the feature. Imports nothing."""
    manager = vars(sys.modules.get("nvdlfw_inspect.api", object)).get("DEBUG_MANAGER")
    registry: Any = getattr(sys.modules.get("nvdlfw_inspect.registry"), "Registry", None)
    if manager is None or registry is None:
        return False
    namespace = registry.data.get("transformer_engine")
    return namespace is not None and FEATURE in namespace.features


def start(config: Mapping[str, Any] | str | Path | None = None, log_dir: str | Path = ".") -> None:
    """Switch debug mode on in this process, with fp8dbg's feature for every layer.

    Args:
        config: the debug configuration of your own, a dictionary or a YAML file (what ``write_fallback`` writes for
            Transformer Engine is one); fp8dbg's feature is added to each of its sections.
        log_dir: where nvdlfw_inspect keeps its own logs.

    Raises:
        UsageError: nvdlfw_inspect or a fitting Transformer Engine is missing, debug mode is on already, or the
            configuration cannot be extended.
    """
    if state.te_version() < (2, 4):
        raise UsageError("Debug mode needs Transformer Engine 2.4 or newer.", "Record without it: attach does.")
    try:
        import nvdlfw_inspect.api as debug_api
        from transformer_engine.debug.pytorch.debug_state import TEDebugState
    except ImportError as error:
        raise UsageError(f"Debug mode cannot be imported: {error}.", "pip install nvdlfw_inspect") from error
    if debug_api.DEBUG_MANAGER is not None:
        hint = f"Give nvdlfw_inspect.api.initialize feature_dirs=[..., {str(FOLDER)!r}] and configuration(...) instead."
        raise UsageError("nvdlfw_inspect has been initialized already, which it can be once.", hint)
    import transformer_engine

    theirs = Path(transformer_engine.__file__).parent / "debug" / "features"
    merged = configuration(config)
    debug_api.initialize(config_file=merged, feature_dirs=[str(theirs), str(FOLDER)], log_dir=str(log_dir))
    TEDebugState.debug_enabled = True  # modules that were built before ask at each of their calls


def stop() -> None:
    """Switch debug mode off again and forget its configuration."""
    api = sys.modules.get("nvdlfw_inspect.api")
    if api is not None:
        api.end_debug()


def configuration(config: Mapping[str, Any] | str | Path | None = None) -> dict[str, Any]:
    """A debug configuration with fp8dbg's feature in it for every layer.

    A layer may match one section only. So the feature is added to each section there is, and a section of its own
    takes the layers that none of them selects.

    Raises:
        UsageError: there is no such file, or a section selects layers otherwise than by ``layer_name_regex_pattern``
            or ``layer_types``: what it leaves over cannot be written as a pattern.
    """
    sections = dict(_loaded(config))
    taken = [_pattern(name, section) for name, section in sections.items() if section.get("enabled")]
    made = {name: _extended(section) for name, section in sections.items()}
    others = f"^(?!.*(?:{'|'.join(taken)}))" if taken else "."
    selection = {"layer_name_regex_pattern": others}
    rest = {"enabled": True, "layers": selection, "transformer_engine": {FEATURE: dict(_SECTION)}}
    return {**made, "fp8dbg_record": rest}


def _loaded(config: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any]:
    if config is None or isinstance(config, Mapping):
        return config or {}
    import yaml

    try:
        found = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"The debug configuration {config} cannot be read: {error}", "Give a YAML file.") from error
    if not isinstance(found, Mapping):
        raise UsageError(f"The debug configuration {config} holds no sections.", "Give a YAML file of sections.")
    return found


def _pattern(name: str, section: Mapping[str, Any]) -> str:
    """A regular expression that finds the layers a section selects."""
    layers = section.get("layers") or {}
    if "layer_name_regex_pattern" in layers:
        pattern = str(layers["layer_name_regex_pattern"])
    elif set(layers) == {"layer_types"}:
        kinds = layers["layer_types"]
        pattern = "" if "all" in kinds else "|".join(map(re.escape, kinds))
    else:
        raise UsageError(
            f"Section {name} selects its layers by {', '.join(layers) or 'nothing'}.",
            "Select them by layer_name_regex_pattern or by layer_types.",
        )
    return f"(?:{pattern})"


def _extended(section: Mapping[str, Any]) -> dict[str, Any]:
    features = {**(section.get("transformer_engine") or {}), FEATURE: dict(_SECTION)}
    return {**section, "transformer_engine": features}
