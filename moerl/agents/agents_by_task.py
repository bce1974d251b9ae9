"""The agents of a run: one that plays the episodes of each task that has one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from moerl.controller.agent_episodes import EpisodeRunner, PlayedEpisode, TurnEngine
from moerl.core.types import Prompt, SamplingParams


class AgentsByTask:
    """An `EpisodeRunner` over one per label (`Prompt.task`); each has an event loop of its own."""

    def __init__(self, runners: Mapping[str, EpisodeRunner]) -> None:
        self._runners = dict(runners)

    async def start(self, engine: TurnEngine) -> None:
        for runner in self._runners.values():
            await runner.start(engine)

    async def play(
        self, name: str, prompt: Prompt, held_out: SamplingParams | None = None
    ) -> PlayedEpisode:
        return await self._runners[prompt.task].play(name, prompt, held_out)

    def end(self, name: str) -> None:
        """Names are unique in a run; those that do not play the episode ignore it."""
        for runner in self._runners.values():
            runner.end(name)

    async def close(self) -> None:
        await asyncio.gather(*(runner.close() for runner in self._runners.values()))
