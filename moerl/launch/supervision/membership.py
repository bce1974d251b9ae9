"""Engines of a run that goes on: who is there, who joins, who leaves.

Numbers are given once.  An engine that joins is started beside the others and handed to the
controller when it is up; it gets requests once it was published to.  One that leaves starts nothing
any more; what runs on it is interrupted and goes on elsewhere, and when the trainer publishes to it
no more its process ends.  Requests come over the run's control API (`moerl engines`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle

from moerl.config.clusters import is_local
from moerl.errors import ConfigError, EngineError, MoerlError
from moerl.launch.nodes.control_api import ControlApi
from moerl.launch.run_context import RunContext
from moerl.launch.supervision.actors import EngineActor, place_engine

log = logging.getLogger(__name__)


class Watcher(Protocol):
    """What the supervisor does for engines that come and go."""

    def tell(self, call: Callable[[Any], Any]) -> Any:
        """The result of a call to the controller, given its handle; None while it is down."""
        ...

    def ask(self, call: Callable[[Any], Any]) -> Any:
        """A call to the controller under way; None while it is down."""
        ...

    def get(self, ref: Any, name: str, timeout_s: float | None = None) -> Any:
        """The result of a remote call.  Raises MoerlError."""
        ...

    def start_engine(self, index: int) -> None: ...

    def forget_engine(self, index: int) -> None:
        """It is neither watched nor started again."""
        ...

    def is_down(self, index: int) -> bool:
        """It died and is not back yet."""
        ...

    def write_pids(self) -> None: ...

    def say(self, text: str) -> None: ...


class Membership:
    """The engines of one start of a run."""

    def __init__(self, plan: RunContext, watcher: Watcher) -> None:
        self.sizes = plan.config.engine.sizes
        self._placed = {index: place_engine(plan, index, tp) for index, tp in self.sizes.items()}
        self.changed = False  # since this start of the run
        self._plan, self._watcher, self._control_api = plan, watcher, ControlApi(plan.run)
        self._next = len(self.sizes)
        self._joining: set[int] = set()  # being started for the first time
        self._leaving: set[int] = set()
        self._draining: dict[Any, int] = {}  # calls to the controller that return when it is done
        self._ending: dict[Any, int] = {}  # calls that end a server
        self._emptying: dict[Any, int] = {}  # calls that return when its records were trained

    @property
    def actors(self) -> dict[int, ActorHandle[EngineActor]]:
        return {index: placed.actor for index, placed in self._placed.items()}

    @property
    def present(self) -> dict[int, ActorHandle[EngineActor]]:
        """Those that the controller knows."""
        return {i: actor for i, actor in self.actors.items() if i not in self._joining}

    def may_restart(self, index: int) -> bool:
        """Whether an engine that died is wanted."""
        return index in self._placed and index not in self._leaving

    def replace(self, index: int) -> None:
        """The host itself died: another one in its place."""
        self._placed[index].give_up()
        self._placed[index] = place_engine(self._plan, index, self.sizes[index])

    def poll(self) -> None:
        """Answer what was asked, and go on with engines that leave."""
        for name, question in self._control_api.poll():
            try:
                answer = {"answer": self._answer(question)}
            except MoerlError as error:
                answer = {"refused": str(error)}
            log.info("asked %s, answered %s", question, answer)
            self._control_api.answer(name, answer)
        for ref in _ready(self._draining):
            self._drained(ref, self._draining.pop(ref))
        for ref in _ready(self._ending):
            self._ended(ref, self._ending.pop(ref))
        for ref in _ready(self._emptying):
            self._emptied(ref, self._emptying.pop(ref))
        busy = {*self._draining.values(), *self._ending.values(), *self._emptying.values()}
        for index in self._leaving - busy:
            self._drain(index)  # for the first time, or the controller died meanwhile

    def joined(self, index: int) -> bool:
        """An engine is up: whether that is its first time, and the controller was told."""
        if index not in self._joining:
            return False
        self._joining.remove(index)
        self._watcher.tell(
            lambda controller: controller.engine_joins.remote(
                index, self._placed[index].actor, self.sizes[index]
            )
        )
        self._watcher.say(f"engine {index} has joined")
        return True

    def gave_up(self, index: int, error: MoerlError) -> bool:
        """An engine did not start: whether it was to join, and is forgotten."""
        if index not in self._joining:
            return False
        self._watcher.say(f"engine {index} did not start and is left out: {error}")
        self._forget(index)
        return True

    # --- requests -----------------------------------------------------------------------------
    def _answer(self, question: dict[str, Any]) -> Any:
        match question:
            case {"do": "add", "tp": int(tp)} if tp >= 0:
                return self._add(tp or self._plan.config.engine.tp)
            case {"do": "remove", "engine": int(index)}:
                return self._remove(index)
            case {"do": "list"}:
                return self._list()
            case _:
                raise MoerlError(f"{question} is no question")

    def _add(self, tp: int) -> int:
        index, self._next = self._next, self._next + 1
        self.changed = True
        self.sizes[index] = tp
        self._placed[index] = place_engine(self._plan, index, tp)
        self._joining.add(index)
        self._watcher.start_engine(index)
        self._watcher.say(f"engine {index} (tp {tp}) is added")
        return index

    def _remove(self, index: int) -> str:
        down = [one for one in self._placed if self._watcher.is_down(one)]
        check_removal(index, self._placed, [*self._joining, *down], self._leaving)
        self.changed = True
        if index in self._joining:
            self._forget(index)
            self._watcher.say(f"engine {index} is not started any more")
            return "gone"
        self._leaving.add(index)
        self._watcher.say(f"engine {index} leaves")
        return "leaving"

    def _list(self) -> list[dict[str, Any]]:
        known = self._watcher.tell(lambda controller: controller.engines.remote()) or []
        rows = [row | {"tp": self.sizes[row["engine"]]} for row in known]
        starting = {"state": "starting", "version": "", "groups": 0}
        rows += [{"engine": i, "tp": self.sizes[i]} | starting for i in sorted(self._joining)]
        return rows

    # --- engines that leave ---------------------------------------------------------------------
    def _drain(self, index: int) -> None:
        ref = self._watcher.ask(lambda controller: controller.engine_leaves.remote(index))
        if ref is not None:
            self._draining[ref] = index

    def _drained(self, ref: Any, index: int) -> None:
        try:
            self._watcher.get(ref, "controller")
        except EngineError as error:
            log.warning("engine %d is not drained yet: %s", index, error)
            return
        is_down = self._watcher.is_down(index)
        self._watcher.forget_engine(index)
        if is_down:
            self._gone(index)
            return
        self._ending[self._placed[index].actor.leave.remote()] = index

    def _ended(self, ref: Any, index: int) -> None:
        """Its server has ended; on a cluster its host goes on serving what it sealed."""
        try:
            node = self._watcher.get(ref, f"engine {index}")
        except EngineError as error:
            log.warning("engine %d ended badly: %s", index, error)
            self._gone(index)
            return
        if is_local(self._plan.config.cluster):
            self._gone(index)
            return
        wait = self._watcher.ask(lambda controller: controller.records_leave.remote(node))
        if wait is not None:
            self._emptying[wait] = index
            self._watcher.say(f"engine {index} serves the last of its records")

    def _emptied(self, ref: Any, index: int) -> None:
        try:
            self._watcher.get(ref, "controller")
        except EngineError as error:
            log.warning("the records of engine %d are waited for again: %s", index, error)
            return
        self._gone(index)

    def _gone(self, index: int) -> None:
        self._leaving.remove(index)
        self._forget(index)
        self._watcher.write_pids()
        self._watcher.say(f"engine {index} has left")

    def _forget(self, index: int) -> None:
        self._joining.discard(index)
        self._watcher.forget_engine(index)
        self._placed.pop(index).give_up()
        del self.sizes[index]


def check_removal(
    index: int, engines: Collection[int], idle: Collection[int], leaving: Collection[int]
) -> None:
    """Raises ConfigError when the engine cannot be taken out.

    idle: engines that are being started, for the first time or again.
    """
    if index not in engines:
        known = ", ".join(map(str, sorted(engines)))
        raise ConfigError("ENGINE", index, f"the run's engines are {known}")
    if index in leaving:
        raise ConfigError("ENGINE", index, "it is leaving already")
    if index not in idle and not set(engines) - set(idle) - set(leaving) - {index}:
        raise ConfigError("ENGINE", index, "it is the last one that works: add another first")


def _ready(calls: dict[Any, int]) -> list[Any]:
    return ray.wait(list(calls), num_returns=len(calls), timeout=0)[0] if calls else []
