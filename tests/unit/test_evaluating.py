"""Data sets whose scorers evaluate answers: the list is that of the installed package.

The scan reads the package: which calls does a data set's `score_answer` reach, through functions
and methods of its module and of modules of the package that it imports?
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from moerl.config.checks import check
from moerl.config.schema import Config, TaskConfig
from moerl.config.task_tables import EVALUATING
from moerl.core.errors import ConfigError

# Calls that may run text as code, or pass it to something that does.
RUNS_TEXT = {
    *("eval", "exec", "compile", "parse_expr", "parse_latex", "sympify", "S", "lambdify"),
    *(
        "simplify",
        "Integer",
        "__import__",
        "import_module",
        "run_path",
        "run_module",
        "unsafe_load",
    ),
    *("system", "popen", "Popen", "check_output", "check_call", "getoutput"),
}
# Read and judged: they evaluate text of the data set, never the answer.
OWN_TEXT = {
    "bitwise_arithmetic": "eval(problem), the data set's own expression",
    "number_sorting": 'eval(entry["answer"])',
    "propositional_logic": "its own parse_expr, a parser of formulas",
}


@cache
def calls(file: Path) -> dict[str, set[str]]:
    """What the functions and methods of a file call, by their names."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, set()).update(called(node))
    return found


def called(node: ast.AST) -> Iterator[str]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            function = call.func
            yield str(getattr(function, "attr", None) or getattr(function, "id", ""))


@cache
def imported_files(file: Path, root: Path) -> list[Path]:
    """The files of the package that a file imports."""
    files = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = file.parents[node.level - 1] if node.level else root.parent
        target = base.joinpath(*(node.module or "").split("."))
        names = [target / alias.name for alias in node.names]
        for path in (target, *names):
            files += [p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()]
    return [path for path in files if root in path.parents and path.name != "factory.py"]


def running_calls(file: Path, root: Path) -> set[str]:
    """The calls in RUNS_TEXT that `score_answer` of a file's data set reaches."""
    todo, seen, found = [(file, "score_answer")], set(), set()
    while todo:
        here = todo.pop()
        if here in seen:
            continue
        seen.add(here)
        source, name = here
        for call in calls(source).get(name, ()):
            found |= {call} & RUNS_TEXT
            todo += [(other, call) for other in (source, *imported_files(source, root))]
    return found


def data_sets(root: Path) -> dict[str, Path]:
    """The file of each registered data set, by its name."""
    found = {}
    for file in root.rglob("*.py"):
        if "register_dataset(" not in (source := file.read_text()):
            continue
        tree = ast.parse(source)
        texts = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "register_dataset":
                name = node.args[0]
                found[texts[name.id] if isinstance(name, ast.Name) else name.value] = file
    return found


def test_the_list_is_that_of_the_installed_package() -> None:
    spec = find_spec("reasoning_gym")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    sets = data_sets(root)
    assert len(sets) > 90
    running = {name for name, file in sets.items() if running_calls(file, root)}
    assert OWN_TEXT.keys() <= running, "a reason that is not needed any more"
    assert running - OWN_TEXT.keys() == EVALUATING - {"composite"}  # it asks the scorers of others


def test_the_scan_follows_methods_functions_and_imports(tmp_path: Path) -> None:
    root = tmp_path / "gym"
    (root / "games").mkdir(parents=True)
    (root / "read.py").write_text("def number(text):\n    return sympify(text)\n")
    (root / "games" / "new.py").write_text(
        'DATASET_NAME = "new"\n'
        "from ..read import number\n"
        "class New:\n"
        "    def score_answer(self, answer, entry):\n        return self._of(answer)\n"
        "    def _of(self, answer):\n        return number(answer)\n"
        "register_dataset(DATASET_NAME, New)\n"
    )
    ((name, file),) = data_sets(root).items()
    assert (name, running_calls(file, root)) == ("new", {"sympify"})


@pytest.mark.parametrize("dataset", sorted(EVALUATING))
def test_a_run_of_such_a_data_set_is_refused_without_bwrap(dataset: str) -> None:
    task = TaskConfig(name="reasoning_gym", dataset=dataset)
    with pytest.raises(ConfigError, match=rf"{dataset} runs the policy's answer as Python"):
        check(Config(task=task))
    check(Config(task=TaskConfig(name="reasoning_gym", dataset=dataset, isolation="bwrap")))
    check(Config(task=TaskConfig(name="reasoning_gym", dataset="chain_sum")))
