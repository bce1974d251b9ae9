"""The clock of a trainer gang: what is shown, what is ended, and what starts it anew."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moerl.launch.supervision import trainer_ranks
from moerl.launch.supervision.trainer_ranks import TrainerRanks


@pytest.fixture
def gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerRanks]:
    """A process that does nothing, and a clock that only the test moves."""
    now = SimpleNamespace(value=0.0)
    clock = SimpleNamespace(monotonic=lambda: now.value, time=time.time)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(trainer_ranks, "time", clock)
    monkeypatch.setattr(trainer_ranks, "trainer_command", lambda plan, endpoint: command)
    monkeypatch.setattr(trainer_ranks, "trainer_environment", lambda plan: {})
    made: Any = TrainerRanks(tmp_path, limit_s=10.0)
    made.now = now
    made.start(None, "")
    yield made
    if made._process is not None:
        made._process.kill()
        made._process.wait()
    made.close()


def ended(gang: Any) -> int:
    return gang._process.wait(10)


def test_a_late_gang_is_shown_once_and_then_ended(gang: Any) -> None:
    gang.now.value = 9.0
    assert gang.lateness() == ""
    gang.now.value = 11.0
    assert gang.lateness() == "no step for 11 s, trainer.step_timeout_s = 10"
    assert gang.lateness() == ""
    assert gang.exit_status() is None
    gang.now.value = 21.0
    assert gang.lateness() == ""
    code = ended(gang)
    assert "signal 9: it made no step for 21 s" in str(gang.bury(code))
    assert (gang.pid, gang.exit_status(), gang.lateness()) == (None, None, "")


@pytest.mark.parametrize("sign", ["hello", "failure", "step"])
def test_signs_of_life_give_it_as_long_again(gang: Any, sign: str) -> None:
    """On a cluster the ranks start again by themselves: that takes time too."""
    gang.now.value = 19.0
    assert gang.lateness()
    if sign == "hello":
        assert gang.says_hello(1)
        assert not gang.says_hello(1), "the same gang"
    elif sign == "failure":
        assert gang.fell()
        assert not gang.fell(), "another rank of the same gang"
        assert gang.says_hello(1)
        assert gang.fell()
    else:
        gang.restart_clock()
    gang.now.value = 28.0
    assert gang.lateness() == ""
    gang.now.value = 30.0
    assert "no step for 11 s" in gang.lateness()
    assert gang.exit_status() is None, "control: without the sign it was ended at 20 s"
