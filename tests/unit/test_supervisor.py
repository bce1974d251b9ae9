"""Decisions of the supervisor that no run of minutes would meet, with actors that follow a script
(`tests/helpers/scripted_actors`): nothing stops it from seeing the next death or signal.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError

from moerl.core.errors import ConfigError, EngineError, MoerlError, TrainerError
from moerl.launch.nodes.control_api import ControlApi
from moerl.launch.supervision import actors as actors_module
from moerl.launch.supervision import supervisor_context, trainer_supervisor
from moerl.launch.supervision.actors import RayActors
from moerl.launch.supervision.live_report import LiveReport
from moerl.launch.supervision.ray_proxy import ActorProxy, ActorServer, CallTimeout
from moerl.observe.metrics import read_lines
from moerl.runtime.process_tree import Interrupted
from moerl.runtime.run_dir import RunDir, next_incarnation
from tests.helpers.scripted_actors import UNSET, Scene, death

TWO = ("engine.count=2", "supervision.backoff_s=1")


@pytest.fixture(autouse=True)
def no_signals_to_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_context, "stacks", lambda processes: "")


# --- steps and trainers --------------------------------------------------------------------------
def test_steps_that_are_trained_again_are_life_but_no_pardon(tmp_path: Path) -> None:
    """Else a trainer whose checkpoint is far back would be ended for making no step."""
    scene = Scene(tmp_path).running()
    scene.trainer.code = 1
    scene.go_on(3.0)
    restarts, clocks = scene.restarts, scene.trainer.clocks
    scene.step(21)
    assert scene.trainer.clocks == clocks + 1
    assert restarts._restarts == {"trainer": 1}
    scene.step(40)
    assert not restarts._restarts
    assert scene.trainer.stops == 0
    scene.step(99)
    assert scene.trainer.stops == 1


def test_trainers_that_fall_without_a_step_end_the_run(tmp_path: Path) -> None:
    """Their nodes start them again by themselves, which no exit status here tells of."""
    scene = Scene(tmp_path, "cluster=hosts").running()
    for _ in range(3):
        scene.supervisor.trainer._fell("trainer rank 0: no memory")
    with pytest.raises(TrainerError, match="no memory"):
        scene.supervisor.trainer._fell("trainer rank 0: no memory")
    early = Scene(tmp_path / "early", "cluster=hosts")
    early.start()
    with pytest.raises(TrainerError, match="a wrong setting"):
        early.supervisor.trainer._fell("trainer rank 1: a wrong setting")


def test_a_trainer_that_finished_while_it_was_given_up_is_done(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "cluster=hosts").running()
    endpoints = scene.run.endpoints
    endpoints.open("tcp://127.0.0.1:1", "token")
    scene.trainer.code = -9
    endpoints.done(endpoints.start())
    assert scene.supervisor.trainer.is_done()
    endpoints.open("tcp://127.0.0.1:1", "token")
    assert not scene.supervisor.trainer.is_done(), "control: the mark is of another opening"
    scene.go_on(2.0, lambda: scene.restarts.is_due("trainer"))
    assert scene.restarts.is_due("trainer")


def test_the_controller_names_the_cause_of_a_trainers_end(tmp_path: Path) -> None:
    """Both end at about the same time; what the rank reported is the better sentence."""
    scene = Scene(tmp_path).running()
    scene.trainer.code = 1
    scene.go_on(0.4)
    scene.controller.end("run", TrainerError("rank 1: the loss is not finite"))
    with pytest.raises(TrainerError, match="the loss is not finite"):
        scene.go_on(5.0)


def test_a_finished_run_stays_finished_when_engines_cannot_be_measured(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "observe.engine_alone_s=3").running()
    scene.engine(0).die()
    scene.controller.answers["measure_engines"] = EngineError("the process of engine 0 died")
    assert scene.supervisor._measure() == {}
    scene.controller.answers["measure_engines"] = 12.5
    assert scene.supervisor._measure() == {"engine tokens/s alone": 12.5}


def test_the_last_step_is_shown_though_nobody_polled_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path).running()
    rows = [{"step": step, "version": "0.0", "time_s": 0.0} for step in range(42)]
    scene.run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scene.supervisor.trainer.show_last_rows()
    assert scene.panel.steps == [39, 40, 41]
    again = Scene(tmp_path).running()
    again.supervisor.trainer._shown = 41  # as after a resume
    again.supervisor.trainer.show_last_rows()
    assert again.panel.steps == [39]


def test_where_they_take_turns_each_starts_while_the_other_has_no_memory(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "cluster.colocated=turns", "supervision.backoff_s=0.1")
    scene.actors.controller_answers["close_turn"] = lambda: UNSET
    scene.running()
    assert len(scene.engine(0).asked("start")) == 1
    scene.go_on(3.0)
    assert scene.trainer.starts == 0, "the engines do not sleep yet"
    scene.controller.end("close_turn", None)
    scene.go_on(0.5)
    assert scene.trainer.starts == 1
    scene.engine(0).end("watch", EngineError("its server died"))
    scene.go_on(3.0)
    assert len(scene.engine(0).asked("start")) == 1, "the trainer has the memory"
    assert scene.supervisor.engines.is_down(0)
    scene.controller.end("generating", None)
    scene.go_on(0.5)
    assert len(scene.engine(0).asked("start")) == 2
    scene.trainer.code = 1
    scene.go_on(3.0)
    scene.controller.end("close_turn", EngineError("an answer was lost"))
    scene.go_on(3.0)
    assert scene.trainer.starts == 1
    scene.controller.end("close_turn", None)
    scene.go_on(0.5)
    assert scene.trainer.starts == 2


# --- nothing makes it deaf -----------------------------------------------------------------------
def deaf_scene(root: Path, what: str) -> Scene:
    """A run in which something answers nothing from now on."""
    if what == "first start":
        scene = Scene(root, *TWO)
        scene.actors.controller_answers["open"] = lambda *_: UNSET
        scene.supervisor.controller.start()
        return scene
    scene = Scene(root, *TWO).running()
    if what == "controller":
        scene.controller.answers.clear()
    elif what == "hosts":
        for index in (0, 1):
            scene.engine(index).answers.clear()
    else:
        scene.actors.controller_answers["open"] = lambda *_: UNSET
        scene.controller.die()
        scene.go_on(5.0)
        assert len(scene.actors.controllers) == 2, "it is being started"
    return scene


@pytest.mark.parametrize("what", ["controller", "hosts", "controller's start", "first start"])
def test_a_signal_is_seen_within_a_second_while_anything_hangs(tmp_path: Path, what: str) -> None:
    scene = deaf_scene(tmp_path, what)
    scene.signals.at = scene.clock() + 20.25
    supervisor = scene.supervisor
    with pytest.raises(Interrupted):
        supervisor._loop(lambda: False, supervisor._watch_processes)
    assert scene.clock() - scene.signals.at < 1.0
    assert scene.actors.longest_wait_s <= 1.0


@pytest.mark.parametrize("what", ["controller", "hosts", "controller's start"])
def test_a_death_is_seen_within_a_second_while_anything_hangs(tmp_path: Path, what: str) -> None:
    scene = deaf_scene(tmp_path, what)
    begin = scene.clock()
    scene.engine(1).end("watch", EngineError("server was killed by signal 9"))
    scene.go_on(20.0, lambda: scene.restarts.is_due("engine 1"))
    assert scene.clock() - begin < 1.0
    scene.trainer.code, begin = 1, scene.clock()
    scene.go_on(20.0, lambda: scene.restarts.is_due("trainer"))
    assert scene.clock() - begin < 3.0


def test_the_lease_is_renewed_while_anything_hangs(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "cluster=hosts", "supervision.lease_s=12").running()
    scene.controller.answers.clear()
    seen = set()
    for _ in range(20):
        scene.go_on(1.0)
        seen.add(scene.run.endpoints.lease.read_bytes())
    assert len(seen) >= 18


# --- what hangs ----------------------------------------------------------------------------------
def patient(scene: Scene, condition: Any, seconds: float) -> None:
    """`go_on`; stacks are written by a thread of the real world."""
    end = scene.clock() + seconds
    while not condition() and scene.clock() < end:
        scene.go_on(1.0, condition)
        time.sleep(0.001)


def test_a_host_that_hangs_is_ended_and_another_one_is_started(tmp_path: Path) -> None:
    scene = Scene(tmp_path, *TWO).running()
    hung, begin = scene.engine(1), scene.clock()
    hung.answers.clear()
    patient(scene, lambda: hung.is_dead, 200.0)
    assert 55.0 < scene.clock() - begin < 80.0, "supervision.answer_timeout_s = 60"
    assert not scene.engine(0).is_dead
    patient(scene, lambda: scene.controller.asked("engine_back"), 20.0)
    index, proxy = scene.controller.asked("engine_back")[0].args
    assert (index, proxy._actor) == (1, scene.engine(1))
    assert scene.engine(1) is not hung
    assert any("the host of engine 1" in event for event in scene.panel.events)


def test_a_controller_that_hangs_is_ended_and_another_one_is_started(tmp_path: Path) -> None:
    scene = Scene(tmp_path, *TWO).running()
    hung = scene.controller
    hung.answers.clear()
    patient(scene, lambda: len(scene.actors.controllers) == 2, 100.0)
    assert hung.is_dead
    patient(scene, lambda: scene.supervisor.controller.is_up, 10.0)
    assert scene.controller.asked("open")[0].args == ("tcp://c", [])
    assert scene.controller.asked("engines_started")


def test_a_root_that_was_suspended_blames_nobody(tmp_path: Path) -> None:
    """Ten minutes later (SIGSTOP, a sleeping laptop) answers need a moment to be there."""
    scene = Scene(tmp_path, *TWO).running()
    pid, controller = scene.engine(1).answers.pop("pid"), scene.controller
    scene.go_on(12.0)
    scene.clock.now += 600.0
    scene.go_on(2.0)
    scene.engine(1).answers["pid"] = pid
    scene.engine(1).end("pid", pid)
    patient(scene, lambda: False, 120.0)
    assert not scene.engine(1).is_dead
    assert scene.controller is controller


def test_a_host_that_waits_for_a_node_is_not_ended(tmp_path: Path) -> None:
    """On a cluster a lost node's engine starts when another node has room, maybe in hours."""
    scene = Scene(tmp_path, *TWO, "cluster=hosts", "cluster.nodes.engine.count=2").running()
    scene.actors.engine_answers.clear()
    scene.engine(1).die()
    patient(scene, lambda: len(scene.actors.engines[1]) == 2, 10.0)
    for _ in range(4):
        scene.go_on(100.0)  # longer than supervision.answer_timeout_s and than a local start
    assert not scene.engine(1).is_dead


