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
import time
from collections.abc import Iterable
from pathlib import Path

_WRITE_S = 0.5  # for the asked to write


def write_on_request(log: Path) -> None:
    """From now on SIGURG makes this process append the stacks of all its threads to `log`."""
    file = log.open("a")  # stays open as long as the process: the handler cannot open files
    faulthandler.register(signal.SIGURG, file=file, all_threads=True)


def stacks(processes: Iterable[tuple[int, Path]]) -> str:
    """Ask processes (pid, log) of this machine; what they wrote, one after the other."""
    asked = []
    for pid, log in processes:
        begin = log.stat().st_size if log.exists() else 0
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGURG)
            asked.append((pid, log, begin))
    time.sleep(_WRITE_S)
    parts = []
    for pid, log, begin in asked:
        with log.open("rb") as file:
            file.seek(begin)
            text = file.read().decode(errors="replace").strip()
        parts.append(f"--- process {pid}, {log.name}\n{text or '(no answer)'}")
    return "\n".join(parts)
