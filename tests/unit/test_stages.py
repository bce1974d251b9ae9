"""The stages of tools/test: each test file in one of them, and when a result is still valid."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.conftest import group_of
from tools import stages
from tools.stages import DEFAULT, FULL_MARKS, STAGES, Result, Stage

ROOT = Path(__file__).resolve().parents[2]
FULL = [stage for stage in STAGES if stage.marks == FULL_MARKS]


def files_of(stage: Stage) -> set[str]:
    return {
        str(file.relative_to(ROOT))
        for path in stage.paths()
        for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("test_*.py"))
    }


# --- the table -----------------------------------------------------------------------------------
def test_every_file_is_in_the_default_selection_and_in_one_full_stage() -> None:
    all_files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    elsewhere = {file for file in all_files if re.match("tests/(gpu|references|helpers)/", file)}
    assert len(all_files) > 200
    assert files_of(DEFAULT) == all_files - elsewhere
    count = Counter(file for stage in FULL for file in files_of(stage))
    assert max(count.values()) == 1
    for file in all_files - elsewhere - set(count):
        assert re.search(r"^pytestmark.*mark\.(clients|smollm2)", (ROOT / file).read_text(), re.M)


def test_estimates_keep_the_promise() -> None:
    assert max(stage.minutes for stage in FULL) <= 30
    assert sum(stage.minutes for stage in FULL) <= 180
    assert len(FULL) <= 10


def test_workflows_name_stages_that_exist() -> None:
    full = yaml.safe_load((ROOT / ".github/workflows/full.yml").read_text())
    (step,) = (one for one in full["jobs"]["stages"]["steps"] if one.get("id") == "names")
    assert "from tools.stages import STAGES" in step["run"]
    text = "".join(path.read_text() for path in (ROOT / ".github/workflows").iterdir())
    assert set(re.findall(r"tools/test --stage (\w+)", text)) == {"checks"}


# --- what a stage depends on ---------------------------------------------------------------------
@cache
def imports_of(path: Path) -> frozenset[Path]:
    """Files that a file of moerl imports at its top; a test also in functions and by strings."""
    names: set[str] = set()
    for node in nodes_of(
        ast.parse(path.read_text(encoding="utf-8")), whole="tests" in path.relative_to(ROOT).parts
    ):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"^(?:moerl|tests)(?:\.\w+)+$", node.value))
    found = {ROOT / name.replace(".", "/") for name in names if re.match(r"(moerl|tests)\b", name)}
    files = {file for path in found for file in (path.with_suffix(".py"), path / "__init__.py")}
    return frozenset(file for file in files if file.exists())


def nodes_of(node: ast.AST, *, whole: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if whole or not (in_function or for_types):
            yield child
            yield from nodes_of(child, whole=whole)


def closure(files: set[Path]) -> set[Path]:
    seen: set[Path] = set()
    while files:
        seen |= files
        files = {found for file in files for found in imports_of(file)} - seen
    return seen


def covers(stage: Stage, path: Path) -> bool:
    file = str(path.relative_to(ROOT))
    words = [*stage.reads.split(), *stages._SHARED.split(), *stage.paths()]
    return "." in words or any(fnmatch(file, word) or fnmatch(file, f"{word}/*") for word in words)


@pytest.mark.parametrize("stage", [s for s in FULL if s.reads != "."], ids=lambda stage: stage.name)
def test_a_stage_names_all_that_its_tests_import(stage: Stage) -> None:
    needed = closure({ROOT / file for file in files_of(stage)})
    needed = {path for path in needed if not path.name.startswith("test_")}
    assert not sorted(path.relative_to(ROOT) for path in needed if not covers(stage, path))


# --- results -------------------------------------------------------------------------------------
@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A stage in a repository of its own, which reads one folder beside its tests."""
    for name in ("tests/a/test_a.py", "tests/b/test_b.py", "moerl/x/y.py", "moerl/z/y.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("def test_it(): pass\n")
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.setattr(stages, "KEPT", tmp_path / "build/test-stages")
    stages.call(["git", "init", "-q"])
    (tmp_path / ".gitignore").write_text("build/\n__pycache__/\n")
    return Stage("one", 1, "a", "moerl/x", workers=1)


def answer(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.setattr(stages, "run_tests", lambda _, files: Result(files, state))


def test_a_result_is_valid_until_a_file_that_the_stage_reads_changes(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stages.kept(stage) is None
    answer(monkeypatch, "passed")
    result = stages.run(stage)
    assert stages.kept(stage) == result
    for other in ("moerl/z/y.py", "tests/b/test_b.py", "README.md"):
        (tmp_path / other).write_text("changed\n")
        assert stages.kept(stage) == result, other
    for own in ("moerl/x/y.py", "tests/a/test_a.py", "moerl/x/new.py", "pyproject.toml"):
        stages.run(stage)
        (tmp_path / own).write_text(f"# {own}\n")
        assert stages.kept(stage) is None, own
    stages.run(stage)
    (tmp_path / "moerl/x/new.py").unlink()
    assert stages.kept(stage) is None


def test_files_that_change_while_it_runs_make_a_result_worthless(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changes(_: Stage, files: str) -> Result:
        (tmp_path / "moerl/x/y.py").write_text("changed\n")
        return Result(files, "passed")

    monkeypatch.setattr(stages, "run_tests", changes)
    assert stages.run(stage).state == "failed"


def test_full_runs_what_is_missing_or_not_green(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, optional = replace(stage, name="two"), replace(stage, name="three", marks="gpu")
    monkeypatch.setattr(stages, "STAGES", (stage, other, optional))
    states = {"one": "passed", "two": "failed", "three": "unavailable"}
    runs: list[str] = []

    def run_tests(asked: Stage, files: str) -> Result:
        runs.append(asked.name)
        return Result(files, states[asked.name])

    monkeypatch.setattr(stages, "run_tests", run_tests)
    assert stages.run_full() == 1
    assert runs == ["one", "two", "three"], "a failed stage does not end the rest"
    states["two"] = "passed"
    assert stages.run_full() == 0, "an optional stage may be unavailable"
    assert runs[3:] == ["two", "three"]


@pytest.mark.parametrize(
    ("body", "state"),
    [("pass", "passed"), ("assert 0", "failed"), ("import pytest; pytest.skip('x')", "failed")],
)
def test_a_stage_is_green_when_tests_passed_and_none_failed(
    body: str, state: str, stage: Stage, tmp_path: Path
) -> None:
    (tmp_path / "tests/a/test_a.py").write_text(f"def test_it():\n    {body}\n")
    result = stages.run(replace(stage, marks="not full"))
    assert (result.state, result.passed) == (state, int(state == "passed"))


# --- workers -------------------------------------------------------------------------------------
def test_files_that_share_a_server_or_a_run_share_a_worker() -> None:
    files = [f"tests/e2e/test_{name}.py" for name in ("modes", "agent_gateway", "model_families")]
    assert {group_of(file) for file in files} == {"engines"}
    assert group_of("tests/security/test_listeners.py") == "short_run"
    assert group_of(own := "tests/e2e/test_sleeping_engine.py") == own
