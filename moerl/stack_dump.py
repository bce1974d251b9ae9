"""Where every thread of a process is: written into its log when somebody asks.

A wait that takes too long says what it waits for and from whom; the stacks say why.  SIGURG asks:
the handler is C code (faulthandler), so it answers from a process that hangs inside C or holds the
interpreter lock, and a process that did not register ignores the signal.

Rejected: py-spy (a dependency that needs ptrace, which containers forbid).
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

_WRITE_S, _PAUSE_S = 0.5, 0.05  # for the asked to write; between two looks


def write_on_request(log: Path | None = None) -> None:
    """From now on SIGURG makes this process append the stacks of all its threads to `log`.

    log: None = standard error.
    """
    # stays open as long as the process: the handler cannot open files
    file = sys.stderr if log is None else log.open("a")
    faulthandler.register(signal.SIGURG, file=file, all_threads=True)


def stacks(processes: Iterable[tuple[int, Path]]) -> str:
    """Ask processes (pid, log) of this machine; what they wrote, one after the other.

    Processes may share a log: each is asked alone.
    """
    parts = []
    for pid, log in processes:
        begin = log.stat().st_size if log.exists() else 0
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGURG)
            parts.append(f"--- process {pid}, {log.name}\n{_answer(log, begin) or '(no answer)'}")
    return "\n".join(parts)


def _answer(log: Path, begin: int) -> str:
    """What is written behind `begin`: it has come when there is some and no more follows."""
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
