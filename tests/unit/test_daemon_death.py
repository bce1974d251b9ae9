"""After the death of a daemon of Ray the command asks for one resume, and for no other cause."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moerl import cli
from moerl.config.load import load_config
from moerl.core.errors import DaemonError, EngineError
from moerl.launch import train
from moerl.launch.supervision import supervisor
from moerl.runtime import process_tree
from moerl.runtime.process_tree import RESUME_FILE
from moerl.runtime.run_dir import RunDir

DIED = DaemonError("Ray's raylet (process 7) died")


def ended(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    *,
    may_ask: bool = True,
    reset: bool = False,
    checkpoint: bool = False,
) -> dict[str, Any] | None:
    """The request of a start that this error ended; None: it asked for nothing."""
    run, scratch = RunDir(root / "runs/x"), root / "scratch"
    scratch.mkdir(parents=True)

    class Ended:
        def __init__(self, context: Any, *_: Any, **__: Any) -> None:
            self.run_context = context

        def run(self) -> None:
            if reset:
                object.__setattr__(self.run_context, "reset_optimizer", True)
            if checkpoint:
                folder = run.checkpoint(2)
                folder.mkdir()
                (folder / "manifest.json").write_text('{"files": {"metadata.json": [2, ""]}}')
                (folder / "metadata.json").write_text("{}")
            raise error

    monkeypatch.setattr(supervisor, "Supervisor", Ended)
    settings = [f"run.root={root}/runs", "run.name=x", f"cluster.blob_dir={root}/b"]
    config = load_config("quickstart-smoke", settings)
    assert train.train(config, resume=False, scratch=scratch, may_ask=may_ask) == 1
    asked = scratch / RESUME_FILE
    return json.loads(asked.read_text()) if asked.exists() else None


def test_a_death_of_a_daemon_asks_for_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ended(tmp_path / "early", monkeypatch, DIED)
    assert asked is not None
    assert asked["resume"] == str(tmp_path / "early/runs/x")
    assert (asked["from_start"], asked["reset_optimizer"]) == (True, False)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "raylet (process 7) died - all processes were ended, and the run is resumed" in said
    later = ended(tmp_path / "later", monkeypatch, DIED, checkpoint=True)
    assert later is not None
    assert not later["from_start"], "the checkpoint has the steps"
    again = ended(tmp_path / "reset", monkeypatch, DIED, reset=True)
    assert again is not None
    assert again["reset_optimizer"], "no checkpoint has the fresh state"


@pytest.mark.parametrize(
    ("error", "may_ask"), [(EngineError("its server died"), True), (DIED, False)]
)
def test_control_another_cause_or_a_second_death_ends_the_run(
    error: Exception,
    may_ask: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert ended(tmp_path, monkeypatch, error, may_ask=may_ask) is None
    said = capfd.readouterr().err
    assert str(error) in said
    assert "is resumed" not in said


def test_the_front_starts_the_root_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[dict[str, Any]] = []

    def guarded(command: Sequence[str], again: Callable[[], Sequence[str]]) -> int:
        while command:
            assert command[:3] == [sys.executable, "-m", "moerl.launch.train"]
            given = json.loads(command[3])
            commands.append(given)
            if not given.get("is_again"):
                asked = {"resume": "runs/x", "is_again": True}
                (Path(given["scratch"]) / RESUME_FILE).write_text(json.dumps(asked))
            command = again()
        return 1

    monkeypatch.setattr(process_tree, "run_guarded", guarded)
    assert cli._guarded({"resume": "", "recipe": "q"}) == 1
    assert [given["resume"] for given in commands] == ["", "runs/x"]
    folders = [Path(given["scratch"]) for given in commands]
    assert folders[0] != folders[1]
    assert not any(folder.exists() for folder in folders)