# --- engines that keep dying ---------------------------------------------------------------------
def die_again(scene: Scene, index: int) -> float:
    """The engine's server dies and is started again; returns the pause before that."""
    num, begin = len(scene.engine(index).asked("start")), scene.clock()
    scene.engine(index).end("watch", EngineError("server was killed by signal 9"))
    supervisor = scene.supervisor
    scene.go_on(
        100.0,
        lambda: (
            len(scene.engine(index).asked("start")) > num
            or index in supervisor.engines.members._leaving
        ),
    )
    pause_s = scene.clock() - begin
    scene.go_on(1.0)
    return pause_s


def test_an_engine_that_keeps_dying_is_excluded_and_the_others_go_on(tmp_path: Path) -> None:
    scene = Scene(tmp_path, *TWO, "supervision.max_deaths=4").running()
    pauses = []
    for number in range(40, 43):
        pauses.append(die_again(scene, 1))
        scene.step(number)  # made by engine 0: it forgives engine 1 nothing
    assert [round(pause) for pause in pauses] == [1, 2, 4]
    die_again(scene, 1)
    scene.go_on(5.0)
    (event,) = [event for event in scene.panel.events if "excluded" in event]
    assert event.startswith(
        "engine 1 is excluded: it died 4 times (supervision.max_deaths) within 1800 s of running "
        "(supervision.window_s); 1 engine(s) are left: server was killed by signal 9"
    )
    assert [call.args for call in scene.controller.asked("engine_excluded")] == [(1,)]
    assert [call.args for call in scene.controller.asked("engine_leaves")] == [(1,)]
    assert set(scene.supervisor.engines.members.actors) == {0}
    assert not scene.panel.waits - {"ray", "trainer"}
    scene.go_on(10.0)
    assert not scene.engine(0).is_dead


