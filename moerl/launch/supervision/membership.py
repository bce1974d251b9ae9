"""Adds and removes engines of a running run; requests come over its control API.

An engine number is never reused.  A new engine is handed to the controller when its server is up,
and gets requests after its first publish.  A leaving engine gets no new requests; its running
requests are interrupted and continue on other engines, and its process ends when the trainer has
stopped publishing to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol

from moerl.core.errors import ConfigError, EngineError, MoerlError
from moerl.launch.nodes.control_api import ControlApi
from moerl.launch.run_context import RunContext
from moerl.launch.supervision.controller_supervisor import ControllerSupervisor
from moerl.launch.supervision.supervisor_context import PlacedActor, SupervisorContext

log = logging.getLogger(__name__)

_STOP_S = 60.0  # seconds a host may take to end its server


class EngineWatcher(Protocol):
    """The supervisor of engines, as membership uses it.  No method waits."""

    def start(self, index: int) -> None: ...

    def forget(self, index: int) -> None:
        """Stop watching and restarting it."""
        ...

    def is_down(self, index: int) -> bool:
        """True after it died, until it is up again."""
        ...


class Membership:
    """The engines of one start of a run."""

    def __init__(
        self,
        run_context: RunContext,
        context: SupervisorContext,
        controller: ControllerSupervisor,
        watcher: EngineWatcher,
    ) -> None:
        self.sizes = run_context.config.engine.sizes
        self.changed = False  # engines joined or left since this start of the run
        self._run_context, self._context, self._controller = run_context, context, controller
        self._watcher, self._control_api = watcher, ControlApi(run_context.run)
        self._placed: dict[int, PlacedActor] = {}
        self._next = len(self.sizes)
        self._joining: set[int] = set()  # being started for the first time
        self._leaving: set[int] = set()
        self._busy: set[int] = set()  # leaving engines with a call in progress
        self._excluded: set[int] = set()  # leaving engines that kept dying

    def place_all(self) -> None:
        """Give every engine of the configuration a host."""
        for index in self.sizes:
            self._place(index)

    def _place(self, index: int) -> None:
        self._placed[index] = self._context.actors.engine(
            self._run_context, index, self.sizes[index]
        )

    @property
    def actors(self) -> dict[int, Any]:
        return {index: placed.actor for index, placed in self._placed.items()}

    @property
    def present(self) -> dict[int, Any]:
        """Engines that the controller knows."""
        return {i: actor for i, actor in self.actors.items() if i not in self._joining}

    @property
    def remaining(self) -> set[int]:
        """Engines that work, restart or join."""
        return set(self._placed) - self._leaving

    def lost(self) -> list[int]:
        """Engines that the controller knows and that are down, for good or not."""
        return [i for i in self.present if i in self._excluded or self._watcher.is_down(i)]

    def may_restart(self, index: int) -> bool:
        """True if an engine that died should be restarted."""
        return index in self._placed and index not in self._leaving

    def replace(self, index: int) -> None:
        """Start a new host for an engine whose host process died."""
        self._placed[index].give_up()
        self._place(index)

    def exclude(self, index: int) -> None:
        """Remove an engine that keeps dying: it leaves as after a request."""
        self.changed = True
        self._excluded.add(index)
        self._leaving.add(index)

    def poll(self) -> None:
        """Answer requests and advance the removal of leaving engines."""
        for name, question in self._control_api.poll():
            self._serve(name, question)
        for index in self._leaving - self._busy:
            self._drain(index)  # the first call, or the controller died meanwhile

    def joined(self, index: int) -> bool:
        """An engine is up.  Returns True, and informs the controller, if the engine is new."""
        if index not in self._joining:
            return False
        self._joining.remove(index)
        self._controller.tell(
            lambda controller: controller.engine_joins.remote(
                index, self._placed[index].actor, self.sizes[index]
            )
        )
        self._context.say(f"engine {index} has joined")
        return True

    def gave_up(self, index: int, error: MoerlError) -> bool:
        """An engine did not start.  Returns True if it was new; it is then forgotten.

        Raises EngineError when no other engine remains.
        """
        if index not in self._joining:
            return False
        self._context.say(f"engine {index} did not start and is left out: {error}")
        self._forget(index)
        if not self.remaining:
            raise EngineError(f"no engine is left: {error}") from error
        return True

    # --- requests -----------------------------------------------------------------------------
    def _serve(self, name: str, question: dict[str, Any]) -> None:
        work: Callable[[], int | str]
        match question:
            case {"do": "add", "tp": int(tp)} if tp >= 0:
                work = partial(self._add, tp or self._run_context.config.engine.tp)
            case {"do": "remove", "engine": int(index)}:
                work = partial(self._remove, index)
            case {"do": "list"}:
                self._list(name)
                return
            case _:
                self._reply(name, question, {"refused": f"{question} is not a valid request"})
                return
        try:
            answer: dict[str, Any] = {"answer": work()}
        except MoerlError as error:
            answer = {"refused": str(error)}
        self._reply(name, question, answer)

    def _reply(self, name: str, question: dict[str, Any], answer: dict[str, Any]) -> None:
        log.info("asked %s, answered %s", question, answer)
        self._control_api.answer(name, answer)

    def _add(self, tp: int) -> int:
        placed = self._context.actors.engine(
            self._run_context, self._next, tp
        )  # refuses one without room
        index, self._next = self._next, self._next + 1
        self.changed = True
        self.sizes[index] = tp
        self._placed[index] = placed
        self._joining.add(index)
        self._watcher.start(index)
        self._context.say(f"engine {index} (tp {tp}) is added")
        return index

    def _remove(self, index: int) -> str:
        down = [one for one in self._placed if self._watcher.is_down(one)]
        check_removal(index, self._placed, [*self._joining, *down], self._leaving)
        self.changed = True
        if index in self._joining:
            self._forget(index)
            self._context.say(f"engine {index} is no longer being started")
            return "gone"
        self._leaving.add(index)
        self._context.say(f"engine {index} leaves")
        return "leaving"

    def _list(self, name: str) -> None:
        def rows(known: list[dict[str, Any]]) -> None:
            sizes = self.sizes  # one may have left since
            found = [row | {"tp": sizes[row["engine"]]} for row in known if row["engine"] in sizes]
            starting = {"state": "starting", "version": "", "groups": 0}
            found += [{"engine": i, "tp": sizes[i]} | starting for i in sorted(self._joining)]
            self._reply(name, {"do": "list"}, {"answer": found})

        def failed(_: MoerlError) -> None:
            rows([])

        if not self._controller.ask(lambda controller: controller.engines.remote(), rows, failed):
            rows([])

    # --- engines that leave ---------------------------------------------------------------------
    def _drain(self, index: int) -> None:
        def failed(error: MoerlError) -> None:
            self._busy.discard(index)
            log.warning("engine %d is not drained yet: %s", index, error)

        if self._controller.ask(
            lambda controller: controller.engine_leaves.remote(index),
            lambda _: self._drained(index),
            failed,
        ):
            self._busy.add(index)

    def _drained(self, index: int) -> None:
        is_down = self._watcher.is_down(index)
        self._watcher.forget(index)
        if is_down:
            self._gone(index)
            return

        def failed(error: MoerlError) -> None:
            log.warning("engine %d ended badly: %s", index, error)
            self._gone(index)

        ref = self._placed[index].actor.leave.remote()
        self._context.calls.send(
            ref, f"engine {index}", lambda node: self._ended(node, index), failed, _STOP_S
        )

    def _ended(self, node: str, index: int) -> None:
        """The server of an engine ended; on a cluster its host still serves its sealed records."""
        if self._context.is_local:
            self._gone(index)
            return

        def failed(error: MoerlError) -> None:
            self._busy.discard(index)
            log.warning("still waiting for the records of engine %d: %s", index, error)

        if self._controller.ask(
            lambda controller: controller.records_leave.remote(node),
            lambda _: self._gone(index),
            failed,
        ):
            self._context.say(f"engine {index} serves its remaining records")
        else:
            self._busy.discard(index)

    def _gone(self, index: int) -> None:
        for engines in (self._leaving, self._busy, self._excluded):
            engines.discard(index)
        self._forget(index)
        self._context.say(f"engine {index} has left")

    def _forget(self, index: int) -> None:
        self._joining.discard(index)
        self._watcher.forget(index)
        self._placed.pop(index).give_up()
        self._context.actors.engine_has_left(index)
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
