"""A pool of scorer processes for each task of a mixture: its reward, environment and limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moerl.core.types import Episode, Prompt, Score
from moerl.scoring.process import ProcessScorer


class TaskScorers:
    """The `Scorer` protocol over one scorer per label (`Prompt.task`)."""

    def __init__(self, scorers: Mapping[str, ProcessScorer]) -> None:
        self._scorers = dict(scorers)

    async def score(
        self, prompt: Prompt, episodes: Sequence[Episode], responses: Sequence[Sequence[str]]
    ) -> list[Score]:
        """Scores of all episodes, in order.  Raises ScoreError."""
        return await self._scorers[prompt.task].score(prompt, episodes, responses)

    async def reply(self, prompt: Prompt, responses: Sequence[str]) -> str:
        """Reply of the task's environment.  Raises ScoreError."""
        return await self._scorers[prompt.task].reply(prompt, responses)

    def close(self) -> None:
        """End all workers of all tasks."""
        for scorer in self._scorers.values():
            scorer.close()
