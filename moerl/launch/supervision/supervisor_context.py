"""State and services that the supervisors of engines, controller and trainer share.

The supervisor has one thread and must see every death and signal within seconds.  So it never waits
for one answer of an actor: `RemoteCalls` takes a call with the functions that handle its answer,
and waits for any of them.  `RayActors` is the whole interface to Ray: tests pass scripted actors.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.config.clusters import is_local
from moerl.config.schema import Config
from moerl.core.errors import MoerlError
from moerl.launch.supervision.actors import RayActors
from moerl.launch.supervision.ray_proxy import CallTimeout
from moerl.launch.supervision.restarts import Restarts
from moerl.observe.console import Console
from moerl.observe.metrics import newest_row
from moerl.runtime.beside import LineWriter
from moerl.runtime.run_dir import RunDir
from moerl.runtime.stack_dump import stacks

log = logging.getLogger(__name__)

POLL_S = 0.5
START_S = 300.0  # seconds an actor of this machine may take to start
_PINGS = 6  # questions to an actor per supervision.answer_timeout_s
_LONGEST_TICK_S = 5.0  # a longer pause between two polls was a suspended process


@dataclass(frozen=True, slots=True)
class _Call:
    name: str  # of the actor, for error messages
    then: Callable[[Any], None]
    failed: Callable[[MoerlError], None]
    limit_s: float
    deadline: float  # seconds of `RemoteCalls._now`


class RemoteCalls:
    """The calls in progress."""

    def __init__(self, actors: RayActors, clock: Callable[[], float]) -> None:
        self._actors, self._clock = actors, clock
        self._calls: dict[Any, _Call] = {}
        # Deadlines count the time in which this process polled: after a suspension (SIGSTOP, a
        # sleeping machine) answers need a moment to arrive.
        self._now, self._polled = 0.0, clock()

    def send(
        self,
        ref: Any,
        name: str,
        then: Callable[[Any], None],
        failed: Callable[[MoerlError], None],
        limit_s: float = math.inf,
    ) -> None:
        """Handle the answer of a call: `then`, or `failed` with the error or a CallTimeout."""
        self._calls[ref] = _Call(name, then, failed, limit_s, self._now + limit_s)

    def poll(self, timeout_s: float) -> None:
        """Wait for at most timeout_s, then handle answers and missed deadlines."""
        ended = self._actors.wait(list(self._calls), timeout_s)
        now = self._clock()
        self._now += min(now - self._polled, _LONGEST_TICK_S)
        self._polled = now
        for ref in ended:
            if (call := self._calls.pop(ref, None)) is not None:  # an earlier one may drop it
                self._deliver(ref, call)
        for ref, call in list(self._calls.items()):
            if call.deadline <= self._now and self._calls.pop(ref, None) is not None:
                late = f"{call.name} did not answer within {call.limit_s:g} s"
                call.failed(CallTimeout(late))

    def _deliver(self, ref: Any, call: _Call) -> None:
        try:
            answer = self._actors.result(ref, call.name)
        except MoerlError as error:
            call.failed(error)
        else:
            call.then(answer)

    def drop(self, name: str = "") -> None:
        """Forget the calls to an actor, or all."""
        self._calls = {ref: one for ref, one in self._calls.items() if name and one.name != name}


class HangReports:
    """Writes stacks in a thread: processes take half a second each."""

    def __init__(self, console: Console, logs: Path) -> None:
        self._console, self._logs = console, logs
        self._written: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def write(
        self,
        name: str,
        what: str,
        processes: list[tuple[int, Path]],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the stacks of processes of this machine to the log.

        processes: (pid, log); then: called by `act` when they are written.
        """
        self._console.event(f"{name}: {what}; its stacks are in {self._logs / 'root.log'}")

        def work() -> None:
            try:
                log.error("%s\n%s", f"{name}: {what}", stacks(processes))
            finally:
                self._written.put(then)

        threading.Thread(target=work, daemon=True, name="stacks").start()

    def act(self) -> None:
        while not self._written.empty():
            self._written.get()()


@dataclass(frozen=True, slots=True)
class SupervisorContext:
    """One start of a run."""

    config: Config
    run: RunDir
    console: Console
    actors: RayActors
    clock: Callable[[], float]  # monotonic seconds
    calls: RemoteCalls
    restarts: Restarts
    hangs: HangReports
    pids: dict[str, int]  # of the processes, by name
    notices: LineWriter  # failures, for the report

    @property
    def is_local(self) -> bool:
        """All processes are on this machine: their pids can be used here."""
        return is_local(self.config.cluster)

    @property
    def answer_s(self) -> float:
        """Longest time for an answer."""
        return self.config.supervision.answer_timeout_s

    @property
    def ping_s(self) -> float:
        """Time between two questions for a pid."""
        return self.answer_s / _PINGS

    def ask_pid(
        self,
        name: str,
        actor: Any,
        failed: Callable[[MoerlError], None] = lambda error: None,
    ) -> None:
        def note(pid: int) -> None:
            self.pids[name] = pid

        self.calls.send(actor.pid.remote(), name, note, failed, self.answer_s)

    def say(self, text: str) -> None:
        log.info("%s", text)
        self.console.event(text)

    def note(self, text: str) -> None:
        """Say it, also on the page of the run."""
        self.say(text)
        row = newest_row(self.run.metrics) or {"step": -1}
        self.notices.write([{"step": row["step"] + 1, "time_s": time.time(), "text": text}])
