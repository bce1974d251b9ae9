"""The engines under supervision: started, pinged, restarted, excluded when they keep dying.

An engine is a server and its host, a Ray actor that starts it.  A server that died is started again
by its host; a host that died or hangs is replaced.

Engines join and leave a running run on request over its control API.  An engine number is never
reused.  A new engine is handed to the controller when its server is up, and gets requests after its
first publish.  A leaving engine gets no new requests; its running requests are interrupted and
continue on other engines, and its process ends when the trainer has stopped publishing to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVarTuple, cast

from ray.exceptions import RayActorError

from moerl.config.clusters import takes_turns
from moerl.controller.controller import Controller
from moerl.core.errors import ConfigError, EngineError, MoerlError
from moerl.core.messages import Engine
from moerl.core.types import PolicyVersion
from moerl.launch.nodes.control_api import ControlApi
from moerl.launch.run_context import RunContext
from moerl.launch.supervision.actors import PlacedEngine
from moerl.launch.supervision.controller_supervisor import ControllerSupervisor
from moerl.launch.supervision.ray_proxy import ActorProxy, CallTimeout
from moerl.launch.supervision.supervisor_context import START_S, SupervisorContext

log = logging.getLogger(__name__)
Args = TypeVarTuple("Args")

_TURN_S = 1.0  # until the next question to a controller that is down
_STOP_S = 60.0  # seconds a host may take to end its server


class EngineSupervisor:
    """The engines of one start of a run, by number."""

    def __init__(
        self, context: SupervisorContext, run_context: RunContext, controller: ControllerSupervisor
    ) -> None:
        self.members = Membership(run_context, context, controller, self)
        self.are_up = False  # all of the first start
        self._context, self._controller = context, controller
        self._starting: set[int] = set()
        self._next_pings: dict[int, float] = {}  # clock seconds; inf while a question is open

    def start_all(self) -> None:
        for index in self.members.actors:
            self._start(index)

    def start(self, index: int) -> None:
        """Start an engine of a running run; where trainer and engines take turns, in theirs."""
        self._starting.add(index)
        if not takes_turns(self._context.config.cluster):
            self._start(index)
            return

        def begun(_: object) -> None:
            self._start(index)

        def failed(_: MoerlError) -> None:
            self._context.restarts.postpone(f"engine {index}", _TURN_S, lambda: self.start(index))

        if not self._controller.ask(begun, failed, Controller.generating):
            failed(EngineError("the controller is down"))

    def _start(self, index: int) -> None:
        name = f"engine {index}"
        self._context.console.wait(name)
        self._starting.add(index)
        self._context.calls.send(
            self.members.actors[index].ask.remote("start", PolicyVersion(0, 0)),
            name,
            lambda status: self._is_up(index, status.pid),
            lambda error: self._start_failed(index, error),
        )

    def _is_up(self, index: int, pid: int) -> None:
        name = f"engine {index}"
        self._starting.discard(index)
        self._context.pids[f"engine-{index}"] = pid
        watch = self.members.actors[index].ask.remote("watch")
        self._context.calls.send(
            watch,
            name,
            lambda _: self._died(index, EngineError(f"{name} ended without a cause")),
            lambda error: self._died(index, error),
        )
        if not self.are_up:
            self._context.console.ready(name)
            self.are_up = not self._starting
            return
        if not self.members.joined(index):
            self._controller.tell(Controller.engine_back, index, self.members.proxy(index))
        self._context.restarts.is_back(name)

    def _start_failed(self, index: int, error: MoerlError) -> None:
        """A ConfigError too: an engine that joins may have a size that is not usable."""
        self._starting.discard(index)
        if not self.members.gave_up(index, error):
            self._died(index, error)

    def _died(self, index: int, error: MoerlError) -> None:
        name = f"engine {index}"
        self._context.pids.pop(f"engine-{index}", None)
        host_died = isinstance(error.__cause__, RayActorError)
        if self.members.may_restart(index):
            if why_not := self._context.restarts.died(name, error):
                self._exclude(index, why_not, error)
            else:
                self._context.restarts.schedule(name, error, lambda: self.start(index))
        self._controller.tell(Controller.engine_lost, index)
        if not host_died:
            return
        self._forget_host(index)
        if self.members.may_restart(index):
            self.members.replace(index)

    def _exclude(self, index: int, why: str, error: MoerlError) -> None:
        """Continue without an engine that keeps dying.  Raises EngineError when too few remain."""
        if not self._context.restarts.restarts_at_all:
            raise error
        self.members.exclude(index)
        num_left, quorum = len(self.members.remaining), self._context.config.sync.quorum
        what = f"engine {index} is excluded: {why}; {num_left} engine(s) are left"
        self._context.say(f"{what}: {str(error).splitlines()[0]}")
        if num_left < quorum:
            raise EngineError(f"{what}, sync.quorum = {quorum}: {error}") from error
        self._context.console.give_up(f"engine {index}")
        self._controller.tell(Controller.engine_excluded, index)

    def forget(self, index: int) -> None:
        """Stop watching and restarting a leaving engine."""
        name = f"engine {index}"
        self._context.calls.drop(name)
        self._starting.discard(index)
        self._context.restarts.forget(name)
        self._context.pids.pop(f"engine-{index}", None)
        self._forget_host(index)
        self._context.console.give_up(name)

    def is_down(self, index: int) -> bool:
        return index in self._starting or self._context.restarts.is_due(f"engine {index}")

    # --- hosts ----------------------------------------------------------------------------------
    def ping_hosts(self) -> None:
        """Ask every host for its pid: a host that does not answer in time hangs.

        A new host is given the time of a start on this machine; on a cluster it may wait for a node
        with room.
        """
        now = self._context.clock()
        for index, actor in self.members.actors.items():
            if now < self._next_pings.get(index, 0.0):
                continue
            self._next_pings[index] = float("inf")
            is_new = f"engine-{index}-host" not in self._context.pids
            first_s = START_S if self._context.is_local else float("inf")
            self._context.calls.send(
                actor.pid.remote(),
                f"engine {index}",
                partial(self._host_answered, index),
                partial(self._host_failed, index, actor),
                first_s if is_new else self._context.answer_s,
            )

    def _host_answered(self, index: int, pid: int) -> None:
        self._context.pids[f"engine-{index}-host"] = pid
        self._next_pings[index] = self._context.clock() + self._context.ping_s

    def _host_failed(self, index: int, actor: Any, error: MoerlError) -> None:
        if not isinstance(error, CallTimeout):  # its watch or its start reports a death
            self._next_pings[index] = self._context.clock() + self._context.ping_s
            return
        log_file = self._context.run.logs / f"engine-{index}.host.log"
        pid = self._context.pids.get(f"engine-{index}-host") if self._context.is_local else None
        self._context.hangs.write(
            f"the host of engine {index}",
            str(error),
            [(pid, log_file)] if pid else [],
            lambda: self._context.actors.kill(actor),
        )

    def _forget_host(self, index: int) -> None:
        """Forget a host that died; the next host is pinged as soon as it runs."""
        self._context.pids.pop(f"engine-{index}-host", None)
        self._next_pings.pop(index, None)


class Membership:
    """The engines of one start of a run."""

    def __init__(
        self,
        run_context: RunContext,
        context: SupervisorContext,
        controller: ControllerSupervisor,
        supervisor: EngineSupervisor,
    ) -> None:
        self.sizes = run_context.config.engine.sizes
        self.changed = False  # engines joined or left since this start of the run
        self._run_context, self._context, self._controller = run_context, context, controller
        self._supervisor, self._control_api = supervisor, ControlApi(run_context.run)
        self._placed: dict[int, PlacedEngine] = {}
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

    def proxy(self, index: int) -> Engine:
        """An engine as the controller calls it."""
        return cast(Engine, ActorProxy(self._placed[index].actor, f"engine {index}"))

    @property
    def present(self) -> dict[int, Engine]:
        """Engines that the controller knows."""
        return {i: self.proxy(i) for i in self._placed if i not in self._joining}

    @property
    def remaining(self) -> set[int]:
        """Engines that work, restart or join."""
        return set(self._placed) - self._leaving

    def lost(self) -> list[int]:
        """Engines that the controller knows and that are down, for good or not."""
        return [i for i in self.present if i in self._excluded or self._supervisor.is_down(i)]

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
        self._controller.tell(Controller.engine_joins, index, self.proxy(index), self.sizes[index])
        self._context.say(f"engine {index} has joined")
        return True

    def gave_up(self, index: int, error: MoerlError) -> bool:
        """Forget a new engine that did not start (True).  Raises EngineError without another."""
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
        if takes_turns(self._run_context.config.cluster):
            raise ConfigError(
                "cluster.colocated", "turns", "no engine joins: it would need the trainer's memory"
            )
        placed = self._context.actors.engine(
            self._run_context, self._next, tp
        )  # refuses one without room
        index, self._next = self._next, self._next + 1
        self.changed = True
        self.sizes[index] = tp
        self._placed[index] = placed
        self._joining.add(index)
        self._supervisor.start(index)
        self._context.say(f"engine {index} (tp {tp}) is added")
        return index

    def _remove(self, index: int) -> str:
        down = [one for one in self._placed if self._supervisor.is_down(one)]
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
            starting = {"state": "starting", "version": "", "requests": 0}
            found += [{"engine": i, "tp": sizes[i]} | starting for i in sorted(self._joining)]
            self._reply(name, {"do": "list"}, {"answer": found})

        def failed(_: MoerlError) -> None:
            rows([])

        if not self._controller.ask(rows, failed, Controller.engines):
            rows([])

    # --- engines that leave ---------------------------------------------------------------------
    def _drain(self, index: int) -> None:
        def drained(_: object) -> None:
            self._drained(index)

        self._ask_controller(index, "not drained yet", drained, Controller.engine_leaves, index)

    def _ask_controller(
        self,
        index: int,
        waiting: str,
        then: Callable[[object], None],
        method: Callable[[Controller, *Args], object],
        *args: *Args,
    ) -> bool:
        """Call the controller for a leaving engine, again at the next poll if the call fails."""

        def failed(error: MoerlError) -> None:
            self._busy.discard(index)
            log.warning("engine %d: %s: %s", index, waiting, error)

        is_asked = self._controller.ask(then, failed, method, *args)
        (self._busy.add if is_asked else self._busy.discard)(index)
        return is_asked

    def _drained(self, index: int) -> None:
        is_down = self._supervisor.is_down(index)
        self._supervisor.forget(index)
        if is_down:
            self._gone(index)
            return

        def failed(error: MoerlError) -> None:
            log.warning("engine %d ended badly: %s", index, error)
            self._gone(index)

        ref: Any = self._placed[index].actor.leave.remote()
        self._context.calls.send(
            ref, f"engine {index}", lambda node: self._ended(node, index), failed, _STOP_S
        )

    def _ended(self, node: str, index: int) -> None:
        """The server of an engine ended; on a cluster its host still serves its sealed records."""
        if self._context.is_local:
            self._gone(index)
            return

        def gone(_: object) -> None:
            self._gone(index)

        waiting = "still waiting for its records"
        if self._ask_controller(index, waiting, gone, Controller.records_leave, node):
            self._context.say(f"engine {index} serves its remaining records")

    def _gone(self, index: int) -> None:
        for engines in (self._leaving, self._busy, self._excluded):
            engines.discard(index)
        self._forget(index)
        self._context.say(f"engine {index} has left")

    def _forget(self, index: int) -> None:
        self._joining.discard(index)
        self._supervisor.forget(index)
        self._placed.pop(index).give_up()
        self._context.actors.engine_has_left(index)
        del self.sizes[index]


def check_removal(
    index: int, engines: Collection[int], idle: Collection[int], leaving: Collection[int]
) -> None:
    """Raises ConfigError when it cannot be removed.  idle: engines that start or restart."""
    if index not in engines:
        known = ", ".join(map(str, sorted(engines)))
        raise ConfigError("ENGINE", index, f"the run's engines are {known}")
    if index in leaving:
        raise ConfigError("ENGINE", index, "it is leaving already")
    if index not in idle and not set(engines) - set(idle) - set(leaving) - {index}:
        raise ConfigError("ENGINE", index, "it is the last working engine: add another first")
