"""Adds and removes engines of a running run; requests come over its control API.

An engine number is never reused.  A new engine is handed to the controller when its server is up,
and gets requests after its first publish.  A leaving engine gets no new requests; its running ones
are interrupted and continue on other engines, and its process ends when the trainer has stopped
publishing to it.
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
    """What membership needs from the supervisor."""

    def tell(self, call: Callable[[Any], Any]) -> Any:
        """Result of a call to the controller, given its handle; None while it is down."""
        ...

    def ask(self, call: Callable[[Any], Any]) -> Any:
        """A pending call to the controller; None while it is down."""
        ...

    def get(self, ref: Any, name: str, timeout_s: float | None = None) -> Any:
        """The result of a remote call.  Raises MoerlError."""
        ...

    def start_engine(self, index: int) -> None: ...

    def forget_engine(self, index: int) -> None:
        """Stop watching and restarting it."""
        ...

    def is_down(self, index: int) -> bool:
        """True after it died, until it is up again."""
        ...

    def write_pids(self) -> None: ...

    def say(self, text: str) -> None: ...


class Membership:
    """The engines of one start of a run."""

    def __init__(self, plan: RunContext, watcher: Watcher) -> None:
        self.sizes = plan.config.engine.sizes
        self._placed = {index: place_engine(plan, index, tp) for index, tp in self.sizes.items()}
        self.changed = False  # engines joined or left since this start of the run
        self._plan, self._watcher, self._control_api = plan, watcher, ControlApi(plan.run)
        self._next = len(self.sizes)
        self._joining: set[int] = set()  # being started for the first time
        self._leaving: set[int] = set()
        self._draining: dict[Any, int] = {}  # calls that return when it is drained
        self._ending: dict[Any, int] = {}  # calls that end a server
        self._emptying: dict[Any, int] = {}  # calls that return when its records are trained

    @property
    def actors(self) -> dict[int, ActorHandle[EngineActor]]:
        return {index: placed.actor for index, placed in self._placed.items()}

    @property
    def present(self) -> dict[int, ActorHandle[EngineActor]]:
        """Engines that the controller knows."""
        return {i: actor for i, actor in self.actors.items() if i not in self._joining}

    def may_restart(self, index: int) -> bool:
        """True if an engine that died should be restarted."""
        return index in self._placed and index not in self._leaving

    def replace(self, index: int) -> None:
        """Start a new host for an engine whose host process died."""
        self._placed[index].give_up()
        self._placed[index] = place_engine(self._plan, index, self.sizes[index])

    def poll(self) -> None:
        """Answer requests and advance the removal of leaving engines."""
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
            self._drain(index)  # the first call, or the controller died meanwhile

    def joined(self, index: int) -> bool:
        """An engine is up.  Returns True if it is new and the controller was told."""
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
        """An engine did not start.  Returns True if it was new; it is then forgotten."""
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
                raise MoerlError(f"{question} is not a valid request")

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
            self._watcher.say(f"engine {index} is no longer being started")
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
        """The server of an engine ended; on a cluster its host still serves its sealed records."""
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
            self._watcher.say(f"engine {index} serves its remaining records")

    def _emptied(self, ref: Any, index: int) -> None:
        try:
            self._watcher.get(ref, "controller")
        except EngineError as error:
            log.warning("still waiting for the records of engine %d: %s", index, error)
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
    """Raises ConfigError when the engine cannot be removed.

    idle: engines that are being started or restarted.
    """
    if index not in engines:
        known = ", ".join(map(str, sorted(engines)))
        raise ConfigError("ENGINE", index, f"the run's engines are {known}")
    if index in leaving:
        raise ConfigError("ENGINE", index, "it is leaving already")
    if index not in idle and not set(engines) - set(idle) - set(leaving) - {index}:
        raise ConfigError("ENGINE", index, "it is the last working engine: add another first")


def _ready(calls: dict[Any, int]) -> list[Any]:
    return ray.wait(list(calls), num_returns=len(calls), timeout=0)[0] if calls else []
