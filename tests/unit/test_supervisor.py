"""Decisions of the supervisor that no run of minutes would meet; its processes are stand-ins."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError

from moerl.config import load_config
from moerl.errors import ConfigError, EngineError, MoerlError, TrainerError
from moerl.launch.run_context import RunContext
from moerl.launch.supervision import supervisor as supervising
from moerl.launch.supervision.ray_proxy import Hosted, Remote
from moerl.launch.supervision.supervisor import Supervisor
from moerl.run_dir import RunDir


@pytest.fixture
def supervisor(tmp_path: Path) -> Any:
    """As in the middle of a run over several nodes: 40 steps are made, one death was seen."""
    run = RunDir(tmp_path / "run")
    run.create()
    settings = ["cluster=hosts", "supervision.max_restarts=3", "run.steps=100"]
    made: Any = Supervisor(
        MagicMock(run=run, config=load_config("quickstart", settings)), MagicMock(), tmp_path
    )
    made._trainer = MagicMock(rank_died=0.0)
    made._steps, made._restarts = 40, Counter(trainer=1)
    return made


def test_steps_that_are_trained_again_are_life_but_no_pardon(supervisor: Any) -> None:
    """Else a trainer whose checkpoint is far back would be ended for making no step."""
    supervisor._count({"step": 21})
    supervisor._trainer.restart_clock.assert_called_once()
    assert supervisor._restarts == {"trainer": 1}
    supervisor._count({"step": 40})
    assert not supervisor._restarts
    supervisor._trainer.stop_clock.assert_not_called()
    supervisor._count({"step": 99})
    supervisor._trainer.stop_clock.assert_called_once()


def test_a_process_that_keeps_dying_waits_longer_each_time(supervisor: Any) -> None:
    first = supervisor.plan.config.supervision.backoff_s
    assert first > 0
    pauses = []
    for _ in range(3):
        now = time.monotonic()
        supervisor._schedule("controller", MoerlError("it died"), lambda: None)
        pauses.append(supervisor._due.pop("controller")[0] - now)
    assert pauses == pytest.approx([first, 2 * first, 4 * first], abs=0.5)


def test_trainers_that_fall_without_a_step_end_the_run(supervisor: Any) -> None:
    """Their nodes start them again by themselves, which no exit status here tells of."""
    for _ in range(2):
        supervisor._fell("trainer rank 0: no memory")
    with pytest.raises(TrainerError, match="no memory"):
        supervisor._fell("trainer rank 0: no memory")
    supervisor._restarts.clear()
    supervisor._steps = 0
    with pytest.raises(TrainerError, match="a wrong setting"):
        supervisor._fell("trainer rank 1: a wrong setting")


def test_an_engine_that_may_not_join_is_left_out(
    supervisor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size that the model cannot be served with is no failure of the run."""
    error = ConfigError("engine.tp", 3, "it must divide the 8 heads")
    monkeypatch.setattr(supervising.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(supervisor, "get", MagicMock(side_effect=error))
    supervisor.members = MagicMock()
    supervisor._starts = {"start": 2}
    supervisor._look_at_starts()
    supervisor.members.gave_up.assert_called_once_with(2, error)
    assert not supervisor._restarts["engine 2"]


def test_hosts_that_hang_are_waited_for_once(
    supervisor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile nothing else is watched."""
    waits: list[float] = []

    def wait(refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert num_returns == len(refs)
        waits.append(timeout)
        return refs[:2], refs[2:]  # the scorer and the controller; four hosts hang

    monkeypatch.setattr(supervising.ray, "wait", wait)
    monkeypatch.setattr(supervisor, "get", MagicMock(return_value=7))
    supervisor.scorer, supervisor.controller = MagicMock(), MagicMock()
    supervisor.members = MagicMock(present={index: MagicMock() for index in range(4)})
    supervisor._trainer.pid = 8
    supervisor.write_pids()
    assert len(waits) == 1
    assert supervisor.get.call_count == 2
    assert set(supervisor._pids) == {"root", "scorer", "controller", "trainer"}


def test_a_trainer_that_finished_while_it_was_given_up_is_done(supervisor: Any) -> None:
    endpoints = supervisor.plan.run.endpoints
    endpoints.open("tcp://127.0.0.1:1", "token")
    supervisor._trainer.exit_status.return_value = -9
    endpoints.done(endpoints.start())
    assert supervisor._look_at_trainer()
    endpoints.open("tcp://127.0.0.1:1", "token")
    supervisor._trainer.bury.return_value = TrainerError("it made no step")
    assert not supervisor._look_at_trainer(), "control: the mark is of another opening"
    assert "trainer" in supervisor._due


def test_a_finished_run_stays_finished_when_engines_cannot_be_measured(
    supervisor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor.controller = MagicMock()
    assert supervisor.plan.config.observe.engine_alone_s > 0

    def died(*_: object, timeout_s: float) -> float:
        raise EngineError("the process of engine 0 died")

    monkeypatch.setattr(supervisor, "get", died)
    assert supervisor._measure() == {}


def failing(error: Exception) -> Remote:
    """An engine whose calls all end like this."""

    async def fail(method: str, *args: object) -> None:
        raise error

    return Remote(SimpleNamespace(ask=SimpleNamespace(remote=fail)), "engine 3")  # type: ignore[arg-type]


def raised(cause: Exception) -> Exception:
    """As Ray raises what the code of an actor raised: of both classes, where that is possible."""
    return RayTaskError("ask", "", cause).as_instanceof_cause()


def test_an_answer_that_its_node_took_along_is_a_failed_call() -> None:
    """Large ones stay where they were made until they are fetched."""
    engine = failing(ObjectLostError("00" * 28, None, ""))
    with pytest.raises(EngineError, match="engine 3: an answer was lost: ObjectLostError"):
        asyncio.run(engine.generate([]))


def test_calls_of_an_actor_fail_with_our_own_errors(
    supervisor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller's and the supervisor's; only the latter names a mistake in the code."""

    def ask(error: Exception) -> Exception:
        with pytest.raises((MoerlError, RayError)) as failure:
            asyncio.run(failing(error).status())
        return failure.value

    def get(error: Exception) -> Exception:
        monkeypatch.setattr(supervising.ray, "get", MagicMock(side_effect=error))
        with pytest.raises((MoerlError, RayError)) as failure:
            supervisor.get("ref", "engine 3", timeout_s=7.0)
        return failure.value

    ours = ConfigError("engine.tp", 3, "it must divide the 8 heads")
    for found in (ask(raised(ours)), get(raised(ours))):
        assert found is ours
        assert found.__cause__ is None
    death = RayActorError()
    for found in (ask(death), get(death)):
        assert type(found) is EngineError
        assert str(found) == "the process of engine 3 died"
        assert found.__cause__ is death, "what starts again is decided by it"
    mistake = raised(KeyError("x"))
    assert ask(mistake) is mistake, "a mistake is no failure of an engine: the run ends"
    assert str(get(mistake)) == "engine 3: KeyError: 'x'"
    late = get(GetTimeoutError())
    assert type(late) is supervising.Late
    assert str(late) == "engine 3 did not answer within 7 s"


def test_an_actor_is_asked_for_methods_of_what_it_hosts() -> None:
    class Plain:
        async def add(self, one: int, two: int) -> int:
            return one + two

    hosted = Hosted(Plain())
    actor = SimpleNamespace(ask=SimpleNamespace(remote=hosted.ask))
    assert asyncio.run(Remote(actor, "plain").add(1, 2)) == 3  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="subtract"):
        asyncio.run(Remote(actor, "plain").subtract(1, 2))  # type: ignore[arg-type]


def test_a_trainer_waits_for_room_for_its_number(
    supervisor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at state.json costs a pause, not the run."""
    supervisor.plan = RunContext(
        supervisor.plan.config, supervisor.plan.run, Path(), {}, "t", 0, "n", Path(), None, None
    )
    numbers = MagicMock(side_effect=[OSError(28, "No space left on device"), 7])
    monkeypatch.setattr(supervising, "next_incarnation", numbers)
    monkeypatch.setattr(supervisor, "write_pids", MagicMock())
    supervisor._endpoint = "tcp://127.0.0.1:1"
    supervisor._start_trainer_again()
    supervisor._trainer.start.assert_not_called()
    assert "No space left" in supervisor.console.event.call_args.args[0]
    when, again = supervisor._due.pop("trainer")
    assert when > 0
    again()
    supervisor._trainer.start.assert_called_once()
    assert supervisor.plan.incarnation == 7
