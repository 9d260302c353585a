"""Python imports this by itself in every process below ``fp8dbg run``: it waits for torch, and is in nobody's way.

It imports only what every Python has loaded already, so a program that never imports torch pays for reading this file.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing is not loaded when Python starts
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class WaitForTorch:
    """Stands first among the finders of modules; torch is found by the others, and then said to have been imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Torch's, with a loader that tells; None, which asks the next finder, for everything else."""
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        for finder in others:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = TellingLoader(spec.loader, self.imported)  # type: ignore[assignment]  # acts as one
                return spec
        return None

    def imported(self) -> None:
        """Torch is there: wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then()


class TellingLoader:
    """Torch's own loader, but for a word at the end; the module never sees it."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        """As the loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """As the loader does; a torch that fails to import fails as ever."""
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then()


def tell(word: str) -> None:
    """A line for the launcher; lost if it is gone."""
    try:
        file = os.open(os.environ["FP8DBG_TOLD"], os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, word.encode() + b"\n")
        finally:
            os.close(file)
    except (OSError, KeyError):
        pass


def arm() -> None:
    """Have the launcher's own fp8dbg, wherever it is installed, look for a model that is trained."""
    try:
        import importlib.util

        if "fp8dbg" not in sys.modules:
            home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
            spec = importlib.util.spec_from_file_location(
                "fp8dbg", os.path.join(home, "__init__.py"), submodule_search_locations=[home]
            )
            if spec is None or spec.loader is None:
                raise ImportError("fp8dbg is not in " + home)
            sys.modules["fp8dbg"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules["fp8dbg"])
        importlib.import_module("fp8dbg.recording.launched").arm(os.environ["FP8DBG_RUN"], tell)
    except Exception as error:  # noqa: BLE001  whatever it is, the program must not notice
        print(f"fp8dbg: nothing is recorded here ({type(error).__name__}: {error})", file=sys.stderr)
        tell(f"failed {type(error).__name__}: {error}")


def step_aside() -> None:
    """Import the sitecustomize that Python would have found without this one, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != here]
    mine = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", mine)


if __name__ == "sitecustomize":
    if "FP8DBG_RUN" in os.environ:
        tell("started")
        if "torch" in sys.modules:
            arm()
        else:
            sys.meta_path.insert(0, WaitForTorch(arm))
    step_aside()
