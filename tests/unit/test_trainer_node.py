"""A trainer node runs torchrun as long as the board asks for this gang."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from moerl.launch.trainer_node import _torchrun
from moerl.rundir import RunDir


def posted(root: Path) -> tuple[RunDir, str]:
    run = RunDir(root / "run")
    run.create()
    run.board.open("tcp://127.0.0.1:1", "token")
    return run, run.board.start()


def ended(run: RunDir, start: str, *command: str) -> int | None:
    with (run.logs / "torchrun-0.log").open("ab") as log:
        return _torchrun(list(command), dict(os.environ), log, run, start)


def test_a_new_opening_of_the_board_ends_the_gang(tmp_path: Path) -> None:
    """The supervisor gave it up, but its ranks live: they would train beside the next gang."""
    run, start = posted(tmp_path)
    again = threading.Timer(0.2, run.board.open, ("tcp://127.0.0.1:1", "token"))
    again.start()
    assert ended(run, start, "sleep", "60") is None
    assert run.board.start() not in ("", start)


def test_a_closed_board_leaves_the_gang_alone(tmp_path: Path) -> None:
    """Nobody is posted while the controller's side starts again, or the run is over."""
    run, start = posted(tmp_path)
    run.board.close()
    assert ended(run, start, "sh", "-c", "sleep 0.7; exit 3") == 3


def test_marks_of_another_opening_count_for_nothing(tmp_path: Path) -> None:
    run, start = posted(tmp_path)
    run.board.done(start)
    assert run.board.is_done()
    run.board.open("tcp://127.0.0.1:1", "token")
    run.board.done(start)
    assert not run.board.is_done()