def test_the_run_ends_when_no_engine_is_left(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "supervision.max_deaths=2").running()
    die_again(scene, 0)
    scene.step(40)
    what = r"engine 0 is excluded: it died 2 times .*; 0 engine\(s\) are left.*: server was killed"
    with pytest.raises(EngineError, match=what):
        die_again(scene, 0)


def test_the_run_ends_when_fewer_engines_than_the_quorum_are_left(tmp_path: Path) -> None:
    scene = Scene(tmp_path, *TWO, "supervision.max_deaths=1", "sync.quorum=2").running()
    with pytest.raises(EngineError, match=r"1 engine\(s\) are left, sync.quorum = 2"):
        die_again(scene, 1)


def test_an_excluded_engine_is_lost_for_the_next_controller_too(tmp_path: Path) -> None:
    scene = Scene(tmp_path, *TWO, "supervision.max_deaths=1").running()
    del scene.controller.answers["engine_leaves"]
    scene.actors.controller_answers.pop("engine_leaves")
    die_again(scene, 1)
    scene.controller.die()
    scene.go_on(5.0)
    assert scene.controller.asked("open")[0].args == ("tcp://c", [1])
    assert scene.controller.asked("engine_leaves"), "the next one is told to let it go"


def test_before_the_first_step_the_cause_itself_ends_the_run(tmp_path: Path) -> None:
    scene = Scene(tmp_path, *TWO)
    scene.start()
    with pytest.raises(EngineError, match=r"^server was killed by signal 9$"):
        die_again(scene, 1)


