"""Writes report.html while the run trains, in a process of its own at the lowest priority.

A page of a running run reads itself again, so a browser follows it without a server.  Charts take
seconds of a core, so the next page waits five times as long as the last one took.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable

from moerl.core.errors import MoerlError
from moerl.launch.supervision.supervisor_context import SupervisorContext
from moerl.runtime.beside import Beside

_SHARE = 5  # seconds of pause per second of writing
_NICE = 19


class LiveReport:
    """At most one writer at a time; the last page is written by the end of the run."""

    def __init__(
        self, context: SupervisorContext, start: Callable[[list[str]], subprocess.Popen[bytes]]
    ) -> None:
        """Write nothing yet.  start: of a command, `start_nice`."""
        self._context, self._start = context, start
        self._interval_s = context.config.observe.report_s
        self._due: float | None = None  # clock seconds; None before the first step
        self._begun = 0.0  # clock seconds
        self._writer: subprocess.Popen[bytes] | None = None
        self._is_told = False
        self._beside = Beside("the live report", context.note)

    def poll(self, has_steps: bool) -> None:
        """Begin a page when it is time."""
        now = self._context.clock()
        if not self._interval_s or not has_steps:
            return
        if self._due is None:
            self._due = now + self._interval_s
        if self._writer is not None:
            if (code := self._writer.poll()) is None:
                return
            self._writer = None
            self._due = max(self._due, now + _SHARE * (now - self._begun))
            self._ended(code)
        if now >= self._due:
            self._begun, self._due = now, now + self._interval_s
            root = str(self._context.run.root)
            try:
                self._writer = self._start([sys.executable, "-m", "moerl", "report", root])
            except OSError as error:  # no process, no memory
                self._beside.failed(error)

    def _ended(self, code: int) -> None:
        if code:
            return self._beside.failed(MoerlError(f"`moerl report` ended with status {code}"))
        self._beside.worked()
        if not self._is_told:
            self._is_told = True
            self._context.say(f"{self._context.run.report} follows the run")


def start_nice(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a command behind all other processes, without output.  Raises OSError."""
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
    return process
