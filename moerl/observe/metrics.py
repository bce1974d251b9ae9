"""metrics.jsonl: one JSON object per optimizer step, which mirrors follow.

The file has each step of the run exactly once and in order.  A row is complete when its newline is
written.  Every row goes to the operating system in one call, so it survives the death of the
process; only `close` waits for the disk.  A row that could not be written whole, on a full disk, is
cut off at once: nothing of it stays in a buffer or in the file.

Row: {"step": 3, "version": "0.4", "time_s": 1700000000.0, then metric names in sorted order}. JSON
has no NaN: non-finite values are omitted and their names are listed under "nonfinite".
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moerl.core.errors import ProtocolError, RecordError
from moerl.core.types import PolicyVersion
from moerl.observe.mirrors import Mirror
from moerl.observe.mirrors import Row as Row
from moerl.runtime.line_file import LineFile, json_values

_TAIL = 1 << 20  # bytes at the end of the file that hold its last row
_ROWS_AT_ONCE = 1000


class MetricsWriter:
    """Appends one row per optimizer step to metrics.jsonl and wakes its mirrors.

    Opening the file cuts a torn last line of a killed process.
    """

    def __init__(self, path: Path, mirrors: Sequence[Mirror] = ()) -> None:
        """Raises RecordError when an existing file is not a metrics file."""
        rows = [(row["step"], end) for row, end in _rows(path)]
        # Step and end of each row, so that `rewind` does not read the whole file.
        self._steps, self._ends = [step for step, _ in rows], [end for _, end in rows]
        self._file = LineFile(path, self._end)
        self._path, self._mirrors = path, tuple(mirrors)
        self._lock = threading.Lock()  # of the file and what is known of it
        self.cut = int((newest_row(path) or {}).get("journal/cut_steps", 0))  # rows, in all
        for mirror in mirrors:
            mirror.follow(self.rows_from)

    def write(
        self,
        step: int,
        version: PolicyVersion | str,
        metrics: Mapping[str, float],
        time_s: float | None = None,
    ) -> Row:
        """Append one row and return it.  `time_s` is unix time, now by default.

        Raises ProtocolError unless `step` follows the last row, so each step is written once;
        OSError when the disk is full: then the file has no such row, and it may be written again.
        """
        last = self.last_step
        if last is not None and step != last + 1:
            raise ProtocolError(
                f"metrics of step {step} after step {last}: only step {last + 1} may follow"
            )
        now = time_s if time_s is not None else time.time()
        values = {name: float(metrics[name]) for name in sorted(metrics)}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        row: Row = {"step": step, "version": str(version), "time_s": now}
        if len(finite) < len(values):
            row["nonfinite"] = [name for name in values if name not in finite]
        row |= finite
        line = json.dumps(row) + "\n"  # ASCII
        with self._lock:
            self._ends.append(self._file.append(line.encode()))
            self._steps.append(step)
        for mirror in self._mirrors:
            mirror.wake()
        return row

    @property
    def last_step(self) -> int | None:
        """Step of the last row; None without a row."""
        return self._steps[-1] if self._steps else None

    @property
    def _end(self) -> int:
        """Size of all rows in bytes."""
        return self._ends[-1] if self._ends else 0

    def rows_from(self, step: int) -> list[Row]:
        """The next rows from `step` on, a thousand at most.  In any thread.  Raises OSError."""
        with self._lock, self._path.open("rb") as file:
            first = bisect_left(self._steps, step)
            ends = [0, *self._ends][first : first + _ROWS_AT_ONCE + 1]
            file.seek(ends[0])
            lines = file.read(ends[-1] - ends[0]).splitlines()
        return [json.loads(line) for line in lines]

    def rewind(self, step: int) -> None:
        """Cut the rows from `step` on, because these steps are trained again.

        Mirrors come first: where this is interrupted, it is done again.  Raises OSError; it may be
        called again then.
        """
        with self._lock:
            kept = bisect_left(self._steps, step)
            for mirror in self._mirrors:
                mirror.rewind(step)
            self._file.cut(self._ends[kept - 1] if kept else 0)
            self.cut += len(self._steps) - kept
            del self._steps[kept:], self._ends[kept:]

    def close(self, limit_s: float = 10.0) -> None:
        """limit_s: longest wait for each mirror."""
        self._file.close()
        for mirror in self._mirrors:
            mirror.close(limit_s)


def read_rows(path: Path) -> list[Row]:
    """All complete rows, in order; an empty list without a file.

    A torn last line is left out.  Raises RecordError for any other line that is not a row.
    """
    return [row for row, _ in _rows(path)]


def newest_row(path: Path) -> Row | None:
    """The last row, at the same cost for a file of any size; None without a whole row."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines[-2:] if line.endswith(b"\n")]
        row = json.loads(whole[-1]) if whole else None
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) else None


def read_lines(path: Path) -> list[Any]:
    """JSON values of a line file that another process may append to, without a torn last line."""
    return [value for value, _ in json_values(path)]


def _rows(path: Path) -> Iterator[tuple[Row, int]]:
    """Each row and the byte at which it ends."""
    last: int | None = None
    for number, (row, end) in enumerate(json_values(path), start=1):
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(step, int) or (last is not None and step <= last):
            raise RecordError(
                "metrics_row", f"{path} line {number} has step {step!r}; want ascending steps"
            )
        last = step
        yield row, end
