"""The engines under supervision: started, pinged, restarted, excluded when they keep dying.

An engine is a server and its host, a Ray actor that starts it.  A server that died is started again
by its host; a host that died or hangs is replaced.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ray.exceptions import RayActorError

from moerl.core.errors import EngineError, MoerlError
from moerl.core.types import PolicyVersion
from moerl.launch.run_context import RunContext
from moerl.launch.supervision.controller_supervisor import ControllerSupervisor
from moerl.launch.supervision.membership import Membership
from moerl.launch.supervision.supervisor_context import START_S, CallTimeout, SupervisorContext


class EngineSupervisor:
    """The engines of one start of a run, by number."""

    def __init__(
        self, context: SupervisorContext, run_context: RunContext, controller: ControllerSupervisor
    ) -> None:
        self.members = Membership(run_context, context, controller, self)
        self.are_up = False  # all of the first start
        self._context, self._controller = context, controller
        self._starting: set[int] = set()
        self._next_pings: dict[int, float] = {}  # clock seconds; inf while a host is asked

    def start_all(self) -> None:
        for index in self.members.actors:
            self.start(index)

    def start(self, index: int) -> None:
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
            engine = self.members.actors[index]
            self._controller.tell(lambda controller: controller.engine_back.remote(index, engine))
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
        self._controller.tell(lambda controller: controller.engine_lost.remote(index))
        if not host_died:
            return
        self._forget_host(index)
        if self.members.may_restart(index):
            self.members.replace(index)

    def _exclude(self, index: int, why: str, error: MoerlError) -> None:
        """Continue without an engine that keeps dying.  Raises EngineError when too few remain."""
        if not self._context.restarts.policy.restarts_at_all:
            raise error
        self.members.exclude(index)
        num_left, quorum = len(self.members.remaining), self._context.config.sync.quorum
        what = f"engine {index} is excluded: {why}; {num_left} engine(s) are left"
        self._context.say(f"{what}: {str(error).splitlines()[0]}")
        if num_left < quorum:
            raise EngineError(f"{what}, sync.quorum = {quorum}: {error}") from error
        self._context.console.give_up(f"engine {index}")
        self._controller.tell(lambda controller: controller.engine_excluded.remote(index))

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