def test_a_death_right_after_the_first_step_is_survived(tmp_path: Path) -> None:
    """The step is in the run directory, and no poll has told of it."""
    scene = Scene(tmp_path, *TWO)
    scene.start()
    row = {"step": 7, "version": "0.8", "time_s": 0.0}
    scene.run.metrics.write_text(json.dumps(row) + '\n{"step": 8, "ver')
    scene.controller.die()
    scene.go_on(5.0, lambda: len(scene.actors.controllers) == 2)
    assert len(scene.actors.controllers) == 2
    assert scene.restarts._restarts == {"controller": 1}
    scene.step(7)
    assert scene.restarts._restarts == {"controller": 1}, "one step forgives once"


@pytest.mark.parametrize("rows", ["", '{"step": 7, "version": "0.8"', "a file of others\n"])
def test_a_death_before_the_first_step_is_not(tmp_path: Path, rows: str) -> None:
    scene = Scene(tmp_path, *TWO)
    scene.start()
    scene.run.metrics.write_text(rows)
    scene.controller.die()
    with pytest.raises(EngineError, match="its process died"):
        scene.go_on(5.0)


def test_steps_before_a_resume_do_not_count(tmp_path: Path) -> None:
    scene = Scene(tmp_path, *TWO, incarnation=3)
    scene.start()
    scene.run.metrics.write_text('{"step": 7, "version": "2.8", "time_s": 0.0}\n')
    scene.controller.die()
    with pytest.raises(EngineError, match="its process died"):
        scene.go_on(5.0)


def test_without_restarts_the_cause_itself_ends_the_run(tmp_path: Path) -> None:
    scene = Scene(tmp_path, *TWO, "supervision.max_restarts=0").running()
    with pytest.raises(EngineError, match=r"^server was killed by signal 9$"):
        die_again(scene, 1)


# --- engines, controllers and requests -----------------------------------------------------------
def test_an_engine_that_may_not_join_is_left_out(tmp_path: Path) -> None:
    """A size that the model cannot be served with is no failure of the run."""
    scene = Scene(tmp_path).running()
    scene.actors.engine_answers["start"] = ConfigError("engine.tp", 3, "it must divide the 8 heads")
    assert scene.supervisor.engines.members._add(3) == 1
    scene.go_on(3.0)
    assert set(scene.supervisor.engines.members.actors) == {0}
    assert any("engine 1 did not start and is left out" in text for text in scene.panel.events)
    assert not scene.restarts._restarts


