"""Actors, a trainer and a clock that follow a script, in place of Ray and torchrun.

A call to an actor is answered when the script says so, never, or with a failure; waiting for one
moves the clock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError

from moerl.config import Config, load_config
from moerl.core.errors import EngineError, TrainerError
from moerl.launch.run_context import RunContext
from moerl.launch.supervision.supervisor import Supervisor
from moerl.runtime.process_tree import INTERRUPT, Interrupted, SignalWatch
from moerl.runtime.run_dir import RunDir

UNSET = object()
STATUS = {"trainer/incarnation": -1.0, "ref_models/start": -1.0}


@functools.cache
def _config(settings: tuple[str, ...]) -> Config:
    return load_config("quickstart", ["run.steps=100", "observe.report_s=0", *settings])


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Call:
    """One call to an actor; `outcome` is its answer, or the error that it raises."""

    def __init__(self, method: str, args: tuple[Any, ...]) -> None:
        self.method, self.args, self.outcome = method, args, UNSET

    @property
    def has_ended(self) -> bool:
        return self.outcome is not UNSET


class ScriptedActor:
    """Answers the methods of `answers` at once and all others never."""

    def __init__(self, name: str, **answers: Any) -> None:
        self.name, self.answers, self.is_dead = name, answers, False
        self.calls: list[Call] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._call(method, *args))

    def _call(self, method: str, *args: Any) -> Call:
        if method == "ask":
            method, args = args[0], args[1:]
        call = Call(method, args)
        self.calls.append(call)
        if self.is_dead:
            call.outcome = death()
        elif method in self.answers:
            answer = self.answers[method]
            call.outcome = answer(*args) if callable(answer) else answer
        return call

    def asked(self, method: str) -> list[Call]:
        return [call for call in self.calls if call.method == method]

    def end(self, method: str, outcome: Any) -> None:
        """The pending calls of a method end like this."""
        pending = [call for call in self.asked(method) if not call.has_ended]
        assert pending, f"no call of {method} to {self.name}: {[c.method for c in self.calls]}"
        for call in pending:
            call.outcome = outcome

    def die(self) -> None:
        self.is_dead = True
        for call in self.calls:
            if not call.has_ended:
                call.outcome = death()


def death() -> EngineError:
    error = EngineError("its process died")
    error.__cause__ = RayActorError()
    return error


class Placed:
    def __init__(self, actor: ScriptedActor) -> None:
        self.actor, self.gave_up = actor, False

    def give_up(self) -> None:
        self.gave_up = True
        self.actor.die()


class ScriptedActors:
    """`RayActors` whose engines and controllers are all kept, oldest first."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.engines: dict[int, list[ScriptedActor]] = {}
        self.controllers: list[ScriptedActor] = []
        self.engine_answers: dict[str, Any] = {
            "start": SimpleNamespace(pid=70),
            "pid": 7,
            "leave": "node",
        }
        told = ("lost", "back", "joins", "excluded", "leaves")
        self.controller_answers: dict[str, Any] = {f"engine_{what}": None for what in told}
        self.controller_answers["engines_started"] = None
        self.controller_answers |= {"open": lambda *_: "tcp://c", "pid": 9, "engines": []}
        self.controller_answers["poll"] = lambda: (STATUS, [], "", [])
        self.longest_wait_s = 0.0

    def scorer(self, context: RunContext) -> ScriptedActor:
        return ScriptedActor("scorer", pid=8)

    def engine(self, context: RunContext, index: int, tp: int) -> Placed:
        actor = ScriptedActor(f"engine {index}", **self.engine_answers)
        self.engines.setdefault(index, []).append(actor)
        return Placed(actor)

    def engine_has_left(self, index: int) -> None:
        pass

    def controller(
        self,
        context: RunContext,
        engines: Mapping[int, Any],
        sizes: Mapping[int, int],
        scorer: Any,
        pool_changed: bool,
    ) -> ScriptedActor:
        self.controllers.append(ScriptedActor("controller", **self.controller_answers))
        return self.controllers[-1]

    def kill(self, actor: ScriptedActor) -> None:
        actor.die()

    def wait(self, refs: Sequence[Call], timeout_s: float) -> list[Call]:
        ended = [call for call in refs if call.has_ended]
        self.clock.now += 0.001 if ended else timeout_s
        self.longest_wait_s = max(self.longest_wait_s, timeout_s)
        return ended

    def result(self, ref: Call, name: str) -> Any:
        if isinstance(ref.outcome, Exception):
            raise ref.outcome
        return ref.outcome


