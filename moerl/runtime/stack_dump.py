"""Thread stacks of a hanging process, written into its log on SIGURG.

A timeout names the call; the stacks show why.  The signal handler is C code
(faulthandler), so it works in a process that hangs inside C or holds the interpreter lock; a
process that did not register ignores the signal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_WRITE_S, _PAUSE_S = 0.5, 0.05  # seconds: for the process to write; between two polls


def write_on_request(log: Path | None = None) -> None:
    """On SIGURG append the stacks of all threads to `log`; None = standard error."""
    # stays open for the life of the process: the handler cannot open files
    file = sys.stderr if log is None else log.open("a", encoding="utf-8")
    faulthandler.register(signal.SIGURG, file=file, all_threads=True)


def stacks(processes: Iterable[tuple[int, Path]]) -> str:
    """Signal processes (pid, log) of this machine and return their stacks.

    Processes may share a log: they are signalled one at a time.
    """
    parts = []
    for pid, log in processes:
        begin = log.stat().st_size if log.exists() else 0
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGURG)
            parts.append(f"--- process {pid}, {log.name}\n{_answer(log, begin) or '(no answer)'}")
    return "\n".join(parts)


def _answer(log: Path, begin: int) -> str:
    """Text written after byte `begin`; complete when it is not empty and has stopped growing."""
    deadline, size = time.monotonic() + _WRITE_S, begin
    while time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        now = log.stat().st_size if log.exists() else 0
        if now == size > begin:
            break
        size = now
    with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace").strip()
    return ""