def test_an_engine_that_comes_up_while_the_controller_opens_is_told(tmp_path: Path) -> None:
    """The new controller was made with it as a lost one."""
    scene = Scene(tmp_path, *TWO).running()
    scene.actors.controller_answers["open"] = lambda *_: UNSET
    scene.controller.die()
    scene.engine(1).end("watch", EngineError("killed"))
    scene.go_on(10.0)
    assert scene.controller.asked("open")[0].args == ("tcp://c", [1])
    assert not scene.controller.asked("engine_back")
    scene.controller.end("open", "tcp://c")
    scene.go_on(2.0)
    index, proxy = scene.controller.asked("engine_back")[0].args
    assert (index, proxy._actor) == (1, scene.engine(1))


def test_pids_are_written_as_processes_come_and_go(tmp_path: Path) -> None:
    scene = Scene(tmp_path, *TWO).running()
    scene.go_on(2.0)
    pids = json.loads((scene.run.root / "pids.json").read_text())
    del pids["root"]
    assert pids == {
        "controller": 9, "scorer": 8, "trainer": 5,
        "engine-0": 70, "engine-0-host": 7, "engine-1": 70, "engine-1-host": 7,
    }  # fmt: skip
    scene.engine(1).end("watch", EngineError("killed"))
    del scene.engine(1).answers["start"]
    scene.go_on(3.0)
    assert "engine-1" not in json.loads((scene.run.root / "pids.json").read_text())


def test_a_list_of_engines_is_answered_when_the_controller_answers(tmp_path: Path) -> None:
    scene = Scene(tmp_path).running()
    answers: dict[str, Any] = {}
    control: Any = SimpleNamespace(answer=answers.__setitem__)
    members = scene.supervisor.engines.members
    members._control_api = control
    del scene.controller.answers["engines"]
    members._serve("a", {"do": "list"})
    assert not answers, "nobody waits for it"
    scene.controller.end("engines", [{"engine": 0, "state": "up"}])
    members._control_api = ControlApi(scene.run)
    members._control_api.answer = answers.__setitem__  # type: ignore[method-assign]
    scene.go_on(1.0)
    assert answers == {"a": {"answer": [{"engine": 0, "state": "up", "tp": 1}]}}
    members._serve("b", {"do": "fly"})
    assert answers["b"] == {"refused": "{'do': 'fly'} is not a valid request"}


@pytest.mark.parametrize("how", ["local", "cluster", "hangs"])
def test_an_engine_that_is_removed_leaves_and_its_host_is_ended(tmp_path: Path, how: str) -> None:
    more = ("cluster=hosts", "cluster.nodes.engine.count=2") if how == "cluster" else ()
    scene = Scene(tmp_path, *TWO, *more).running()
    leaver, members = scene.engine(1), scene.supervisor.engines.members
    if how == "hangs":
        leaver.answers.clear()
    assert members._remove(1) == "leaving"
    scene.go_on(3.0)
    assert leaver.asked("leave")
    if how == "cluster":
        assert not leaver.is_dead, "it serves its records"
        (wait,) = scene.controller.asked("records_leave")
        assert wait.args == ("node",)
        scene.controller.end("records_leave", None)
        scene.go_on(1.0)
    elif how == "hangs":
        scene.go_on(70.0)
    assert leaver.is_dead
    assert set(members.actors) == set(members.sizes) == {0}
    assert scene.panel.events[-1] == "engine 1 has left"


def test_a_removal_outlives_the_controller(tmp_path: Path) -> None:
    scene = Scene(tmp_path, *TWO).running()
    answer = scene.actors.controller_answers.pop("engine_leaves")
    del scene.controller.answers["engine_leaves"]
    members = scene.supervisor.engines.members
    members._remove(1)
    scene.go_on(2.0)
    scene.actors.controller_answers["engine_leaves"] = answer
    scene.controller.die()
    scene.go_on(10.0)
    assert scene.controller.asked("engine_leaves")
    assert set(members.actors) == {0}


# --- errors of remote calls ----------------------------------------------------------------------
def failing(error: Exception) -> ActorProxy:
    """An engine whose calls all end like this."""

    async def fail(method: str, *args: object) -> None:
        raise error

    return ActorProxy(SimpleNamespace(ask=SimpleNamespace(remote=fail)), "engine 3")  # type: ignore[arg-type]


def raised(cause: Exception) -> Exception:
    """As Ray raises what the code of an actor raised: of both classes, where that is possible."""
    return RayTaskError("ask", "", cause).as_instanceof_cause()


