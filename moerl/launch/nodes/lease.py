"""Sign of life of a run for the processes on its other nodes: a counter in its endpoints folder.

The root process counts on as long as it lives and removes the file when the run is over.  A reader
compares the counter with its last reading, by its own monotonic clock, so clocks of nodes are never
compared.  A counter that stands still for `lease_s` means that the root process is lost, with
its node or alone: SIGKILL leaves the rest of the folder as it is.

A reader trusts a file only after it has seen it change: one of an earlier start stands still.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from moerl.core.errors import MoerlError, TrainerError

T = TypeVar("T")
_LOOK_S = 0.5
_PARTS = 12  # renewals per lease


class RunEnded(MoerlError):
    """The root process ended the run, in any way."""


class LeaseKeeper:
    """The root process's side."""

    def __init__(
        self, path: Path, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._lease_s, self._clock = path, lease_s, clock
        self._count, self._due = 0, clock()

    def renew(self) -> None:
        """Count on when it is time; call often.

        The file is written in place: on NFS a reader that opens it sees the text of the last writer
        that closed it, while a renamed file is seen only when cached names expire, after up to a
        minute.
        """
        if self._clock() < self._due:
            return
        self._due = self._clock() + self._lease_s / _PARTS
        self._count += 1
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(file, f"{self._count:016d} {self._lease_s:015.3f}\n".encode(), 0)
            finally:
                os.close(file)
        except OSError as error:  # readers wait for a whole lease
            print(f"moerl: {self._path} was not renewed: {error}", file=sys.stderr)


class LeaseReader:
    """The side of another node.  `check` raises as soon as the run is known to be over."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._seen = b""
        self._since = clock()  # when the counter was seen to change
        self._is_live = False  # it was seen to change
        self._absent = 0  # looks in a row without a file

    def wait(self, timeout_s: float) -> None:
        """Return when the root process is alive.  Raises TrainerError on timeout."""
        deadline = self._clock() + timeout_s
        while not self._look():
            if self._clock() > deadline:
                raise TrainerError(
                    f"{self._path.parent} names no living controller after {timeout_s:g} s"
                )
            time.sleep(_LOOK_S)

    def until(self, find: Callable[[], T], timeout_s: float, missing: str) -> T:
        """The first true result of `find`.  Raises TrainerError(missing), and as `check`."""
        deadline = self._clock() + timeout_s
        while not (found := find()):
            self.check()
            if self._clock() > deadline:
                raise TrainerError(missing)
            time.sleep(_LOOK_S)
        return found

    def check(self) -> None:
        """Raises RunEnded when the run is over, TrainerError when its root process is lost."""
        self._look()
        if self._absent >= 2:  # file servers have short failures
            raise RunEnded("the run has ended")
        waited_s, lease_s = self._clock() - self._since, _lease_in(self._seen)
        if waited_s > lease_s:
            raise TrainerError(
                f"no sign of the run's root process for {waited_s:.0f} s "
                f"(supervision.lease_s = {lease_s:g}): it, or its node, is lost"
            )

    def _look(self) -> bool:
        """True once the file was seen to change."""
        try:
            found = self._path.read_bytes()
        except FileNotFoundError:
            self._absent += self._is_live
            return self._is_live
        except OSError:  # says nothing about the root process
            self._since = self._clock()
            return self._is_live
        self._absent = 0
        if found != self._seen:
            self._is_live = self._is_live or bool(self._seen)
            self._seen, self._since = found, self._clock()
        return self._is_live


def _lease_in(content: bytes) -> float:
    """Seconds of a lease, as its file says; 60 when a torn read does not."""
    try:
        return float(content.split()[1])
    except (IndexError, ValueError):
        return 60.0
