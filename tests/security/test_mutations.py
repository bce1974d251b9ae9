"""Every fault of tests/mutations/mutations.yaml is noticed by the tests that it names."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import yaml

from tests.helpers.patience import patience

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests/mutations/mutations.yaml"
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", "__pycache__", "build", "runs", "docs"
)


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    default: bool = False  # in the default selection, too


MUTATIONS = msgspec.convert(
    yaml.safe_load(LIST.read_text(encoding="utf-8")), list[Mutation], strict=True
)


def broken(mutation: Mutation, text: str) -> str:
    """The text of the file with the fault in it; it must be possible in one place only."""
    assert text.count(mutation.old) == 1, f"{mutation.file} has it {text.count(mutation.old)} times"
    changed = text.replace(mutation.old, mutation.new)
    if mutation.file.endswith(".py"):
        ast.parse(changed)
    return changed


def run_in(checkout: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(
        command,
        cwd=checkout,
        env=dict(os.environ) | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=patience(280),
        check=False,
    )


def test_every_mutation_fits_and_names_tests_that_exist() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 70
    for mutation in MUTATIONS:
        text = (ROOT / mutation.file).read_text(encoding="utf-8")
        assert broken(mutation, text) != text
        for test in mutation.tests:
            file, _, name = test.partition("::")
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
            functions = {node.name for node in tree.body if isinstance(node, kinds)}
            assert name in functions, test


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("mutated") / "checkout"
    return Path(shutil.copytree(ROOT, copy, ignore=LEFT_OUT))


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(mutation, id=mutation.name, marks=() if mutation.default else pytest.mark.full)
        for mutation in MUTATIONS
    ],
)
def test_a_mutation_is_noticed(mutation: Mutation, checkout: Path) -> None:
    path = checkout / mutation.file
    text = path.read_text(encoding="utf-8")
    path.write_text(broken(mutation, text), encoding="utf-8")
    try:
        done = run_in(checkout, mutation.tests)
    finally:
        path.write_text(text, encoding="utf-8")
    assert done.returncode == 1, f"it survives\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert " failed" in done.stdout
    assert "ImportError" not in done.stdout


@pytest.mark.full
def test_the_same_tests_pass_without_a_mutation(checkout: Path) -> None:
    """The control."""
    tests = sorted({test for mutation in MUTATIONS for test in mutation.tests})
    done = run_in(checkout, tests)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
