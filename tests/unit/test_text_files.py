"""Text files of moerl are UTF-8 whatever the locale is: every call that opens one says so.

ruff's rule (PLW1514) sees a call on `Path(...)` only, and most paths here are attributes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_FILES = {"os.open", "self._health.open"}  # other functions of this name


def opens_text(call: ast.Call) -> bool:
    """True for a call that opens, reads or writes text in the locale's encoding."""
    if any(keyword.arg in ("encoding", None) for keyword in call.keywords):
        return False
    if isinstance(call.func, ast.Name):
        return call.func.id == "open" and is_text(call, 1)
    if not isinstance(call.func, ast.Attribute):
        return False
    match call.func.attr:
        case "read_text":
            return not call.args
        case "write_text":
            return len(call.args) < 2
        case "fdopen":
            return is_text(call, 1)
        case "open":
            return ast.unparse(call.func) not in NOT_FILES and is_text(call, 0)
    return False


def is_text(call: ast.Call, place: int) -> bool:
    """True if the mode, argument number `place`, is one of text; other arguments are no mode."""
    named = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    given = (call.args[place : place + 1] or named or [ast.Constant("r")])[0]
    mode = given.value if isinstance(given, ast.Constant) else None
    return isinstance(mode, str) and set(mode) <= set("rwax+t")


def missing(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and opens_text(node):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_every_text_file_has_an_encoding() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / "moerl").rglob("*.py"))
        if (names := list(missing(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ("a.b.read_text()", True),
        ("path.read_text(errors='replace')", True),
        ("path.write_text(text)", True),
        ("open(path)", True),
        ("path.open('a', buffering=1)", True),
        ("os.fdopen(1, 'w')", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text, encoding='ascii')", False),
        ("open(path, 'rb')", False),
        ("path.open(mode='wb')", False),
        ("os.open(path, flags)", False),
        ("transport.open(8)", False),
    ],
)
def test_calls_are_told_apart(call: str, is_found: bool) -> None:
    assert bool(list(missing(call))) == is_found
