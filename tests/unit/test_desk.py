"""What people leave on the desk of a run never ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from moerl.launch.nodes.desk import Desk
from moerl.launch.supervision import membership
from moerl.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def test_a_question_that_is_taken_back_or_unreadable_is_none(run: RunDir) -> None:
    desk = Desk(run)
    (run.desk / "gone.question").symlink_to(run.desk / "taken-back")  # as between list and look
    (run.desk / "torn.question").write_text('{"do": "add')
    (run.desk / "odd.question").write_text("[1]")
    (run.desk / "good.question").write_text('{"do": "list"}')
    asked = dict(desk.take())
    assert asked == {"torn": {}, "odd": {}, "good": {"do": "list"}}
    assert list(run.desk.glob("*.question")) == [], "nothing is asked twice"


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
    members._desk = MagicMock()
    members._desk.take.return_value = [("x", question)]
    members.look()
    ((name, answer),) = [call.args for call in members._desk.answer.call_args_list]
    assert name == "x"
    assert set(answer) == {"refused"}
    assert members.sizes == {0: 1}
