"""The clock of a trainer: what is shown, what is ended, and what starts it anew."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moerl.launch.supervision import trainer_supervisor
from moerl.launch.supervision.trainer_supervisor import TrainerRanks


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerRanks]:
    """A process that does nothing, and a clock that only the test moves."""
    now = SimpleNamespace(value=0.0)
    clock = SimpleNamespace(monotonic=lambda: now.value, time=time.time)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(trainer_supervisor, "time", clock)
    monkeypatch.setattr(trainer_supervisor, "trainer_command", lambda plan, endpoint: command)
    monkeypatch.setattr(trainer_supervisor, "trainer_environment", lambda plan: {})
    made: Any = TrainerRanks(tmp_path, limit_s=10.0)
    made.now = now
    made.start(None, "")
    yield made
    if made._job is not None:
        made._job.kill()
        made._job.wait()


def ended(job: Any) -> int:
    return job._job.wait(10)


def test_a_late_trainer_is_shown_once_and_then_ended(job: Any) -> None:
    job.now.value = 9.0
    assert job.lateness() == ""
    job.now.value = 11.0
    assert job.lateness() == "no step for 11 s, trainer.step_timeout_s = 10"
    assert job.lateness() == ""
    assert job.exit_status() is None
    job.now.value = 21.0
    assert job.lateness() == ""
    code = ended(job)
    assert "signal 9: it made no step for 21 s" in str(job.bury(code))
    assert (job.pid, job.exit_status(), job.lateness()) == (None, None, "")


@pytest.mark.parametrize("sign", ["hello", "failure", "step"])
def test_signs_of_life_give_it_as_long_again(job: Any, sign: str) -> None:
    """On a cluster the ranks start again by themselves: that takes time too."""
    job.now.value = 19.0
    assert job.lateness()
    if sign == "hello":
        assert job.says_hello(1)
        assert not job.says_hello(1), "the same trainer"
    elif sign == "failure":
        assert job.fell()
        assert not job.fell(), "another rank of the same trainer"
        assert job.says_hello(1)
        assert job.fell()
    else:
        job.restart_clock()
    job.now.value = 28.0
    assert job.lateness() == ""
    job.now.value = 30.0
    assert "no step for 11 s" in job.lateness()
    assert job.exit_status() is None, "control: without the sign it was ended at 20 s"
