"""Writes that are repeated while the disk is full, and the sentences that say so.

The journal, metrics.jsonl, checkpoints and hf/ wait like this: the run continues when there is room
again, and ends with the cause after a limit.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moerl.core.errors import NonRetryableError, cause_of

log = logging.getLogger(__name__)

PAUSE_S = 1.0  # between two attempts
SAY_S = 30.0  # between two sentences about one wait
_FULL = tuple(f"[Errno {number}]" for number in (errno.ENOSPC, errno.EDQUOT))


def is_full(cause: str, folder: Path, wanted: int) -> bool:
    """Whether a write of `wanted` bytes below `folder` failed for want of room.

    cause: text of the error; torch wraps errors of a full disk in types of its own.
    """
    return any(mark in cause for mark in _FULL) or 0 <= free_bytes(folder) < wanted


def shortage(path: Path, wanted: int) -> str:
    """Path, bytes that a write needs, and bytes that are free."""
    free = free_bytes(path)
    return f"{path} needs {wanted:,} bytes and its disk has {max(0, free):,} free"


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of a path that need not exist; -1 = unknown."""
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except FileNotFoundError:
            continue
        except OSError:
            break
    return -1


@dataclass(frozen=True, slots=True)
class DiskPatience:
    """How long writes wait for room, and the receiver of the notice."""

    limit_s: float = 0.0
    tell: Callable[[str], object] = log.warning

    def begin(self, what: str) -> DiskWait:
        return DiskWait(what, self)

    def write(self, path: Path, wanted: int, write: Callable[[], None]) -> None:
        """Call `write`, of `wanted` bytes at `path`, again while the disk is full.

        Raises NonRetryableError for another OSError, and after the limit.
        """
        wait = self.begin(str(path))
        while True:
            try:
                write()
            except OSError as error:
                cause = cause_of(error)
                if is_full(cause, path, wanted) and wait.for_room(path, wanted, cause):
                    continue
                raise NonRetryableError(f"{path} was not written: {cause}") from error
            return wait.done()


class DiskWait:
    """One write that may have to wait for room."""

    def __init__(self, what: str, patience: DiskPatience) -> None:
        self._what, self._patience = what, patience
        self._since: float | None = None  # monotonic seconds of the first failure
        self._told = 0.0

    def again(self, why: str) -> bool:
        """Record a failure for want of room.  True: try again after PAUSE_S; False: fail."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since >= self._patience.limit_s:
            return False
        if not self._told or now - self._told >= SAY_S:
            self._told = now
            left = self._patience.limit_s - (now - self._since)
            self._patience.tell(
                f"{self._what} waits for room on the disk, {left:.0f} s at most: {why}"
            )
        return True

    def for_room(self, path: Path, wanted: int, cause: str) -> bool:
        """Wait until the disk of `path` may have room for `wanted` bytes.  False: fail.

        Nothing is tried meanwhile: an attempt would take the room of journal and metrics.
        """
        while self.again(f"{shortage(path, wanted)} ({cause})"):
            time.sleep(PAUSE_S)
            if not 0 <= free_bytes(path) < wanted:
                return True
        return False

    def done(self) -> None:
        """The write is over; another wait may begin."""
        if self._told and self._since is not None:
            waited_s = time.monotonic() - self._since
            self._patience.tell(f"{self._what}: written after {waited_s:.0f} s without room")
        self._since, self._told = None, 0.0
