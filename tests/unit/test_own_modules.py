"""A user's module that cannot be imported is one sentence; a function may be named by its file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moerl.cli import app
from moerl.config import load_config
from moerl.config.checks import check
from moerl.config.functions import check_importable, import_object, source_of
from moerl.core.errors import ConfigError

REWARD = "def score(prompt, answer, response, extra):\n    return 1.0\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def own(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def sentence(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(load_config("quickstart-smoke", list(words)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "more"),
    [
        ("task.reward=", ()),
        ("task.environment=", ("task.max_turns=2",)),
        ("algorithm.objective=", ()),
    ],
)
@pytest.mark.parametrize("form", ["{}:score", "./{}.py:score"])
def test_a_syntax_error_has_file_and_line(
    setting: str, more: tuple[str, ...], form: str, folder: Path
) -> None:
    name = f"moerl_broken_{len(setting)}"
    path = own(folder, name, f"{REWARD}\ndef broken(:\n")
    said = sentence(setting + form.format(name), *more)
    assert f"{path} line 4 is not Python: invalid syntax" in said
    assert len(said) < 300
    own(folder, name, REWARD)
    check_importable(setting, form.format(name), [])


def test_the_command_prints_one_sentence(folder: Path) -> None:
    path = own(folder, "moerl_broken", "x = (")
    done = CliRunner().invoke(app, ["train", "quickstart-smoke", "task.reward=moerl_broken:score"])
    said = f"{done.output}{done.exception}"
    assert f"{path} line 1 is not Python: '(' was never closed" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys\nsys.exit(3)\n", "line 2 raised SystemExit: 3"),
        ("\n\nx = 1 / 0\n", "line 3 raised ZeroDivisionError: division by zero"),
        ("import moerl_not_here\n", "line 1 raised ModuleNotFoundError: No module named"),
        ("from sys import nothing\n", "line 1 raised ImportError: cannot import name 'nothing'"),
        ("def f(:\n", "line 1 is not Python: invalid syntax"),
    ],
)
def test_an_import_that_fails_has_file_and_line(text: str, says: str, folder: Path) -> None:
    name = f"moerl_failing_{abs(hash(says))}"
    path = own(folder, name, text)
    with pytest.raises(ConfigError) as caught:
        import_object("task.reward", f"{name}:score", ["exact_match"])
    assert f"{path} {says}" in str(caught.value)
    assert "exact_match" not in str(caught.value), "the name is right"


def test_a_name_that_is_absent_lists_what_is_allowed(folder: Path) -> None:
    own(folder, "moerl_there", REWARD)
    for path in ("moerl_there:other", "moerl_nowhere:score", "moerl_there.x:score"):
        with pytest.raises(ConfigError, match=r"use exact_match or package\.module:function"):
            import_object("task.reward", path, ["exact_match"])
    assert import_object("task.reward", "moerl_there:score", [])("", "", "", {}) == 1.0, "control"


def test_a_folder_without_init_in_a_package_is_no_module_and_has_modules(folder: Path) -> None:
    (folder / "moerl_outer").mkdir()
    own(folder, "moerl_outer/__init__", "")
    (folder / "moerl_outer/inner").mkdir()
    own(folder, "moerl_outer/inner/words", REWARD)
    check_importable("task.reward", "moerl_outer.inner.words:score", [])
    with pytest.raises(ConfigError, match=r"defines no other"):
        check_importable("task.reward", "moerl_outer.inner.words:other", [])
    with pytest.raises(ConfigError, match=r"have no module moerl_outer\.inner\.absent"):
        check_importable("task.reward", "moerl_outer.inner.absent:score", [])


@pytest.mark.parametrize(
    "form", ["./below/{}.py:score", "below/{}.py:score", "{folder}/below/{}.py:score"]
)
@pytest.mark.parametrize("kind", ["", "verl:"])
def test_a_function_of_a_file(form: str, kind: str, folder: Path) -> None:
    name = f"moerl_file_{len(form)}_{len(kind)}"
    given = REWARD.replace("prompt, answer, response, extra", "**fields") if kind else REWARD
    path = own(folder, f"below/{name}", given)
    named = form.format(name, folder=folder)
    words = ["task.name=jsonl", f"task.path={own(folder, 'x', '{}')}", f"task.reward={kind}{named}"]
    check(load_config("quickstart-smoke", words), starts=False)
    assert import_object("task.reward", named, []).__code__.co_filename == str(path)
    assert source_of(named) == path
    assert f"{path} defines no other" in sentence(*words[:2], f"task.reward={named[:-5]}other")
    said = sentence(*words[:2], "task.reward=./below/moerl_none.py:score")
    assert f"{folder / 'below'} have no module moerl_none" in said


def test_a_file_with_the_name_of_another_module_is_told_apart(folder: Path) -> None:
    own(folder, "json", REWARD)
    assert "json/__init__.py defines no score" in sentence("task.reward=./json.py:score")
