"""Timeline spans: every process appends its own to one file of the run; the report joins them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Tracer:
    """Appends one JSON object per span: {"process", "name", "start_s", "end_s", ...}, unix time."""

    def __init__(self, folder: Path, process: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.process = process
        self._file = (folder / f"{process}.jsonl").open("a", buffering=1)

    def add(self, name: str, start_s: float, end_s: float, **fields: float | str) -> None:
        span = {"process": self.process, "name": name, "start_s": start_s, "end_s": end_s}
        self._file.write(json.dumps(span | fields) + "\n")

    @contextmanager
    def span(self, name: str, **fields: float | str) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self.add(name, start, time.time(), **fields)


def read_spans(folder: Path) -> list[dict]:
    """All spans of a run, by start time.  A torn last line (a killed process) is dropped."""
    spans = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                spans.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return sorted(spans, key=lambda span: span["start_s"])
