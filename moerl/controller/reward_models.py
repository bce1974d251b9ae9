"""Questions to reward models with a value head: the reference ranks take and answer them.

Ranks that die take the questions again that they had not answered.  Nothing is journaled: a
restarted controller asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moerl.config.reward_terms import RewardTerm
from moerl.controller.task_group import TaskGroup
from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import ProtocolError, ScoreError
from moerl.core.messages import ValueRow, ValueRows, Values
from moerl.core.types import Array, Score, reward_problem


class RewardModels:
    """Used by one event loop."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks, self._asked = tasks, 0
        self._waiting: dict[int, tuple[ValueRows, asyncio.Future[tuple[Array, ...]]]] = {}

    async def score(
        self, term: RewardTerm, asked: Sequence[ScoreRequest]
    ) -> list[Score | ScoreError]:
        """Answers, in order.  Parts of one conversation are one row."""
        rows: dict[int, list[ScoreRequest]] = {}
        for one in asked:
            rows.setdefault(id(one.token_ids), []).append(one)
        number, self._asked = self._asked, self._asked + 1
        wanted = ValueRows(number, term.model, tuple(map(_row, rows.values())))
        answer: asyncio.Future[tuple[Array, ...]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = wanted, answer
        self._tasks.notify()
        try:
            values = await answer
        finally:
            del self._waiting[number]
        found = {
            (place, end): float(value)
            for place, (row, of_row) in enumerate(zip(wanted.rows, values, strict=True))
            for end, value in zip(row.ends, of_row, strict=True)
        }
        places = {key: place for place, key in enumerate(rows)}
        return [_score(term, one, found[places[id(one.token_ids)], one.end]) for one in asked]

    def next(self) -> ValueRows | None:
        """The oldest question without an answer."""
        open_ones = (rows for rows, answer in self._waiting.values() if not answer.done())
        return next(open_ones, None)

    def add(self, values: Values) -> None:
        """Answers to a question that was withdrawn are dropped.  Raises ProtocolError."""
        if values.number not in self._waiting:
            return
        wanted, answer = self._waiting[values.number]
        want, got = [len(row.ends) for row in wanted.rows], [len(of) for of in values.values]
        if want != got:
            raise ProtocolError(f"{wanted.folder} gave {got} values for {want} parts")
        if not answer.done():
            answer.set_result(values.values)


def _row(asked: Sequence[ScoreRequest]) -> ValueRow:
    ids = asked[0].token_ids
    assert ids is not None, "EpisodeScores gives them to terms with where=model"
    ends = tuple(sorted({one.end for one in asked}))
    return ValueRow(ids[: ends[-1]], ends)


def _score(term: RewardTerm, asked: ScoreRequest, value: float) -> Score | ScoreError:
    if problem := reward_problem(value):
        return ScoreError(
            f"reward model {term.name} gave {value}, which {problem}, for {asked.key}"
        )
    return Score(value)
