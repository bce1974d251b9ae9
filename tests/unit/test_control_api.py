"""What people leave on the control API of a run never ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from moerl.launch.nodes.control_api import ControlApi
from moerl.launch.supervision import membership
from moerl.run_dir import RunDir


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
    run: RunDir, monkeypatch: pytest.MonkeyPatch, question: dict[str, Any]
) -> None:
    monkeypatch.setattr(membership, "place_engine", MagicMock())
    plan: Any = MagicMock(run=run)
    plan.config.engine.sizes, plan.config.engine.tp = {0: 1}, 1
    watcher: Any = MagicMock()
    watcher.is_down.return_value = False
    members = membership.Membership(plan, watcher)
    members._control_api = MagicMock()
    members._control_api.poll.return_value = [("x", question)]
    members.poll()
    ((name, answer),) = [call.args for call in members._control_api.answer.call_args_list]
    assert name == "x"
    assert set(answer) == {"refused"}
    assert members.sizes == {0: 1}
