"""Optional writers (trackers, samples, traces, pages), whose failures do not end the training.

A failure is logged once per cause, and the writer is tried again.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moerl.core.errors import RecordError, cause_of
from moerl.runtime.line_file import LineFile, json_values

log = logging.getLogger(__name__)

_SAY_AGAIN_S = 600.0  # between two sentences about one cause
_MOST_CHARS = 300  # of a cause: some packages put a page of HTML into their errors
_MOST_WAITING = 1000  # lines that wait for a file


class Beside:
    """Guards the calls of one writer.  May be used from any thread."""

    def __init__(
        self, name: str, tell: Callable[[str], object] = log.warning, *, after: str = ""
    ) -> None:
        """Start without a failure.  tell: takes sentences.  after: ends that on a recovery."""
        self._name, self._tell, self._after = name, tell, after
        self._told: dict[str, float] = {}  # cause without numbers -> clock seconds
        self._since: float | None = None  # clock seconds of the first failure
        self._is_told = False  # this failure

    def call(self, write: Callable[[], object]) -> bool:
        """Call `write`; False, and a sentence, when it raised."""
        try:
            write()
        except (Exception, SystemExit) as error:  # packages of others do anything
            self.failed(error)
            return False
        self.worked()
        return True

    def failed(self, error: BaseException) -> None:
        """Log a failure, unless it was logged a while ago."""
        now, cause = time.monotonic(), " ".join(cause_of(error).split())[:_MOST_CHARS]
        self._since = now if self._since is None else self._since
        kind = re.sub(r"\d+", "", cause)  # numbers of requests, bytes and ports differ
        if now - self._told.get(kind, -_SAY_AGAIN_S) < _SAY_AGAIN_S:
            return log.warning("%s failed again: %s", self._name, cause)
        self._told[kind], self._is_told = now, True
        self._tell(f"{self._name} failed: {cause}; the training goes on, and it is tried again")

    def worked(self) -> None:
        """Log the recovery from a logged failure."""
        since, self._since = self._since, None
        if since is not None and self._is_told:
            self._is_told = False
            waited_s = time.monotonic() - since
            self._tell(f"{self._name} works again after {waited_s:.0f} s{self._after}")


class LineWriter:
    """Appends JSON objects, each with a `step`, to a file of lines.  Raises nothing.

    Lines that could not be written wait in memory, the newest thousand of them.
    """

    def __init__(self, path: Path, tell: Callable[[str], object] = log.warning) -> None:
        self._path, self._beside = path, Beside(path.name, tell)
        self._file: LineFile | None = None
        self._waiting: list[tuple[int, bytes]] = []  # step and line
        self._cut_from: int | None = None  # step of a rewind that is not done

    def write(self, values: Sequence[Mapping[str, Any]]) -> None:
        self._beside.call(lambda: self._add(values))

    def rewind(self, step: int) -> None:
        """Cut the lines from `step` on."""
        self._waiting = [one for one in self._waiting if one[0] < step]
        self._cut_from = step if self._cut_from is None else min(step, self._cut_from)
        self._beside.call(self._flush)

    def close(self) -> None:
        if self._file is not None:
            self._beside.call(self._file.close)

    def _add(self, values: Sequence[Mapping[str, Any]]) -> None:
        for value in values:
            line = json.dumps(value, ensure_ascii=False) + "\n"
            # text of a policy may hold halves of surrogate pairs
            self._waiting.append((value["step"], line.encode("utf-8", "replace")))
        del self._waiting[:-_MOST_WAITING]
        self._flush()

    def _flush(self) -> None:
        self._file = self._file or self._open()
        if self._cut_from is not None:
            ends = [end for one, end in json_values(self._path) if one["step"] < self._cut_from]
            self._file.cut(max(ends, default=0))
            self._cut_from = None
        self._file.append(b"".join(line for _, line in self._waiting))
        self._waiting = []

    def _open(self) -> LineFile:
        try:
            end = max((end for _, end in json_values(self._path)), default=0)
        except RecordError as error:
            aside = self._path.with_suffix(".damaged")
            log.error("%s; it is now %s", error, aside)
            self._path.replace(aside)
            end = 0
        return LineFile(self._path, end)
