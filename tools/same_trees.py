#!/usr/bin/env python3
"""Proof of a refactoring that only renames: tools/same_trees.py OLD NEW TABLE [STEP ...]

Takes every Python file of revision OLD, applies the rename table to its syntax tree, and compares
with the tree of revision NEW.  Comments, docstrings, layout and the order of imports do not count;
everything else must be equal.  Exit status 1 lists the files that differ and where.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.rename import is_flag_keyword, origins_of, symbol
from tools.renames import Table, is_kept, read_tables


def main() -> None:
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    old, new, table, *steps = sys.argv[1:]
    tables = read_tables(Path(table), tuple(steps))
    expected = files_of(old)
    for one in tables:
        expected = renamed(expected, one)
    problems = differences(expected, files_of(new), tables)
    for problem in problems:
        print(problem)
    print(f"[same trees] {len(expected)} files, {len(problems)} differ")
    raise SystemExit(bool(problems))


def files_of(revision: str) -> dict[str, ast.Module]:
    """The syntax trees of all Python files of a revision, by path."""
    names = _git("ls-tree", "-r", "--name-only", revision).splitlines()
    return {
        name: ast.parse(_git("show", f"{revision}:{name}"))
        for name in names
        if name.endswith(".py") and not is_kept(name)
    }


def renamed(files: dict[str, ast.Module], table: Table) -> dict[str, ast.Module]:
    """The trees as the table wants them, by their new paths."""
    origins = origins_of(files)
    found: dict[str, ast.Module] = {}
    for name, tree in files.items():
        if name.removesuffix("/__init__.py").replace("/", ".") in table.dropped:
            continue
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        new = _Renamer(module, table, origins, tree).visit(tree)
        home = found.setdefault(table.path(name), ast.Module([], []))
        home.body += _without_docstring(new, new.body) if table.joins else new.body
    for module in {table.module(one) for one in table.joins.values()}:
        _end_self_imports(found[module.replace(".", "/") + ".py"], module)
    return found


def _end_self_imports(tree: ast.Module, module: str) -> None:
    """What two files imported from each other is at hand when they are one; so is a common line."""
    kept: dict[str, ast.stmt] = {}
    for node in tree.body:
        if not (isinstance(node, ast.ImportFrom) and node.module == module):
            kept.setdefault(ast.dump(node), node)
    tree.body = list(kept.values())


def differences(
    expected: dict[str, ast.Module], found: dict[str, ast.Module], tables: list[Table]
) -> list[str]:
    """One line per file that is missing, too many or different."""
    problems = [f"{name}: missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name}: not in the old tree" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        want, have = (_statements(files[name], tables) for files in (expected, found))
        if any(table.is_home_of_joined(name) for table in tables):
            want, have = sorted(want), sorted(have)
        if want != have:
            first = next(
                (pair for pair in zip(want, have, strict=False) if pair[0] != pair[1]),
                (f"{len(want)} statements", f"{len(have)} statements"),
            )
            problems.append(f"{name}:\n  want {_around(*first)}\n  have {_around(*first[::-1])}")
    return problems


class _Renamer(ast.NodeTransformer):
    """Applies a table to one tree."""

    def __init__(
        self, module: str, table: Table, origins: dict[str, dict[str, str]], tree: ast.Module
    ) -> None:
        self._table, self._origins = table, origins
        self._own = table.own(module)
        self._bound: dict[str, str] = {}
        self._aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                self._note(node, node.module)

    def _note(self, node: ast.ImportFrom, module: str) -> None:
        for alias in node.names:
            if module.split(".")[0] not in ("moerl", "tests"):
                continue
            if f"{module}.{alias.name}" in self._origins:
                self._aliases[alias.asname or alias.name] = f"{module}.{alias.name}"
            new = symbol(module, alias.name, self._table, self._origins)[1]
            if alias.asname is None and new != alias.name:
                self._bound[alias.name] = new

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for alias in node.names:
            module, name = node.module or "", alias.name
            if module.split(".")[0] in ("moerl", "tests"):
                module, name = symbol(module, name, self._table, self._origins)
            made.append(ast.ImportFrom(module, [ast.alias(name, alias.asname)], node.level))
        return made

    def visit_Import(self, node: ast.Import) -> ast.AST:
        node.names = [ast.alias(self._table.module(a.name), a.asname) for a in node.names]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            node.value = self._table.string(node.value, self._own | self._bound)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _last_name(node.func) == "parametrize" and isinstance(node.args[0], ast.Constant):
            names = str(node.args[0].value)
            node.args[0].value = self._table.code(names, self._own | self._bound)
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        for part in node.values:
            if isinstance(part, ast.Constant):
                part.value = self._table.literal(self._table.prose(str(part.value), self._own))
            else:
                self.visit(part)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        head = self._aliases.get(node.value.id) if isinstance(node.value, ast.Name) else None
        chain = self._table.chains.get(f"{_last_name(node.value)}.{node.attr}")
        self.generic_visit(node)
        names = self._own if head is None else self._table.own(head)
        node.attr = chain or names.get(node.attr, node.attr)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field, value in ast.iter_fields(node):
            if isinstance(value, str) and field not in ("attr", "type_comment", "kind"):
                if not (isinstance(node, ast.keyword) and is_flag_keyword(node)):
                    new = self._bound.get(value, self._own.get(value, value))
                    setattr(node, field, new)
            elif field in ("names", "kwd_attrs") and value and isinstance(value[0], str):
                setattr(node, field, [self._own.get(one, one) for one in value])
        return super().generic_visit(node)


def _last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _statements(tree: ast.Module, tables: list[Table]) -> list[str]:
    """Each top statement as text without docstrings; imports are flat and sorted.

    Phrases are applied once more to both sides: two literals side by side are one string here, and
    two words of a phrase may stand in different ones.
    """
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = _flat_imports(_without_docstring(node, body))  # type: ignore[attr-defined]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for table in tables:
                node.value = table.literal(table.prose(node.value, {}))
            node.value = " ".join(node.value.split())
    return [ast.dump(node) for node in tree.body]


def _without_docstring(node: ast.AST, body: list[ast.stmt]) -> list[ast.stmt]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(node, kinds) and ast.get_docstring(node) is not None:
        return body[1:] or [ast.Pass()]
    return body


def _flat_imports(body: list[ast.stmt]) -> list[ast.stmt]:
    imports: list[ast.stmt] = []
    rest: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.ImportFrom):
            imports += [ast.ImportFrom(node.module, [alias], node.level) for alias in node.names]
        elif isinstance(node, ast.Import):
            imports += [ast.Import([alias]) for alias in node.names]
        else:
            rest.append(node)
    return sorted(imports, key=ast.dump) + rest


def _around(one: str, other: str) -> str:
    """The first place where two texts part, with what stands around it."""
    at = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return one[max(at - 60, 0) : at + 80]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
