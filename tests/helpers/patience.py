"""Limits of waiting that grow with the load of the machine.

A test waits for an event.  Its limit says how long the event takes at most on a machine that has
nothing else to do; other processes beside the test stretch it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_LOAD = Path("/proc/loadavg")  # "1.21 0.90 0.70 3/412 9876": the fourth is running/existing


def patience(seconds: float) -> float:
    """`seconds` times the processes per core that want to run, if these are more than one.

    It is the larger of the number at this moment and the mean of the last minute.
    """
    minute, _, _, processes, _ = _LOAD.read_text(encoding="ascii").split()
    wanting = max(float(minute), float(processes.split("/")[0]))
    return seconds * max(1.0, wanting / (os.cpu_count() or 1))


class Patience:
    """A limit whose time passes more slowly while the machine is busy.

    `clock` and `stretched` are replaced by the tests of this class.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        stretched: Callable[[float], float] = patience,
    ) -> None:
        self._left, self._clock, self._stretched = seconds, clock, stretched
        self._seen = clock()

    def over(self) -> bool:
        """Call it at every look at the event."""
        now = self._clock()
        self._left -= (now - self._seen) / self._stretched(1.0)
        self._seen = now
        return self._left < 0.0


def until(
    event: Callable[[], bool], seconds: float, why: Callable[[], str] | str = "no event"
) -> None:
    """Wait for an event; an assertion fails with `why` when the stretched limit is over."""
    if not happens(event, seconds):
        raise AssertionError(
            f"after {seconds} s of a free machine: {why if isinstance(why, str) else why()}"
        )


def happens(event: Callable[[], bool], seconds: float) -> bool:
    """Whether an event comes before the stretched limit is over."""
    limit = Patience(seconds)
    while not event():
        if limit.over():
            return event()
        time.sleep(0.05)
    return True
