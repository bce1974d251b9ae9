"""A scorer wrapper: complete and finite answers in time, else a ScoreError.

The scorer limits the time of each response; it cannot detect the death of its own process or a
broken connection.  Groups, turns and evaluations all use this wrapper.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moerl.core.episode_view import EpisodeView
from moerl.core.errors import ScoreError
from moerl.core.messages import Scorer
from moerl.core.types import Prompt, Score, reward_problem

_START_S = 120.0  # seconds for a restart of the scorer
_REPLY_S = 600.0  # more seconds for replies of thousands of episodes at once


class ScorerWithTimeout:
    """The `Scorer` protocol over another one."""

    def __init__(self, scorer: Scorer, timeout_s: float) -> None:
        """timeout_s: per response, the largest `score_timeout_s` of the tasks."""
        self._scorer, self._timeout_s = scorer, timeout_s

    async def score(self, prompt: Prompt, episodes: Sequence[EpisodeView]) -> list[Score]:
        """One finite score per episode.  Raises ScoreError."""
        limit_s = self._timeout_s * len(episodes) + _START_S
        try:
            async with asyncio.timeout(limit_s):
                scores = await self._scorer.score(prompt, episodes)
        except TimeoutError as error:
            raise ScoreError(f"{prompt.name}: no scores within {limit_s:g} s") from error
        if len(scores) != len(episodes):
            raise ScoreError(f"{len(scores)} scores for {len(episodes)} episodes")
        for score in scores:
            if problem := reward_problem(score.reward):
                raise ScoreError(f"{prompt.name}: the reward {score.reward} {problem}")
        return scores

    async def reply(self, prompt: Prompt, responses: Sequence[str]) -> str:
        """Reply of the environment.  Raises ScoreError."""
        limit_s = self._timeout_s + _START_S + _REPLY_S
        try:
            async with asyncio.timeout(limit_s):
                return await self._scorer.reply(prompt, responses)
        except TimeoutError as error:
            raise ScoreError(f"{prompt.name}: no reply within {limit_s:g} s") from error