def test_an_answer_that_its_node_took_along_is_a_failed_call() -> None:
    """Large ones stay where they were made until they are fetched."""
    engine = failing(ObjectLostError("00" * 28, None, ""))
    with pytest.raises(EngineError, match="engine 3: an answer was lost: ObjectLostError"):
        asyncio.run(engine.generate([]))


def test_calls_of_an_actor_fail_with_our_own_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's and the supervisor's; only the latter names a mistake in the code."""

    def ask(error: Exception) -> Exception:
        with pytest.raises((MoerlError, RayError)) as failure:
            asyncio.run(failing(error).status())
        return failure.value

    def get(error: Exception) -> Exception:
        def fail(ref: object, *, timeout: float) -> None:
            raise error

        monkeypatch.setattr(actors_module.ray, "get", fail)
        with pytest.raises((MoerlError, RayError)) as failure:
            RayActors().result("ref", "engine 3")
        return failure.value

    ours = ConfigError("engine.tp", 3, "it must divide the 8 heads")
    for found in (ask(raised(ours)), get(raised(ours))):
        assert found is ours
        assert found.__cause__ is None
    died = RayActorError()
    for found in (ask(died), get(died)):
        assert type(found) is EngineError
        assert str(found) == "the process of engine 3 died"
        assert found.__cause__ is died, "what starts again is decided by it"
    mistake = raised(KeyError("x"))
    assert ask(mistake) is mistake, "a mistake is no failure of an engine: the run ends"
    assert str(get(mistake)) == "engine 3: KeyError: 'x'"
    assert type(get(GetTimeoutError())) is CallTimeout


def test_a_mistake_in_the_controller_ends_the_run(tmp_path: Path) -> None:
    scene = Scene(tmp_path).running()
    scene.controller.answers["poll"] = lambda: EngineError("controller: KeyError: 'x'")
    with pytest.raises(EngineError, match="KeyError"):
        scene.go_on(5.0)
    other = Scene(tmp_path / "other").running()
    other.controller.answers["poll"] = death
    other.go_on(5.0)


def test_an_actor_is_asked_for_methods_of_what_it_hosts() -> None:
    class Plain:
        async def add(self, one: int, two: int) -> int:
            return one + two

    hosted = ActorServer(Plain())
    actor = SimpleNamespace(ask=SimpleNamespace(remote=hosted.ask))
    assert asyncio.run(ActorProxy(actor, "plain").add(1, 2)) == 3  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="subtract"):
        asyncio.run(ActorProxy(actor, "plain").subtract(1, 2))  # type: ignore[arg-type]


def test_a_trainer_waits_for_room_for_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at state.json costs a pause, not the run."""
    scene = Scene(tmp_path).running()
    answers: list[Any] = [OSError(28, "No space left on device"), 7]

    def number(run: RunDir, *, resume: bool) -> int:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return int(answer)

    monkeypatch.setattr(trainer_supervisor, "next_incarnation", number)
    scene.trainer.code = 1
    scene.go_on(30.0, lambda: scene.trainer.starts == 2)
    assert any("state.json cannot be written" in event for event in scene.panel.events)
    assert scene.supervisor.run_context.incarnation == 7
    assert not answers


# --- faults that a restart would meet again -------------------------------------------------------
def rows_of(scene: Scene, steps: int) -> None:
    rows = [{"step": step, "version": f"0.{step + 1}", "time_s": 0.0} for step in range(steps)]
    scene.run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_trainer_without_a_checkpoint_begins_from_the_first_weights(tmp_path: Path) -> None:
    scene = Scene(tmp_path).running()
    shutil.rmtree(scene.run.checkpoints)
    rows_of(scene, 3)
    next_incarnation(scene.run, resume=False)  # of the first trainer
    scene.trainer.code = 1
    scene.go_on(5.0, lambda: scene.trainer.starts == 2)
    context = scene.supervisor.run_context
    assert (context.incarnation, context.checkpoint) == (1, None)
    said = [event for event in scene.panel.events if "the first weights" in event]
    assert len(said) == 1
    assert said[0].endswith("3 steps are repeated")
    while scene.trainer.starts < 4:
        scene.trainer.code = 1
        scene.go_on(
            60.0, lambda: scene.trainer.code is None and not scene.restarts.is_due("trainer")
        )
    scene.trainer.code = 1
    with pytest.raises(TrainerError, match="no memory"):  # supervision.max_restarts
        scene.go_on(60.0)


