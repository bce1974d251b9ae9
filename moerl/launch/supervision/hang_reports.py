"""Reports of processes that hang: their stacks are written to the log before they are ended."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from moerl.observe.console import Console
from moerl.runtime.stack_dump import stacks

log = logging.getLogger(__name__)


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
