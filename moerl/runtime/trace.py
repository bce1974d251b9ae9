"""Timeline spans: every process appends to its own file of the run; the report joins them.

A file is bounded: at half of the limit it replaces the older half, so a run of weeks keeps its
newest spans.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from moerl.runtime.beside import Beside

log = logging.getLogger(__name__)

_LIMIT_BYTES = 128 * 2**20  # per process


class Tracer:
    """Appends one JSON object per span: {"process", "name", "start_s", "end_s", ...}, unix time.

    Counters are lines {"process", "counter", "time_s", "value"}.  May be used from any thread.
    """

    def __init__(
        self,
        folder: Path,
        process: str,
        limit_bytes: int = _LIMIT_BYTES,
        tell: Callable[[str], object] = log.warning,
    ) -> None:
        """Open a trace file.  tell: takes sentences about lost spans."""
        self.process = process
        self._path, self._limit_bytes = folder / f"{process}.jsonl", limit_bytes
        self._file: IO[str] | None = None
        self._lock = threading.Lock()
        self._beside = Beside(f"the trace of {process}", tell, after="; its spans are lost")

    def add(self, name: str, start_s: float, end_s: float, **fields: float | str) -> None:
        span = {"process": self.process, "name": name, "start_s": start_s, "end_s": end_s}
        self._write({**span, **fields})

    def count(self, counter: str, value: float) -> None:
        """Record the value of a counter from now on."""
        self._write(
            {"process": self.process, "counter": counter, "time_s": time.time(), "value": value}
        )

    @contextmanager
    def span(self, name: str, **fields: float | str) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self.add(name, start, time.time(), **fields)

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._beside.call(lambda: self._append(json.dumps(line) + "\n"))

    def _append(self, line: str) -> None:
        if self._file is None or self._file.closed:  # it could not be opened
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", buffering=1, encoding="utf-8")
        self._file.write(line)
        if self._file.tell() > self._limit_bytes // 2:
            self._file.close()
            self._path.rename(self._path.with_suffix(".older.jsonl"))
            self._file = self._path.open("a", buffering=1, encoding="utf-8")


def read_spans(folder: Path) -> list[dict[str, Any]]:
    """All spans of a run, by start time.  A torn last line (a killed process) is dropped."""
    spans = [line for line in _read_lines(folder) if "start_s" in line]
    return sorted(spans, key=lambda span: span["start_s"])


def read_counters(folder: Path) -> list[dict[str, Any]]:
    """All counter values of a run, by time."""
    values = [line for line in _read_lines(folder) if "counter" in line]
    return sorted(values, key=lambda value: value["time_s"])


def _read_lines(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
