"""A user's own function, named in a setting as `package.module:function`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from moerl.core.errors import ConfigError


def look_up(field: str, path: str, named: Sequence[str]) -> Any:
    """A user's `package.module:function`, looked up from the working directory too.

    Raises ConfigError naming `field` and what else it may be.
    """
    allowed = f"use {', '.join(named)} or package.module:function"
    module, colon, name = path.partition(":")
    if not (colon and module and name):
        raise ConfigError(field, path, allowed)
    _search_working_directory()
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(field, path, f"{error}; {allowed}") from error


def check_is_there(field: str, path: str) -> None:
    """Refuse a `package.module:function` whose module, or a function in it, cannot be found.

    Nothing is imported, because the module may import torch: its file is read.  A name that a file
    could make in another way (`from x import *`, `__getattr__`) is left to `look_up`.
    Raises ConfigError naming `field`.
    """
    module, _, name = path.partition(":")
    spec = _find(module)
    if spec is None:
        raise ConfigError(
            field, path, f"there is no module {module} on PYTHONPATH or in {os.getcwd()}"
        )
    if spec.origin and spec.origin.endswith(".py") and not _may_define(Path(spec.origin), name):
        raise ConfigError(field, path, f"{spec.origin} defines no {name}")


def source_of(path: str) -> Path | None:
    """The file or folder of the top-level module of `package.module:function`, if it is there."""
    spec = _find(path.partition(":")[0].partition(".")[0])
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    found = folders[0] if folders else spec.origin
    return None if found is None else Path(found)


def _search_working_directory() -> None:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _find(module: str) -> ModuleSpec | None:
    """Where a module is; its packages are not imported."""
    _search_working_directory()
    first, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # __main__, or no name
        return None
    name = first
    for part in rest:
        if spec is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations or [])
    return spec


def _may_define(file: Path, name: str) -> bool:
    nodes = list(ast.walk(ast.parse(file.read_bytes(), str(file))))
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = {node.name for node in nodes if isinstance(node, functions)}
    found |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    found |= {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return bool(found & {name, "*", "__getattr__"})
