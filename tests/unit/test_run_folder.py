"""The folder that is given is the run: its name, root and recorded paths follow it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from moerl.config import load_config, save_config
from moerl.config.load import load_resumed, load_saved
from moerl.config.resume import AT_RESUME, SAME, check_identity, identity
from moerl.config.schema import Config
from moerl.core.errors import ConfigError, MoerlError
from moerl.launch.nodes.control_api import ControlApi, request
from moerl.runtime import run_lock
from moerl.runtime.run_dir import RunDir, find_run
from moerl.runtime.run_lock import held, holder_of


def _saved(root: str, name: str, *settings: str) -> Path:
    """The config.yaml of a run with its own model."""
    folder = Path(root) / name
    folder.mkdir(parents=True)
    model = f"model.path={root}/{name}/model"
    own = [f"run.root={root}", f"run.name={name}", model, *settings]
    save_config(load_config("quickstart-smoke", own), folder / "config.yaml")
    return folder / "config.yaml"


@pytest.mark.parametrize("root", ["runs", "./runs", "ABSOLUTE"])
@pytest.mark.parametrize("how", ["copied", "moved"])
def test_recorded_paths_follow_the_folder(
    root: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = root.replace("ABSOLUTE", str(tmp_path / "runs"))
    program = f"task.agent.command=[python,{root}/a/agent.py,--out,{root}/ab/x]"
    old = _saved(root, "a", program, f"algorithm.reference={tmp_path}/runs/a/start").parent
    before = (old / "config.yaml").read_bytes()
    new = Path("elsewhere/b")
    new.parent.mkdir()
    (shutil.copytree if how == "copied" else shutil.move)(old, new)
    for place, work in ((new, tmp_path), (tmp_path / new, Path("/"))):
        monkeypatch.chdir(work)
        config = load_resumed(place / "config.yaml")
        assert (config.run.root, config.run.name) == (str(place.parent), "b")
        assert config.model.path == str(place / "model")
        assert config.algorithm.reference == str(place / "start"), "it was given as another text"
        command = ["python", f"{place}/agent.py", "--out", f"{root}/ab/x"]
        assert config.task.agent.command == command, "control: runs/ab is not in runs/a"
        assert load_saved(place / "config.yaml") == config
    monkeypatch.chdir(tmp_path)
    if how == "copied":
        assert (old / "config.yaml").read_bytes() == before
        assert Path(load_saved(old / "config.yaml").run.root) == Path(root), "it is in place"


def test_a_run_is_found_from_inside_and_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(str(tmp_path / "runs"), "a")
    (tmp_path / "runs" / "a").rename(tmp_path / "b")
    monkeypatch.chdir(tmp_path / "b")
    assert load_saved(find_run(".", "RUN") / "config.yaml").run.name == "b"
    (tmp_path / "newest").symlink_to("b")
    assert load_saved(find_run("../newest", "RUN") / "config.yaml").model.path.endswith("/model")


def test_identity_is_that_of_a_moved_run(tmp_path: Path) -> None:
    path = _saved(str(tmp_path / "runs"), "a", f"algorithm.reference={tmp_path}/runs/a/model")
    facts = identity(load_saved(path))
    path.parent.rename(tmp_path / "b")
    check_identity(moved := load_saved(tmp_path / "b" / "config.yaml"), facts)
    other = replace(moved, algorithm=replace(moved.algorithm, reference="/another"))
    with pytest.raises(ConfigError, match=r"algorithm\.reference"):
        check_identity(other, facts)


def test_another_model_is_another_identity(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    shutil.copytree(tmp_path / "one", tmp_path / "same")
    config = load_config("quickstart-smoke", [f"model.path={tmp_path}/one"])
    facts = identity(config)

    def check(name: str) -> None:
        path = str(tmp_path / name)
        check_identity(replace(config, model=replace(config.model, path=path)), facts)

    check("same")
    with pytest.raises(ConfigError, match=r"model\.path = .*two.*--allow-changed"):
        check("two")


# --- settings that a first start used up ----------------------------------------------------------
def _leaves(section: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for name in asdict(section):
        value = getattr(section, name)
        if is_dataclass(value):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _rule(leaf: str) -> str | None:
    """By the longest name in the table."""
    parts = leaf.split(".")
    names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((AT_RESUME[name] for name in names if name in AT_RESUME), None)


_LEAVES = dict(_leaves(Config()))
_USED_UP = [leaf for leaf in _LEAVES if _rule(leaf) not in ("", SAME, None)]


def test_every_setting_has_a_rule_for_a_resume() -> None:
    assert [leaf for leaf in _LEAVES if _rule(leaf) is None] == []
    assert len(_USED_UP) >= 14
    for name in AT_RESUME:
        attrgetter(name)(Config())  # control: no rule for a setting that is no more


def _another(value: Any) -> str:
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, int | float):
        return str(value + 1)
    return "[other]" if isinstance(value, list) else "bce" if value == "off" else "other"


@pytest.mark.parametrize("leaf", _USED_UP)
def test_a_setting_that_is_used_up_is_refused_by_name(leaf: str, tmp_path: Path) -> None:
    path = _saved(str(tmp_path), "a")
    own = attrgetter(leaf)(load_saved(path))
    with pytest.raises(ConfigError) as refusal:
        load_resumed(path, [f"{leaf}={_another(own)}"])
    assert str(refusal.value).startswith(f"{leaf} = ")
    assert "this run was begun with" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    same = json.dumps(own)
    load_resumed(path, [f"{leaf}={same}", "run.steps=9"])  # control: no change


def test_the_seed_of_a_tiny_model_is_used_up_before_the_first_checkpoint(tmp_path: Path) -> None:
    from moerl.config.resume import check_continues

    run = RunDir(tmp_path)
    config = load_config("quickstart-smoke", [])
    run.identity.write_text(json.dumps(identity(config)))
    options = {"reset_optimizer": False, "allow_changed": False}
    other = replace(config, run=replace(config.run, seed=5))
    with pytest.raises(ConfigError, match=r"run\.seed = 5"):
        check_continues(other, run, None, **options)
    check_continues(other, run, None, **options | {"allow_changed": True})
    task = replace(config, task=replace(config.task, digits=3))
    check_continues(task, run, None, **options)  # a failed start is mended


# --- who holds a run ------------------------------------------------------------------------------
def _hold(root: Path, states: list[str], ready: Any, go: Any) -> None:
    with held(root, lambda _: None) as note:
        for state in states:
            note(state)  # type: ignore[arg-type]
        ready.set()
        go.wait(60)


@contextlib.contextmanager
def _holder(root: Path, *states: str) -> Iterator[tuple[int, Any]]:
    """Another process that holds the run until its event is set."""
    context = multiprocessing.get_context("spawn")
    ready, go = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(root, list(states), ready, go))
    process.start()
    try:
        assert ready.wait(120)
        assert process.pid is not None
        yield process.pid, go
    finally:
        go.set()
        process.join()


def test_a_held_run_is_refused_with_state_and_process(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    with _holder(run.root) as (pid, _):
        began = time.monotonic()
        with pytest.raises(ConfigError, match=rf"starting \(process {pid}\).*config\.yaml"):
            find_run(str(run.root), "--resume")
        with pytest.raises(MoerlError, match=rf"not being trained now.*starting \(process {pid}\)"):
            request(run, 60.0, do="list")
        with (
            pytest.raises(MoerlError, match=rf"is in use: it is starting \(process {pid}\)"),
            held(run.root, lambda _: None),
        ):
            raise AssertionError("two processes hold a run")
        assert time.monotonic() - began < 20, "at once"
        copy = tmp_path / "copy"
        shutil.copytree(run.root, copy)
        assert "starting" in (copy / ".lock").read_text(), "control: the holder's words came along"
        assert holder_of(copy) is None
        with held(copy, lambda _: None):
            assert str(holder_of(copy)) == f"starting (process {os.getpid()})"
    with pytest.raises(ConfigError, match="no config"):
        find_run(str(run.root), "--resume")


def test_a_start_that_ends_is_waited_for(tmp_path: Path) -> None:
    said: list[str] = []
    with _holder(tmp_path, "training", "ending") as (pid, go):

        def say(text: str) -> None:
            said.append(text)
            go.set()

        with held(tmp_path, say):
            assert said == [f"{tmp_path} is ending (process {pid}): waiting for its end"]


def test_a_start_that_never_ends_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_ENDING_S", 0.5)
    with (
        _holder(tmp_path, "ending") as (pid, _),
        pytest.raises(MoerlError, match=rf"in use: it is ending \(process {pid}\)"),
        held(tmp_path, lambda _: None),
    ):
        raise AssertionError("two processes hold a run")


def test_a_question_to_a_run_that_dies_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, began = RunDir(tmp_path), time.monotonic()
    with _holder(run.root, "training") as (_, go):
        ControlApi(run)
        monkeypatch.setattr("moerl.launch.nodes.control_api._POLL_S", 0.2)
        go.set()
        with pytest.raises(MoerlError, match=r"is not being trained now$"):
            request(run, 600.0, do="list")
    assert time.monotonic() - began < 100
    assert list(run.control_api.iterdir()) == []
