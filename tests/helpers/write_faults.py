"""Every call of a program that writes, by call site; one of them fails as on a full disk.

`WriteSites` replaces what Python writes through (`open`, `os.write`, `os.fsync`, renames, SQLite),
so that call sites are found by running the program, not listed by hand.  A site is the line in
moerl that calls, with its caller.  Faults: ENOSPC (half of the bytes are written, then the error),
EIO (none are), and a kill (half of the bytes are written, then the process ends at once).
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MOERL = str(Path(__file__).parents[2] / "moerl") + os.sep
KINDS = ("ENOSPC", "EIO", "kill")
KILLED = 9
_OS_CALLS = ("fsync", "ftruncate", "mkdir", "rename", "replace", "rmdir", "truncate", "unlink")
_SQL = ("begin", "commit", "create", "delete", "insert", "pragma", "update", "vacuum")
_SQLITE_CODES = {"ENOSPC": sqlite3.SQLITE_FULL, "EIO": sqlite3.SQLITE_IOERR_WRITE}


class Fault(NamedTuple):
    site: str
    use: int  # from 1
    kind: str


class WriteSites:
    """Counts the uses of each site from now on, for the rest of this process."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.uses: Counter[str] = Counter()
        self._fault = fault
        self._is_full = ""  # site whose next write finds the disk full
        self._plain = {name: getattr(os, name) for name in (*_OS_CALLS, "write", "open")}
        for name in _OS_CALLS:
            setattr(os, name, self._guarded(name))
        os.write, os.open = self._write, self._open_low
        self._open, self._connect = io.open, sqlite3.connect
        builtins.open = io.open = self._open_file
        sqlite3.connect = self._connect_sql

    def fails(self, operation: str) -> str:
        """Count this call; the kind of fault that it meets, or an empty string."""
        site = _site(operation)
        if not site:
            return ""
        if site == self._is_full:
            self._is_full = ""
            return "EIO" if operation != "write" else "ENOSPC"
        self.uses[site] += 1
        fault = self._fault
        met = fault is not None and fault[:2] == (site, self.uses[site])
        return fault.kind if fault is not None and met else ""

    def _check(self, operation: str) -> None:
        if kind := self.fails(operation):
            fail(kind)

    def _guarded(self, name: str) -> Callable[..., Any]:
        plain = self._plain[name]

        def call(*args: Any, **named: Any) -> Any:
            self._check(name)
            return plain(*args, **named)

        return call

    def _open_low(self, path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self._check("open")
        return self._plain["open"](path, flags, *args, **named)

    def _write(self, handle: int, data: Any) -> int:
        return self.write(lambda part: self._plain["write"](handle, part), data)

    def write(self, plain: Callable[[memoryview], int], data: Any) -> int:
        """Write all, or the part that still fits."""
        view = memoryview(data).cast("B")
        kind = self.fails("write")
        if kind == "ENOSPC" and self._is_full == "" and len(view) > 1:
            self._is_full = _site("write")
            return plain(view[: len(view) // 2])
        if kind == "kill":
            plain(view[: len(view) // 2])
        if kind:
            fail(kind)
        return plain(view)

    def _open_file(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **named: Any):
        if not set(mode) & set("wax+"):
            return self._open(file, mode, buffering, *args, **named)
        if not isinstance(file, int):
            self._check("open")
        raw = _Raw(file, mode.replace("b", "").replace("t", ""))
        raw.sites = self
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        wrapper = io.TextIOWrapper(buffered, *args, line_buffering=buffering == 1, **named)
        wrapper.mode = mode
        return wrapper

    def _connect_sql(self, *args: Any, **named: Any) -> sqlite3.Connection:
        connection = self._connect(*args, factory=_Connection, **named)
        connection.sites = self
        return connection

    def sql(self, statement: str) -> None:
        word = statement.split(maxsplit=1)[0].lower()
        if word in _SQL and (kind := self.fails(f"sql {word}")):
            if kind == "kill":
                fail(kind)
            full = "database or disk is full" if kind == "ENOSPC" else "disk I/O error"
            error = sqlite3.OperationalError(full)
            error.sqlite_errorcode = _SQLITE_CODES[kind]
            raise error


class _Raw(io.FileIO):
    sites: WriteSites

    def write(self, data: Any) -> int:
        return self.sites.write(super().write, data)


class _Connection(sqlite3.Connection):
    sites: WriteSites

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        self.sites.sql(sql)
        return super().execute(sql, *args)

    def executemany(self, sql: str, rows: Any) -> sqlite3.Cursor:
        rows = list(rows)
        if rows:
            self.sites.sql(sql)
        return super().executemany(sql, rows)

    def executescript(self, sql: str) -> sqlite3.Cursor:
        self.sites.sql(sql)
        return super().executescript(sql)


def fail(kind: str) -> None:
    if kind == "kill":
        os._exit(KILLED)
    code = getattr(errno, kind)
    raise OSError(code, os.strerror(code))


def _site(operation: str) -> str:
    """The innermost line in moerl and its caller; the caller of `moerl.core.atomic` too."""
    lines: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(lines) < 2:
        if frame.f_code.co_filename.startswith(MOERL):
            line = f"{frame.f_code.co_filename.removeprefix(MOERL)}:{frame.f_lineno}"
            if not (lines and line.startswith("atomic.py")):
                lines.append(line)
        frame = frame.f_back
    return f"{operation} at {' from '.join(lines)}" if lines else ""
