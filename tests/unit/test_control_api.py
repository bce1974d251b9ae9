"""What people leave on the control API of a run never ends the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moerl.launch.nodes.control_api import ControlApi
from moerl.runtime.run_dir import RunDir
from tests.helpers.scripted_actors import Scene


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def test_a_question_that_is_taken_back_or_unreadable_is_none(run: RunDir) -> None:
    control_api = ControlApi(run)
    (run.control_api / "gone.question").symlink_to(
        run.control_api / "taken-back"
    )  # as between list and look
    (run.control_api / "torn.question").write_text('{"do": "add')
    (run.control_api / "odd.question").write_text("[1]")
    (run.control_api / "good.question").write_text('{"do": "list"}')
    asked = dict(control_api.poll())
    assert asked == {"torn": {}, "odd": {}, "good": {"do": "list"}}
    assert list(run.control_api.glob("*.question")) == [], "nothing is asked twice"


@pytest.mark.parametrize(
    "question",
    [{}, {"do": "dance"}, {"do": "remove"}, {"do": "add", "tp": "two"}, {"do": "add", "tp": -1}],
)
def test_a_question_that_makes_no_sense_is_refused(
    tmp_path: Path, question: dict[str, Any]
) -> None:
    scene = Scene(tmp_path)
    members, folder = scene.supervisor.engines.members, scene.run.control_api
    (folder / "x.question").write_text(json.dumps(question))
    members.poll()
    assert set(json.loads((folder / "x.answer").read_text())) == {"refused"}
    assert members.sizes == {0: 1}
