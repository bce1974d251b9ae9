"""The scorers of a run, by task and term of its reward.

A scorer that calls a user's function or object in its own process, in an actor of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from moerl.config.reward_terms import RewardTerm
from moerl.config.task_kinds import TaskKind
from moerl.config.task_mixture import TaskEntry
from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import ScoreError
from moerl.core.messages import Scorer
from moerl.core.types import Prompt, Score
from moerl.data.rewards import make_reward
from moerl.scoring.process import ProcessScorer, prompt_of, usable_score
from moerl.scoring.worker import one_line

# Makes the scorers that need Ray, which has one home
Make = Callable[[TaskEntry, RewardTerm], Scorer]


class RunScorers:
    """The `Scorers` protocol over scorers by (label of the task, name of the term)."""

    def __init__(
        self, scorers: Mapping[tuple[str, str], Scorer], replies: Mapping[str, ProcessScorer]
    ) -> None:
        """Route questions by (task, term).  replies: processes of a text environment, by task."""
        self._scorers, self._replies = dict(scorers), dict(replies)

    async def score(
        self, task: str, term: str, asked: Sequence[ScoreRequest]
    ) -> Sequence[Score | ScoreError]:
        """Answers, in order.  Raises ScorerDown."""
        return await self._scorers[task, term].score(asked)

    async def reply(self, prompt: Prompt, responses: Sequence[str]) -> str:
        """Reply of the task's environment.  Raises ScoreError."""
        return await self._replies[prompt.task].reply(prompt, responses)


def make_scorers(entries: Iterable[TaskEntry], make: Make) -> RunScorers:
    """Every scorer.  make: makes those on Ray.  Raises ConfigError."""
    scorers: dict[tuple[str, str], Scorer] = {}
    replies: dict[str, ProcessScorer] = {}
    for entry in entries:
        for term in entry.terms:
            if term.where == "function":
                found = function_scorer(entry, term)
                replies.setdefault(entry.label, found)
                scorers[entry.label, term.name] = found
            elif term.where == "http":
                from moerl.scoring.http_service import HttpScorer  # aiohttp: a dry run needs none

                scorers[entry.label, term.name] = HttpScorer(entry, term)
            elif term.where not in ("own", "model"):
                scorers[entry.label, term.name] = make(entry, term)
        if entry.kind is TaskKind.TEXT_REPLIES and entry.label not in replies:
            only = replace(entry, reward="exact_match", rewards=[])  # it gets no question
            replies[entry.label] = ProcessScorer(only, entry.scorer_workers, entry.score_timeout_s)
    return RunScorers(scorers, replies)


def function_scorer(entry: TaskEntry, term: RewardTerm) -> ProcessScorer:
    """Raises ConfigError."""
    return ProcessScorer(entry.only_with(term), term.workers, entry.timeout_of(term))


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
