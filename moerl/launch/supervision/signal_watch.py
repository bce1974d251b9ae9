"""Ctrl-C and SIGTERM of the root process: noticed by its loop, or by a thread when the loop hangs.

Python runs a signal handler between two bytecodes of the main thread, so never while that thread is
inside a call of C that does not return, as Ray's calls do when its server is gone.  The kernel
writes to the wake-up descriptor in any case, and a thread reads it.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

from moerl.core.errors import MoerlError

INTERRUPT = "the run was interrupted"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(MoerlError):
    """Ctrl-C or SIGTERM."""


class SignalWatch:
    """Use from the main thread."""

    def __init__(self, end_at_once: Callable[[], None], patience_s: float = 10.0) -> None:
        """end_at_once: called in a thread when nobody calls `check` for patience_s."""
        self._end_at_once, self._patience_s = end_at_once, patience_s
        self._came, self._noticed = threading.Event(), threading.Event()

    def install(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in _SIGNALS:
            signal.signal(signum, self._note)
        threading.Thread(target=self._watch, daemon=True, name="signals").start()

    def check(self) -> None:
        """Raises Interrupted after a signal.  Call often."""
        if self._came.is_set():
            self._noticed.set()
            raise Interrupted(INTERRUPT)

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self._came.set()  # an exception raised here would surface inside Ray

    def _watch(self) -> None:
        while self._reader.recv(1)[0] not in _SIGNALS:
            pass
        self._came.set()
        if not self._noticed.wait(self._patience_s):
            self._end_at_once()
