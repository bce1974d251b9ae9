"""Which process holds a run's folder: one at a time writes it, and others name that process.

The lock file names the holder and its work; it counts only while it is locked, so the file of a
killed start, or of a copied run, says nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Literal

import psutil

from moerl.core.errors import MoerlError

State = Literal["starting", "training", "ending"]
_NAME = ".lock"
_ENDING_S = 60.0  # longest wait for an earlier start that is ending


@dataclass(frozen=True, slots=True)
class Holder:
    """The start that holds a run."""

    root: int = 0  # pid; 0 = unknown
    front: int = 0  # pid of its parent: the kernel ends the root when that dies
    host: str = ""
    state: State = "training"

    @property
    def is_ending(self) -> bool:
        """Whether the holder ends within seconds."""
        is_here = self.host == socket.gethostname()
        return self.state == "ending" or (is_here and not psutil.pid_exists(self.front))

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host != socket.gethostname() else ""
        state = "ending" if self.is_ending else self.state
        return f"{state} (process {self.root}{where})" if self.root else state


def holder_of(root: Path) -> Holder | None:
    """The start that holds the run now; None without one."""
    with contextlib.suppress(OSError), (root / _NAME).open(encoding="utf-8") as lock:
        return _blocked(lock, fcntl.LOCK_SH)
    return None


@contextlib.contextmanager
def held(root: Path, say: Callable[[str], None]) -> Iterator[Callable[[State], None]]:
    """Hold a run, from `starting` on; the yielded function notes a later state.

    Waits for an earlier start that is ending, after a sentence about it.  Raises MoerlError where
    another start holds the run.
    """
    with (root / _NAME).open("a+", encoding="utf-8") as lock:
        end, is_said = time.monotonic() + _ENDING_S, False
        while (other := _blocked(lock, fcntl.LOCK_EX)) is not None:
            if not other.is_ending or time.monotonic() > end:
                raise MoerlError(f"{root} is in use: it is {other}")
            if not is_said:
                say(f"{root} is {other}: waiting for its end")
            is_said = True
            time.sleep(0.2)
        own = Holder(os.getpid(), os.getppid(), socket.gethostname())

        def note(state: State) -> None:
            with contextlib.suppress(OSError):  # a full disk takes no note
                lock.truncate(0)
                lock.write(json.dumps(asdict(replace(own, state=state))))
                lock.flush()

        note("starting")
        yield note


def _blocked(lock: IO[str], kind: int) -> Holder | None:
    """The holder in the way of this kind of lock; None: this process has it."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        try:
            return Holder(**json.loads(lock.read()))
        except (ValueError, TypeError):  # at this moment it is being written
            return Holder()
    return None
