"""Checks of the lines of a task's files before a run, and their findings."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import xxhash

from moerl.config.task_mixture import TaskEntry
from moerl.core.errors import ConfigError, LineError
from moerl.core.types import Array, Prompt
from moerl.data.tasks import OVERLONG, PromptStream, check_bad_lines

MOST_LINES, MOST_S = 100_000, 8.0  # of a start
_NAMED = 3  # lines of each kind


@dataclass(slots=True)
class LineCheck:
    """The lines of one task, of which `read` were checked.  Memory: 8 bytes for each."""

    task: TaskEntry
    stream: PromptStream
    use: Callable[[Prompt], object] | None = None  # raises LineError for a prompt without use
    read: int = 0
    lengths: Array = field(default_factory=lambda: np.zeros(1, np.int64))  # prompts by tokens
    places: dict[str, array[int]] = field(default_factory=dict)  # of unusable lines, by kind
    named: dict[str, list[LineError]] = field(default_factory=dict)  # the first of each kind
    control: int = 0  # usable lines with spellings of control tokens that stay text
    unanswered: int = 0  # usable lines without an answer, where a function of the user gets it
    _hashes: Array = field(init=False)

    def __post_init__(self) -> None:
        self._hashes = np.zeros(self.lines, np.uint64)

    @property
    def lines(self) -> int:
        return self.stream.num_lines

    @property
    def bad(self) -> int:
        """Lines that cannot be used, except lines that `task.overlong` skips."""
        skipped = self.count(OVERLONG) if self.task.overlong == "skip" else 0
        return self.unusable - skipped

    @property
    def unusable(self) -> int:
        return sum(map(len, self.places.values()))

    def count(self, kind: str) -> int:
        return len(self.places.get(kind, ()))

    def duplicates(self) -> int:
        """Usable lines with the text and answer of an earlier one."""
        return len(self.hashes) - len(np.unique(self.hashes))

    @property
    def hashes(self) -> Array:
        """Of text and answer of the usable lines that were read."""
        found: Array = self._hashes[self._hashes != 0]
        return found

    def go_on(self, until: int, deadline: float, tell: Callable[[int], None] | None = None) -> None:
        """Check lines up to number `until`, or until `deadline` (time.monotonic).

        tell: receives the number of checked lines about every 2 s.
        """
        until, told = min(until, self.lines), time.monotonic()
        while self.read < until and (now := time.monotonic()) < deadline:
            if tell and now > told + 2.0:
                tell(self.read)
                told = now
            self._check(self.read)
            self.read += 1

    def prompts(self) -> Iterator[Prompt]:
        """Usable prompts, in the order of the file; endless where they come from none."""
        for place in range(self.lines) if self.lines else count():
            with suppress(LineError):
                yield self.stream.line(place)

    def refuse(self) -> None:
        """Raises ConfigError for too many lines that cannot be used, or none that can."""
        if self.bad and self.count(OVERLONG) == self.bad > self.task.max_bad_lines:
            first, *more = self.named[OVERLONG]
            others = "".join(f"; {error.allowed.partition(';')[0]}" for error in more)
            raise ConfigError(
                first.field,
                first.value,
                f"{first.allowed}{others}; {self.bad} of {self.read} lines are too long, and "
                "task.overlong=skip leaves them out",
            )
        named = [error for errors in self.named.values() for error in errors]
        check_bad_lines(self.task, self.bad, named)
        if self.lines and self.unusable == self.lines:
            problem = f"none of its {self.lines} lines can be used: {named[0].allowed}"
            raise ConfigError("task.path", self.task.path, problem)

    def summary(self) -> str:
        """One line; empty when all lines were checked and can be used."""
        parts = []
        if self.read < self.lines:
            parts.append(f"{self.read:,} of {self.lines:,} lines checked before the start")
        for kind, errors in self.named.items():
            places = ", ".join(error.allowed.split(" has ")[0].split(" of ")[0] for error in errors)
            parts.append(f"{self.count(kind):,} set aside ({kind}): {places}")
        if self.unanswered:
            parts.append(f"{self.unanswered:,} have no answer: {self.gets_none()}")
        return f"{self.task.path}: {'; '.join(parts)}" if parts else ""

    def gets_none(self) -> str:
        """About lines without an answer."""
        way = "task.columns={answer: ''} says that this is meant"
        names = " and ".join(task.reward for task in self.task.own_rewards)
        return f"{names} gets None ({way})"

    def _check(self, place: int) -> None:
        try:
            prompt = self.stream.line(place)
            if self.use is not None:
                self.use(prompt)
        except LineError as error:
            self.places.setdefault(error.kind, array("q")).append(place)
            named = self.named.setdefault(error.kind, [])
            if len(named) < _NAMED:
                named.append(error)
            return
        is_asked = self.task.own_rewards and self.task.columns.get("answer") != ""
        self.unanswered += bool(is_asked and prompt.answer is None)
        size = len(prompt.token_ids)
        template = self.stream.template
        self.control += template is not None and template.kept_as_text(
            prompt.text, prompt.token_ids
        )
        if size >= len(self.lengths):
            self.lengths = np.concatenate([self.lengths, np.zeros(size, np.int64)])
        self.lengths[size] += 1
        digest = xxhash.xxh3_64_intdigest(f"{prompt.text}\0{prompt.answer}".encode())
        self._hashes[place] = digest or 1
