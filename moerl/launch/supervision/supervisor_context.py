"""What the parts of the supervisor share: engines, controller and trainer have a module each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moerl.config.clusters import is_local
from moerl.config.schema import Config
from moerl.launch.supervision.hang_reports import HangReports
from moerl.launch.supervision.remote_calls import Actors, RemoteCalls
from moerl.launch.supervision.restarts import Restarts
from moerl.observe.console import Console
from moerl.runtime.run_dir import RunDir

log = logging.getLogger(__name__)

POLL_S = 0.5
START_S = 300.0  # seconds an actor of this machine may take to start
_PINGS = 6  # questions to an actor per supervision.answer_timeout_s


@dataclass(frozen=True, slots=True)
class SupervisorContext:
    """One start of a run."""

    config: Config
    run: RunDir
    console: Console
    actors: Actors
    clock: Callable[[], float]  # monotonic seconds
    calls: RemoteCalls
    restarts: Restarts
    hangs: HangReports
    pids: dict[str, int]  # of the processes, by name

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

    def ask_pid(self, name: str, actor: Any) -> None:
        def note(pid: int) -> None:
            self.pids[name] = pid

        self.calls.send(actor.pid.remote(), name, note, lambda _: None, self.answer_s)

    def say(self, text: str) -> None:
        log.info("%s", text)
        self.console.event(text)
