"""Functions that settings name: a user's own `package.module:function`, or a line of a table."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from moerl.config.validate import either
from moerl.core.errors import ConfigError

_FORM = re.compile(r"(?:(?:.*/)?[^\W\d]\w*\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):[^\W\d]\w*")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def functions(named: Iterable[str]) -> str:
    """The values that a setting with a function may have, for an error message."""
    return either((*named, "package.module:function"))


def load_below(package: str, path: str) -> Any:
    """The object `module:name` of a table, from a package of moerl."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"{package}.{module}"), name)


def import_object(field: str, path: str, named: Iterable[str]) -> Any:
    """Import a user's `package.module:function`, from the working directory too, or from a file.

    named: other values that the setting may have.
    Raises ConfigError naming `field`, the value and the allowed values.
    """
    allowed = f"use {functions(named)}"
    if not _FORM.fullmatch(path):
        raise ConfigError(field, path, allowed)
    module, name = _parts(path)
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        absent = str(getattr(error, "name", ""))
        is_absent = absent == name or f"{module}.".startswith(f"{absent}.")
        why = f"{error}; {allowed}" if is_absent else _told(error)
        raise ConfigError(field, path, why) from error


def _parts(path: str) -> tuple[str, str]:
    """Module and function; the folder of a file `folder/module.py:function` is searched, too."""
    module, _, name = path.partition(":")
    file = Path(module).expanduser().resolve()  # of a module, a name in the working directory
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    return file.stem if file.suffix == ".py" else module, name


def _told(error: BaseException) -> str:
    """An error of a user's module with its file and line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename} line {error.lineno} is not Python: {error.msg}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{place.filename} line {place.lineno} raised {type(error).__name__}: {error}"


def check_importable(field: str, path: str, named: Iterable[str]) -> None:
    """Refuse a `package.module:function` whose module, or a function in it, cannot be found.

    The file of the module is read and not imported, because it may import torch.  A name that the
    file could define in another way (`from x import *`, `__getattr__`) is left to `import_object`.
    named: other values that the setting may have.
    Raises ConfigError naming `field`, the value and the allowed values.
    """
    allowed = f"use {functions(named)}"
    if not _FORM.fullmatch(path):
        raise ConfigError(field, path, allowed)
    module, name = _parts(path)
    spec = _find(module)
    if spec is None:
        where = f"PYTHONPATH and {Path(path).resolve().parent} have no module {module}"
        raise ConfigError(field, path, f"{where}; {allowed}")
    origin = str(spec.origin)
    try:
        if origin.endswith(".py") and not _may_define(Path(origin), name):
            raise ConfigError(field, path, f"{origin} defines no {name}; {allowed}")
    except SyntaxError as error:
        raise ConfigError(field, path, _told(error)) from error


def source_of(path: str) -> Path | None:
    """The file or folder of the top-level module of `package.module:function`, if it exists."""
    spec = _find(_parts(path)[0].partition(".")[0])
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    found = folders[0] if folders else spec.origin
    return None if found is None else Path(found)


def _find(module: str) -> ModuleSpec | None:
    """Where a module is; its packages are not imported."""
    first, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # __main__, or no name
        return None
    for part in rest:
        if spec is None:
            return None
        # by its last name: a folder without __init__.py would look its package up in sys.modules
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or []))
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


def defined_in(path: str) -> Signature | str:
    """The signature of `package.module:function`, read without an import, or a problem.

    "" where the file leaves it open: another file defines it, a decorator changes it, it is an
    object, or several statements could bind the name.
    """
    file, found = _definitions(path)
    if len(found) != 1 or found[0].decorator_list:
        return ""
    (node,) = found
    if isinstance(node, ast.ClassDef):
        return f"{file} defines {node.name} as a class; name an instance of it, or a function"
    return Signature(list(_parameters(node.args)))


def place_of(path: str) -> str:
    """File and line of `package.module:function`, as far as an import is not needed."""
    file, found = _definitions(path)
    return f"{file} line {found[-1].lineno}" if found else file or path


def _definitions(
    path: str,
) -> tuple[str, list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """The file of a module, and its own definitions of a function's name."""
    module, name = _parts(path)
    spec = _find(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return "", []
    body = ast.parse(Path(spec.origin).read_bytes(), spec.origin).body
    found = [node for node in body if isinstance(node, _DEFINITIONS) and node.name == name]
    return spec.origin, found


def _parameters(args: ast.arguments) -> Iterator[Parameter]:
    plain = [*args.posonlyargs, *args.args]
    required = len(plain) - len(args.defaults)
    for place, arg in enumerate(plain):
        is_only = place < len(args.posonlyargs)
        kind = Parameter.POSITIONAL_ONLY if is_only else Parameter.POSITIONAL_OR_KEYWORD
        yield Parameter(arg.arg, kind, default=Parameter.empty if place < required else None)
    if args.vararg:
        yield Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL)
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        kept = Parameter.empty if default is None else None
        yield Parameter(arg.arg, Parameter.KEYWORD_ONLY, default=kept)
    if args.kwarg:
        yield Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD)
