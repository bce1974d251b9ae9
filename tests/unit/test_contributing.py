"""The rules of CONTRIBUTING.md that a count can check: lines of the package, lengths, words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LONGEST, LONGEST_IN_MODELS = 60, 40  # lines of a function
SLACK = 250  # lines that a change may save without lowering the number
README_WORDS = 1250


def stated_lines() -> int:
    (number,) = re.findall(r"`moerl/` has at most ([\d,]+)\s+lines", PAGE)
    return int(number.replace(",", ""))


def sources() -> list[Path]:
    return [path for path in (ROOT / "moerl").rglob("*.py") if "built" not in path.parts]


def lengths(path: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of each function of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def longer(paths: list[Path], most: int) -> list[str]:
    return [
        f"{path.parent.name}/{path.name}:{name} has {lines} lines"
        for path in paths
        for name, lines in lengths(path)
        if lines > most
    ]


def model_modules() -> list[Path]:
    text = PAGE.split("Models of a module:")[1].split("\n\n")[0]
    return [ROOT / name for name in re.findall(r"`(moerl/\S+\.py)`", text)]


def test_the_package_has_at_most_the_stated_lines_and_the_number_falls_with_it() -> None:
    lines = sum(path.read_bytes().count(b"\n") for path in sources())
    assert lines <= stated_lines(), "name the lines that the change replaces, or say why it adds"
    assert lines > stated_lines() - SLACK, f"lower the number in CONTRIBUTING.md to {lines:,}"


def test_no_function_is_too_long() -> None:
    assert longer(sources(), LONGEST) == []


def test_models_of_a_module_have_short_functions() -> None:
    assert len(model_modules()) >= 10
    assert longer(model_modules(), LONGEST_IN_MODELS) == []


@pytest.mark.parametrize("lines", [LONGEST, LONGEST + 1])
def test_control_a_function_that_is_too_long_is_named(lines: int, tmp_path: Path) -> None:
    path = tmp_path / "x" / "long.py"
    path.parent.mkdir()
    path.write_text("def f():\n" + "    pass\n" * (lines - 1))
    found = longer([path], LONGEST)
    assert found == ([] if lines == LONGEST else [f"x/long.py:f has {lines} lines"])


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS


def test_lists_of_edits_name_files_that_exist() -> None:
    lists = PAGE.split("## How to add ...")[1]
    named = set(re.findall(r"`((?:moerl|tests|docs|configs|examples|tools)/[\w./-]+)`", lists))
    assert len(named) > 20
    placeholder = {name for name in named if "NAME" in name}
    assert [name for name in named - placeholder if not (ROOT / name).exists()] == []
