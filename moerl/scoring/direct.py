"""A scorer that calls a user's function or object in its own process, in an actor of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from moerl.config.reward_terms import RewardTerm
from moerl.config.task_mixture import TaskEntry
from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import ScoreError
from moerl.core.types import Score
from moerl.data.rewards import make_reward
from moerl.scoring.answers import prompt_of, usable_score
from moerl.scoring.worker import one_line


class DirectScorer:
    """One call at a time, in a thread: the object may hold a model."""

    def __init__(self, task: TaskEntry, term: RewardTerm) -> None:
        """Raises ConfigError."""
        self._name = f"reward {term.name}"
        self._reward = make_reward(task.only_with(term), objects=True)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    async def score(self, asked: Sequence[ScoreRequest]) -> list[Score | ScoreError]:
        """Answers, in order."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: list(map(self._score, asked)))

    def _score(self, asked: ScoreRequest) -> Score | ScoreError:
        try:
            found = self._reward(prompt_of(asked), asked.episode)
        except Exception as error:
            return ScoreError(f"{self._name} {one_line(error)} for {asked.prompt.name}")
        return usable_score(self._name, found, asked)
