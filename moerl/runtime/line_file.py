"""A file of lines that grows: metrics.jsonl, samples.jsonl, the log of a stream."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moerl.core.errors import RecordError
from moerl.runtime.private_dir import private_opener


class LineFile:
    """A file of lines to which one process appends; a line is in it whole, or not at all."""

    def __init__(self, path: Path, end: int) -> None:
        """Open the file and cut it after `end`, the bytes of its whole lines.  Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._path, self._end = path, end
        self._handle = private_opener(str(path), flags)
        self._is_torn = os.fstat(self._handle).st_size > end
        if self._is_torn:
            self.cut(end)

    def append(self, lines: bytes) -> int:
        """Write whole lines, all or none; returns where they end.  Raises OSError."""
        if self._is_torn:  # an earlier cut failed too
            self.cut(self._end)
        if lines:
            self._is_torn = True
            written = 0
            try:
                written = os.write(self._handle, lines)
            finally:
                if written < len(lines):
                    with contextlib.suppress(OSError):  # then the next call does it
                        self.cut(self._end)
            if written < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            self._end += written
            self._is_torn = False
        return self._end

    def cut(self, end: int) -> None:
        """Keep the first `end` bytes, on the disk.  Raises OSError; may be called again."""
        self._is_torn = True
        os.ftruncate(self._handle, end)
        os.fsync(self._handle)
        self._end, self._is_torn = end, False

    def close(self) -> None:
        """Wait for the disk.  Raises OSError."""
        try:
            os.fsync(self._handle)
        finally:
            os.close(self._handle)


def json_values(path: Path) -> Iterator[tuple[Any, int]]:
    """The value of each line with a newline and the byte at which it ends, without a torn line."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for number, line in enumerate(file, start=1):
            end += len(line)
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line)
            except ValueError as error:
                if end >= size:
                    return  # a machine that lost power can leave zeros before the newline
                raise RecordError(
                    "metrics_row", f"{path} line {number} is not JSON: {error}"
                ) from None
            yield value, end
