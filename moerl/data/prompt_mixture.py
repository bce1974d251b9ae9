"""The prompts of a run with several tasks: prompt index -> (task, place in that task's stream).

Both are functions of (settings, seed, index) alone, as in `moerl.data.tasks`, so a resume needs no
state and nothing depends on which groups were dropped, or in which order they were trained.

The order of tasks is the chairman assignment of R. Tijdeman (Discrete Mathematics 32, 1980): after
any number n of prompts, a task of share p has had n p of them, give or take less than one.  It
repeats after as many prompts as the whole-numbered weights add up to, so one table holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from moerl.config.task_mixture import TaskEntry, naming, whole_weights
from moerl.core.errors import LineError
from moerl.core.types import Array, Prompt
from moerl.data.tasks import PromptStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


MOST_BAD = 1000  # prompts in a row that cannot be used: then a setting is wrong


class PromptMixture:
    """An endless stream of prompts over one task or several."""

    def __init__(
        self,
        entries: Sequence[TaskEntry],
        tokenizer: Tokenizer | None,
        seed: int,
        longest: int = 0,
    ) -> None:
        """Raises ConfigError for every fault of the settings and of the files as a whole.

        longest: tokens of the longest sequence that the engines take; 0 = not known.
        """
        self._entries = tuple(entries)
        self._order = TaskOrder(whole_weights(entries))
        self._streams: list[PromptStream] = []
        for entry in entries:
            with naming(entry):
                own_seed, room = task_seed(seed, entry.label), room_of(entry, longest)
                self._streams.append(PromptStream(entry, tokenizer, own_seed, room))

    @property
    def streams(self) -> Sequence[tuple[TaskEntry, PromptStream]]:
        """Each task with its own prompts."""
        return list(zip(self._entries, self._streams, strict=True))

    def prompt(self, index: int) -> Prompt:
        """Prompt number `index`.  Raises LineError: unusable; ConfigError: too many are."""
        task, place = self._order.place(index)
        entry = self._entries[task]
        with naming(entry):
            found = self._streams[task].prompt(place)
        return replace(found, index=index, task=entry.label)


def usable(prompt: Callable[[int], Prompt]) -> Iterator[Prompt]:
    """The usable prompts of a stream in order.

    Raises ConfigError as `prompt` does, and LineError when many in a row cannot be used.
    """
    in_a_row = 0
    for index in count():
        try:
            found = prompt(index)
        except LineError:
            in_a_row += 1
            if in_a_row >= MOST_BAD:
                raise
        else:
            in_a_row = 0
            yield found


class TaskOrder:
    """Which task each prompt is of, for whole weights without a common divisor."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = tuple(weights)
        self._tasks = chairmen(weights)  # of one period
        self._before = np.zeros(len(self._tasks), np.int64)  # earlier prompts of the same task
        for task in range(len(weights)):
            mine = self._tasks == task
            self._before[mine] = np.arange(np.count_nonzero(mine))

    def place(self, index: int) -> tuple[int, int]:
        """(task, number of earlier prompts of that task) of prompt `index`."""
        period, at = divmod(index, len(self._tasks))
        task = int(self._tasks[at])
        return task, period * self._weights[task] + int(self._before[at])


def chairmen(weights: Sequence[int]) -> Array:
    """The order of one period: task numbers, each as often as its weight.

    Of the tasks whose share has come due, the first to be late is next.
    """
    period, slack = sum(weights), max(1, 2 * len(weights) - 2)
    given = np.zeros(len(weights), np.int64)
    share = np.asarray(weights, np.int64)
    order = np.zeros(period, np.int64)
    for at in range(period):
        owed = share * (at + 1) - period * given  # in units of 1 / period prompts
        due = owed * slack >= period if len(weights) > 1 else np.ones(1, np.bool_)
        late = (period * (slack - 1) - owed * slack) / share
        order[at] = np.argmin(np.where(due, late, np.inf))
        given[order[at]] += 1
    return order


def room_of(entry: TaskEntry, longest: int) -> int:
    """Tokens that a sequence of `longest` tokens leaves for a prompt; 0 = not known.

    Turns of agents sample fewer tokens where the context ends.
    """
    if not longest:
        return 0
    sampled = 1 if entry.kind.uses_chat else entry.sampling.max_new_tokens
    return max(1, longest - sampled)


def task_seed(seed: int, label: str) -> int:
    """Seed of a task's own stream: adding or reordering tasks does not change it."""
    return xxhash.xxh32_intdigest(f"{seed}/{label}".encode()) if label else seed
