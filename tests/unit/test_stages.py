"""The stages of tools/test: each test in one of them, results by tree, what is run again."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.conftest import one_stage_each
from tools import stages
from tools.stage_table import AREAS, EXPRESSIONS, STAGES, Stage, area_of, kind_of, reads, stages_of
from tools.stages import Result, Results

ROOT = Path(__file__).resolve().parents[2]
MARKS = ("full", "gpu", "gpu_profile", "mooncake", "smollm2", "clients")


# --- the table -----------------------------------------------------------------------------------
@pytest.mark.full
def test_every_test_belongs_to_one_stage(tmp_path: Path) -> None:
    """Each test run checks the tests that it collects (tests/conftest.py); here are all of them.

    tests/references is collected in its own environment only: its files stand for its tests.
    """
    out = tmp_path / "marks.json"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q",
         "-p", "tests.helpers.collected_marks", "-p", "no:cacheprovider"],
        cwd=ROOT, env=os.environ | {"MARKS_FILE": str(out)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    tests = [(file, marks) for file, marks in json.loads(out.read_text())]
    tests += [
        (f"tests/references/{p.name}", []) for p in (ROOT / "tests/references").glob("test_*")
    ]
    wrong = {(file, *marks): stages_of(file, marks) for file, marks in tests}
    assert not {test: names for test, names in wrong.items() if len(names) != 1}
    count = Counter(stages_of(file, marks)[0] for file, marks in tests)
    assert set(count) == {stage.name for stage in STAGES if stage.kind != "none"}, "none is empty"
    assert count["unit"] > 1000


def test_every_file_belongs_to_a_stage() -> None:
    files = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(files) > 100
    for file in map(str, files):
        assert any(stages_of(file, marks) for marks in ([], ["gpu"])), file


def test_what_github_runs_and_names_is_there(tmp_path: Path) -> None:
    """Stages, files and folders in the workflows and the forms of issues."""
    files = sorted((ROOT / ".github").rglob("*.yml"))
    text = "\n".join(file.read_text() for file in files)
    stage_names = {stage.name for stage in STAGES}
    asked = set(re.findall(r"tools/test --stage ([\w-]+)", text))
    assert {"checks"} <= asked <= stage_names
    named = set(re.findall(r"\b(?:tools|docs|requirements)/[\w./*-]*[\w*]|\b[A-Z]+\.md", text))
    assert {"tools/test", "SECURITY.md", "CONTRIBUTING.md"} <= named
    assert not {name for name in named if not list(ROOT.glob(name))}
    full = yaml.safe_load((ROOT / ".github/workflows/full.yml").read_text())
    (step,) = (one for one in full["jobs"]["stages"]["steps"] if one.get("id") == "names")
    output = tmp_path / "output"
    command = ["bash", "-euc", step["run"]]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"GITHUB_OUTPUT": str(output)}, check=True)
    key, _, value = output.read_text().strip().partition("=")
    assert (key, set(json.loads(value))) == ("names", stage_names)


def test_a_test_outside_the_table_is_found(tmp_path: Path) -> None:
    """Negative control, at every collection."""
    assert stages_of("tests/multi/test_new.py", ["full"]) == []
    assert stages_of("tests/multi/test_new.py", []) == ["processes"]
    assert stages_of("tests/unit_of_another/test_new.py", []) == []
    new = SimpleNamespace(path=ROOT / "tests/multi/test_new.py", nodeid="test_new.py::test_it")
    new.iter_markers = lambda: [pytest.mark.full.mark]
    with pytest.raises(pytest.UsageError, match=r"test_new.py::test_it belongs to no stage"):
        one_stage_each([new])
    new.iter_markers = list
    one_stage_each([new])


@pytest.mark.parametrize("given", itertools.product([False, True], repeat=len(MARKS)), ids=str)
def test_expressions_select_each_test_once(given: tuple[bool, ...]) -> None:
    """pytest's -m takes these words with Python's meaning."""
    marks = dict(zip(MARKS, given, strict=True))
    chosen = [kind for kind, text in EXPRESSIONS.items() if text and eval(text, {}, marks)]
    assert chosen == [kind_of(name for name, there in marks.items() if there)]


def test_paths_exist_and_stages_end_in_time() -> None:
    for stage in STAGES:
        assert stage.estimate_s <= 2400, stage.name
        assert [path for path in stage.paths if not (ROOT / path).exists()] == []


def test_a_file_has_one_area() -> None:
    assert area_of("tests/unit/test_packing.py") == "core"
    assert area_of("tests/security/test_tokens.py") == "safe"
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    for file in files:
        named = [area.name for area in AREAS if area_of(file) == area.name]
        assert len(named) == 1, file


# --- the tree ------------------------------------------------------------------------------------
def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_the_tree_is_that_of_all_files(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    first = stages.tree_hash(tmp_path)
    assert first == git(tmp_path, "rev-parse", "HEAD^{tree}")
    (tmp_path / "build").mkdir()
    (tmp_path / "build/log").write_text("ignored")
    assert stages.tree_hash(tmp_path) == first
    (tmp_path / "a").write_text("2")
    (tmp_path / "b").write_text("not known to git")
    changed = stages.tree_hash(tmp_path)
    assert changed != first
    assert git(tmp_path, "status", "--porcelain") == "M a\n?? b", "the index is left alone"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "second")
    assert stages.tree_hash(tmp_path) == changed == git(tmp_path, "rev-parse", "HEAD^{tree}")


# --- what is run again ---------------------------------------------------------------------------
class Runs:
    """Stands for run_stage: keeps what `says` answers, and which stages were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.says: Callable[[Stage], Result] = lambda stage: Result(stage.name, "t", "passed")

    def __call__(self, stage: Stage, results: Results, hang_s: float = 0.0) -> Result:
        self.asked.append(stage.name)
        return results.keep(self.says(stage))

    def take(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    monkeypatch.setattr(stages, "run_stage", made)
    return made


def answer(**states: str) -> Callable[[Stage], Result]:
    return lambda stage: Result(stage.name, "t", states.get(stage.name, "passed"), why="so")  # type: ignore[arg-type]


def test_full_runs_what_is_missing_or_not_green(runs: Runs, tmp_path: Path) -> None:
    results = Results("t", tmp_path)
    runs.says = answer(sync="failed", gpu="unavailable")
    assert stages.run_full(results) == 1
    assert runs.take() == [stage.name for stage in STAGES], "a failed stage does not end the rest"
    runs.says = answer(gpu="unavailable")
    assert stages.run_full(results) == 0, "an optional stage may be unavailable"
    assert runs.take() == ["sync", "gpu"]
    assert stages.run_full(Results("another", tmp_path)) == 0
    assert len(runs.take()) == len(STAGES), "another tree starts without results"


def test_a_required_stage_must_be_available(runs: Runs, tmp_path: Path) -> None:
    runs.says = answer(hosts="unavailable")
    assert stages.run_full(Results("t", tmp_path)) == 1
    runs.says = answer(gpu="failed")
    assert stages.run_full(Results("another", tmp_path)) == 1, (
        "an optional stage that ran must pass"
    )


def test_an_interrupted_full_goes_on(runs: Runs, tmp_path: Path) -> None:
    def interrupt(stage: Stage) -> Result:
        if stage.name == "trainer":
            raise KeyboardInterrupt
        return Result(stage.name, "t", "passed")

    runs.says = interrupt
    with pytest.raises(KeyboardInterrupt):
        stages.run_full(Results("t", tmp_path))
    before = runs.take()[:-1]
    runs.says = answer()
    assert stages.run_full(Results("t", tmp_path)) == 0
    after = runs.take()
    assert after[0] == "trainer"
    assert [*before, *after] == [stage.name for stage in STAGES]


def test_a_stage_keeps_its_result_when_no_file_that_it_reads_changed(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tree: str, *changed: str) -> list[str]:
        monkeypatch.setattr(stages, "changed_files", lambda one, other: list(changed))
        assert stages.run_full(Results(tree, tmp_path)) == 0
        return runs.take()

    everything = full("first")
    assert "hosts" not in full("second", "tests/e2e/test_sync.py", "docs/limits.md")
    assert "hosts" in full("third", "moerl/core/types.py"), "each stage runs the package"
    assert full("fourth") == everything, "two trees without a known difference"


@pytest.mark.parametrize(
    ("stage", "file", "answer"),
    [
        ("sync", "tests/e2e/test_sync.py", True),
        ("sync", "tests/e2e/test_modes.py", False),
        ("sync", "docs/limits.md", False),
        ("sync", "README.md", False),
        ("sync", "tests/helpers/listeners.py", True),
        ("sync", "tools/quickstart", True),
        ("hosts", "tests/e2e/test_chaos.py", True),
        ("unit", "docs/limits.md", True),
        ("safe", "tests/e2e/test_sync.py", True),
        ("checks", "tests/e2e/test_sync.py", True),
    ],
)
def test_what_a_stage_reads(stage: str, file: str, answer: bool) -> None:
    assert reads(next(each for each in STAGES if each.name == stage), file) == answer


def test_files_of_tests_that_others_import_are_known() -> None:
    """A test file that is imported is read by the stages of those that import it."""
    imported = set()
    for path in (ROOT / "tests").rglob("*.py"):
        imported |= set(re.findall(r"^from (tests\.\w+\.test_\w+) import", path.read_text(), re.M))
    sync = next(each for each in STAGES if each.name == "sync")
    files = {name.replace(".", "/") + ".py" for name in imported}
    assert files
    assert {file for file in files if not reads(sync, file)} == set()


def test_a_named_stage_runs_whatever_its_last_result(runs: Runs, tmp_path: Path) -> None:
    results = Results("t", tmp_path)
    assert stages.run_named("sync", results) == 0
    assert stages.run_named("sync", results) == 0
    assert runs.take() == ["sync", "sync"]


def test_the_default_selection_stops_at_the_first_failure(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.says = answer(unit="failed")
    assert stages.run_default(Results("t", tmp_path)) == 1
    assert runs.take() == ["checks", "unit"]
    runs.says = answer()
    assert stages.run_default(Results("t", tmp_path)) == 0
    assert runs.take() == ["checks", "unit", "processes"], "always anew"
    assert "allowance" in capsys.readouterr().out


def test_files_that_change_make_a_result_worthless(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stages, "_run", lambda *arguments: 0)
    for now, state in (("t", "passed"), ("changed", "failed")):
        monkeypatch.setattr(stages, "tree_hash", lambda now=now: now)
        assert stages.run_stage(STAGES[0], Results("t", tmp_path)).state == state


@pytest.mark.parametrize(("stamp", "there"), [("", False), ("incomplete", False), ("gpu 1a", True)])
def test_the_gpu_profile_is_used_where_it_was_made(
    stamp: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "GPU_PROFILE", tmp_path)
    if stamp:
        (tmp_path / ".moerl-stamp").write_text(stamp)
    (stage,) = (one for one in STAGES if one.kind == "gpu_profile")
    why = stages.unavailable(stage)
    assert (why == "") == there
    assert there or "tools/setup.sh --gpu build/gpu-profile" in why
    assert stage.optional


# --- what a stage's run says ---------------------------------------------------------------------
TESTS = """
import pytest
def test_passes(): pass
def test_fails(): assert 0
@pytest.mark.skip(reason="no such library")
def test_skipped(): pass
@pytest.fixture
def broken(): raise OSError
def test_error(broken): pass
"""


def test_a_report_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TESTS)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
    command += ["-o", "junit_family=xunit1", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    subprocess.run([*command, str(tmp_path)], capture_output=True, check=False)
    found = stages.read_junit(report, Result("unit", "t", "failed"))
    assert (found.passed, found.failed, found.skipped) == (1, 2, {"no such library": 1})
    assert list(found.files) == ["test_a.py"]
    assert "    1 skipped: no such library" in stages.table([found])


def test_a_stage_whose_tests_were_all_skipped_is_not_green(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for body, state in (("pass", "passed"), ("pytest.skip('no rights')", "failed")):
        file = tmp_path / "test_a.py"
        file.write_text(f"import pytest\ndef test_a():\n    {body}\n")
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
        monkeypatch.setattr(stages, "pytest_command", lambda _stage, words=words: words)
        assert stages._tests(STAGES[0], Results("t", tmp_path), 60.0).state == state


def test_a_result_is_read_back(tmp_path: Path) -> None:
    results = Results("t", tmp_path)
    assert results.of(STAGES[1]) is None
    kept = Result("unit", "t", "failed", 1.5, 3, 1, {"why": 2}, {"tests/unit/test_a.py": 1.0}, "x")
    results.keep(kept)
    assert results.of(STAGES[1]) == kept


def test_a_stage_that_hangs_is_interrupted() -> None:
    catches = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: raise SystemExit(3)"
    assert stages._run([sys.executable, "-c", catches], {}, 1.0) == 124
    assert stages._run([sys.executable, "-c", "raise SystemExit(3)"], {}, 60.0) == 3


def test_areas_share_the_seconds_of_a_stage() -> None:
    """40 s of tests that two processes ran in 20 s; what has no tests counts for core."""
    files = {"tests/unit/test_a.py": 30.0, "tests/security/test_b.py": 10.0}
    unit = Result("unit", "t", "passed", 20.0, files=files)
    checks = Result("checks", "t", "passed", 5.0)
    found = stages.area_seconds([unit, checks])
    assert (found["core"], found["safe"], sum(found.values())) == (20.0, 5.0, 25.0)
    assert not [line for line in stages.area_table([unit, checks]) if "over" in line]
    late = stages.area_table([replace(unit, seconds=4000.0)])
    assert "over its allowance by 2130 s" in late[1]


# --- the scripts ---------------------------------------------------------------------------------
def test_the_scripts_are_sound() -> None:
    scripts = [str(ROOT / "tools" / name) for name in ("test", "test_env.sh")]
    shellcheck = str(Path(sys.executable).with_name("shellcheck"))
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    responses = subprocess.run([scripts[0], "--help"], capture_output=True, text=True, check=True)
    assert "tools/test --full" in responses.stdout
