"""Changes a module of another process once it is loaded.

Python imports a module `sitecustomize` at its start when its folder is on PYTHONPATH; the ones of
the tests call `after_import`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class Finder(MetaPathFinder):
    """Finds one module as usual, and changes it once it is loaded."""

    def __init__(self, hooked: str, change: Callable[[ModuleType], None]) -> None:
        self._hooked, self._change = hooked, change

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._hooked:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call `change` with the module when it has been loaded for the first time."""
    sys.meta_path.insert(0, Finder(name, change))