class ScriptedTrainer:
    """`TrainerRanks` without processes; `code` is its exit status."""

    rank_died, pid = 0.0, 5

    def __init__(self) -> None:
        self.code: int | None = None
        self.starts = self.clocks = self.stops = 0
        self.fallen = True

    def start(self, context: RunContext, endpoint: str) -> None:
        self.starts += 1
        self.code = None

    def exit_status(self) -> int | None:
        return self.code

    def bury(self, code: int) -> TrainerError:
        self.code = None
        return TrainerError(f"the trainer ended with exit status {code}: no memory")

    def ranks(self) -> list[tuple[int, Path]]:
        return []

    def restart_clock(self) -> None:
        self.clocks += 1

    def stop_clock(self) -> None:
        self.stops += 1

    def says_hello(self, incarnation: int) -> bool:
        return False

    def fell(self) -> bool:
        return self.fallen

    def lateness(self) -> str:
        return ""

    def close(self) -> None: ...


class Signals(SignalWatch):
    """SIGTERM at a time of the scripted clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda: None)
        self.clock, self.at = clock, float("inf")

    def install(self) -> None: ...

    def check(self) -> None:
        if self.clock() >= self.at:
            raise Interrupted(INTERRUPT)


class Panel:
    """A console that keeps what it was told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.waits: set[str] = set()
        self.steps: list[int] = []

    def wait(self, what: str) -> None:
        self.waits.add(what)

    def ready(self, what: str) -> None:
        self.waits.discard(what)

    give_up = ready

    def event(self, text: str) -> None:
        self.events.append(text)

    def status(self, values: Mapping[str, Any]) -> None: ...

    def step(self, row: Mapping[str, Any]) -> None:
        self.steps.append(row["step"])


class Scene:
    """A supervisor among scripted processes."""

    def __init__(self, root: Path, *settings: str, incarnation: int = 0) -> None:
        run = RunDir(root / "run")
        run.create()
        config = _config(settings)
        context = RunContext(
            config, run, root, {}, "token", incarnation, "local", root / "blobs", None, None
        )
        self.run, self.clock, self.panel = run, Clock(), Panel()
        self.actors, self.signals = ScriptedActors(self.clock), Signals(self.clock)
        panel: Any = self.panel
        actors: Any = self.actors
        self.supervisor = Supervisor(context, panel, root, self.signals, actors, self.clock)
        self.trainer: Any = ScriptedTrainer()
        self.supervisor.trainer._ranks = self.trainer
        self.restarts = self.supervisor._context.restarts
        self.supervisor._place()

    @property
    def controller(self) -> ScriptedActor:
        return self.actors.controllers[-1]

    def engine(self, index: int) -> ScriptedActor:
        return self.actors.engines[index][-1]

    def start(self) -> None:
        """Controller, trainer and engines, after Ray."""
        self.supervisor._start()

    def running(self) -> Scene:
        """In the middle of a run: 40 steps were made, and a checkpoint holds 20 of them."""
        checkpoint = self.run.checkpoint(20)
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "metadata.json").write_text("{}")
        (checkpoint / "manifest.json").write_text('{"files": {"metadata.json": [2, ""]}}')
        self.start()
        self.step(39)
        return self

    def step(self, number: int) -> None:
        self.supervisor.trainer._count({"step": number})

    def go_on(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """The loop of a run for so long, or until something has happened."""
        end = self.clock() + seconds
        supervisor = self.supervisor
        supervisor._loop(lambda: self.clock() >= end or until(), supervisor._watch_run)
