"""Definitions of the installed SGLang without importing it: it does not start on the double."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def take(file: str, names: tuple[str, ...], known: Mapping[str, object]) -> dict[str, Any]:
    """Functions, classes and methods (`Class.method`) of a file below `sglang/srt`.

    Lines keep their file, so that what waits is booked on SGLang.  known: names that they read.
    """
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "srt" / file
    found = dict(known)
    nodes = list(_named(ast.parse(path.read_text()), names))
    assert len(nodes) == len(names), f"{file} has no longer all of {names}"
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *nodes], []), str(path), "exec"), found)
    return {name.rpartition(".")[2]: found[name.rpartition(".")[2]] for name in names}


def _named(tree: ast.Module, names: tuple[str, ...]) -> list[ast.stmt]:
    nodes: list[ast.stmt] = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        if node.name in names:
            nodes.append(node)
        inner = node.body if isinstance(node, ast.ClassDef) else []
        for part in inner:
            if isinstance(part, ast.FunctionDef) and f"{node.name}.{part.name}" in names:
                part.decorator_list = []
                nodes.append(part)
    return nodes