def test_control_a_trainer_behind_a_checkpoint_begins_there(tmp_path: Path) -> None:
    scene = Scene(tmp_path).running()
    rows_of(scene, 25)
    scene.trainer.code = 1
    scene.go_on(5.0, lambda: scene.trainer.starts == 2)
    assert scene.supervisor.run_context.checkpoint == scene.run.checkpoint(20)
    assert any("step-000020, 5 steps are repeated" in event for event in scene.panel.events)


@pytest.mark.parametrize("cluster", ["cluster=laptop", "cluster=hosts"])
def test_a_trainer_whose_checkpoint_is_gone_does_not_begin_again(
    tmp_path: Path, cluster: str
) -> None:
    """Its user lost a checkpoint: to train all steps again is his decision."""
    scene = Scene(tmp_path, cluster).running()
    trainer = scene.supervisor.trainer
    trainer.run_context = replace(trainer.run_context, checkpoint=scene.run.checkpoint(20))
    shutil.rmtree(scene.run.checkpoints)
    scene.trainer.code = 1
    with pytest.raises(TrainerError, match=r"step-000020 .* is gone\. .* --from-start"):
        scene.go_on(3.0)
    with pytest.raises(TrainerError, match="--from-start"):
        trainer._fell("trainer rank 0: no memory")


def test_notices_of_the_trainer_are_shown(tmp_path: Path) -> None:
    scene = Scene(tmp_path).running()
    answer = ({"trainer/incarnation": -1.0, "ref_models/start": -1.0}, [], "", ["hf/ waits"])
    scene.supervisor.trainer.hear(answer)
    assert "hf/ waits" in scene.panel.events
    assert [one["text"] for one in read_lines(scene.run.notices)] == ["hf/ waits"], "on the page"


# --- the page of a running run --------------------------------------------------------------------
def test_the_report_follows_the_run(tmp_path: Path) -> None:
    begun: list[tuple[float, list[str]]] = []
    scene = Scene(tmp_path, "observe.report_s=60")
    writer = SimpleNamespace(poll=lambda: None)

    def start(command: list[str]) -> Any:
        begun.append((scene.clock(), command))
        return writer

    scene.supervisor._report = LiveReport(scene.supervisor._context, start)
    scene.start()
    scene.go_on(100.0)
    assert begun == [], "there is no step to show"
    scene.step(39)
    first = scene.clock()
    scene.go_on(145.0)
    assert len(begun) == 1, "one at a time"
    assert 59.0 < begun[0][0] - first < 65.0
    assert begun[0][1][1:] == ["-m", "moerl", "report", str(scene.run.root)]
    writer.poll = lambda: 0
    scene.go_on(1.0)
    assert sum("follows the run" in event for event in scene.panel.events) == 1
    scene.go_on(3000.0, lambda: len(begun) == 2)
    assert begun[1][0] - begun[0][0] > 5 * 80.0, "it took 80 s or more"
    scene.go_on(200.0)
    assert len(begun) in (4, 5, 6)
    assert sum("follows the run" in event for event in scene.panel.events) == 1
    silent = Scene(tmp_path / "off").running()
    silent.supervisor._report = LiveReport(silent.supervisor._context, start)
    scene.supervisor, count = silent.supervisor, len(begun)
    silent.go_on(300.0)
    assert len(begun) == count, "control: observe.report_s=0"


def test_a_page_that_fails_is_said_once_and_tried_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "observe.report_s=60")
    outcomes: list[Any] = [OSError(11, "no process"), 1, 1, 0]

    def start(command: list[str]) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return SimpleNamespace(poll=lambda: outcome)

    scene.supervisor._report = LiveReport(scene.supervisor._context, start)
    scene.start()
    scene.step(39)
    scene.go_on(4000.0, lambda: not outcomes)
    scene.go_on(5.0)
    said = [event for event in scene.panel.events if "the live report" in event]
    assert len(said) == 3, said
    assert "no process" in said[0]
    assert "ended with status 1" in said[1]
    assert "works again" in said[2]
    assert [one["text"] for one in read_lines(scene.run.notices)] == said
