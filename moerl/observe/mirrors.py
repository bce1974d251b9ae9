"""Mirrors of metrics.jsonl, each on a thread of its own: the file is the truth, they follow it.

A mirror may raise or hang: it is told, tried again after a pause, and then gets the rows that it
missed from the file.  `runs/NAME/mirrors/NAME.json` has its place in the file, so a restart of the
controller or a resume goes on where the mirror is.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from moerl.core.atomic import atomic_write
from moerl.runtime.beside import Beside

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0  # after a failure, doubled with each
HANG_S = 60.0  # without an answer of a mirror
_NOT_METRICS = ("step", "version", "time_s", "nonfinite")

Row = dict[str, Any]  # step: int, version: str, time_s: float, nonfinite: list[str], name: float
RowsFrom = Callable[[int], list[Row]]  # the next rows from a step on; [] at the end of the file


class Sink(Protocol):
    """A second destination for the metrics, such as TensorBoard (`moerl.observe.sinks`).

    Any method may raise anything.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> int:
        """Steps from `step` on are trained again; returns the first step that it wants to get."""

    def close(self) -> None: ...


class Mirror:
    """A sink and its place in metrics.jsonl."""

    def __init__(
        self,
        name: str,
        open_sink: Callable[[int], Sink],
        place: Path,
        tell: Callable[[str], object],
    ) -> None:
        """open_sink: gets the first step that comes.  place: the file of its place."""
        after = "; the rows that it missed were delivered from metrics.jsonl"
        self._name, self._open, self._tell = name, open_sink, tell
        self._beside = Beside(name, tell, after=after)
        self._place, self._next = place, 0  # step of the row that it gets next
        self._back_to: int | None = None  # step of a rewind that the sink has not taken
        with contextlib.suppress(OSError, ValueError, KeyError):
            known = json.loads(place.read_text(encoding="utf-8"))
            self._next, self._back_to = known["next"], known["back_to"]
        self._sink: Sink | None = None
        self._rows_from: RowsFrom = lambda step: []
        self._asked_s: float | None = None  # monotonic time since which the sink has not answered
        self._woken, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def follow(self, rows_from: RowsFrom) -> None:
        """Open the sink and deliver the rows that it has not, on the thread."""
        self._rows_from = rows_from
        self._woken.set()
        self._thread.start()

    def wake(self) -> None:
        """There is a new row."""
        asked_s = self._asked_s
        if asked_s is not None and (waited_s := time.monotonic() - asked_s) > HANG_S:
            self._beside.failed(TimeoutError(f"no answer for {waited_s:.0f} s"))
        self._woken.set()

    def rewind(self, step: int) -> None:
        """Rows from `step` on are cut; the caller holds up `rows_from` until they are."""
        self._back_to = step if self._back_to is None else min(step, self._back_to)
        self._save()
        self._woken.set()

    def close(self, limit_s: float) -> None:
        """Deliver the last rows and close the sink; say which rows it lacks after limit_s."""
        self._over.set()
        self._woken.set()
        self._thread.join(limit_s)
        with contextlib.suppress(OSError):
            if rows := self._rows_from(self._next):
                self._tell(f"{self._name} lacks the steps from {rows[0]['step']} of metrics.jsonl")

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._over.is_set():
            self._woken.wait()
            self._asked_s = time.monotonic()
            self._woken.clear()
            if self._beside.call(self._deliver):
                self._asked_s, pause_s = None, FIRST_PAUSE_S
                continue
            self._drop()
            self._asked_s = None
            self._woken.set()
            self._over.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if self._woken.is_set():  # rows or an attempt are left
            self._beside.call(self._deliver)
        self._drop()

    def _drop(self) -> None:
        """Close the sink; the next attempt opens it again."""
        sink, self._sink = self._sink, None
        if sink is not None:
            with contextlib.suppress(Exception):
                sink.close()

    def _deliver(self) -> None:
        """Bring the sink to the end of the file.  Raises what the sink raises."""
        if self._sink is None:
            self._sink = self._open(self._next)
        while self._back_to is not None or (rows := self._rows_from(self._next)):
            if (step := self._back_to) is not None:
                self._next = self._sink.rewind(step) if step < self._next else self._next
                self._back_to = None if self._back_to == step else self._back_to
                self._save()
                continue
            for row in rows:
                values = {name: row[name] for name in row if name not in _NOT_METRICS}
                self._sink.write(row["step"], values)
                self._next = row["step"] + 1
                self._save()
                self._asked_s = time.monotonic()
                if self._back_to is not None:
                    break

    def _save(self) -> None:
        """Where this fails, a restart delivers rows twice, or takes none back."""
        with contextlib.suppress(OSError):
            self._place.parent.mkdir(mode=0o700, exist_ok=True)
            place = {"next": self._next, "back_to": self._back_to}
            atomic_write(self._place, json.dumps(place))
