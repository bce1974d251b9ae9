"""Held-out prompts as episodes of agents, every turn on one engine at one version.

An episode that fails is played once more; one that fails twice has no reward.  The first turn that
cannot have the engine and the version ends all episodes, and the evaluation with them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moerl.config.schema import EvaluationConfig
from moerl.controller.agent_episodes import ENDED, EpisodeRunner, PlayedEpisode
from moerl.controller.pooled_turns import EnginePin, EpisodeTurns, PooledTurns
from moerl.core.errors import EngineError
from moerl.core.types import Prompt, SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class RunningAgents:
    """What plays the episodes of a run and samples their turns, for training and evaluation."""

    runner: EpisodeRunner
    turns: PooledTurns
    started: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, eq=False)
class HeldOutPrompt:
    """One answer that an evaluation wants."""

    name: str  # of the episode
    prompt: Prompt
    sampling: SamplingParams


class HeldOutEpisodes:
    """The episodes of one evaluation."""

    def __init__(
        self,
        agents: RunningAgents,
        config: EvaluationConfig,
        pin: EnginePin,
        deadline: float,
        sealed: set[str],
    ) -> None:
        """sealed: receives the blobs of all episodes, failed ones too."""
        self._agents, self._config, self._pin, self._deadline = agents, config, pin, deadline
        self._places = asyncio.Semaphore(config.max_requests)
        self._open: set[str] = set()
        self._sealed = sealed
        self.counts = {"eval/played_again": 0.0, "eval/failed": 0.0}

    async def play(self, asked: Sequence[HeldOutPrompt]) -> list[PlayedEpisode]:
        """The episodes that have not failed twice, in order.  Raises EngineError."""
        playing = asyncio.gather(*map(self._one, asked))
        either: tuple[asyncio.Future[Any], ...] = (playing, self._pin.broken)
        left_s = self._deadline + self._config.hold_s - time.monotonic()
        try:
            await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                limit = f"twice evaluation.hold_s = {self._config.hold_s:g} s"
                self._pin.breaks(EngineError(f"its episodes took longer than {limit}"))
        finally:
            for name in self._open:
                self._agents.runner.end(name)
            played = await playing
        if self._pin.broken.done():
            raise self._pin.broken.result()
        found = [one for one in played if one is not None]
        self.counts["eval/failed"] = float(len(played) - len(found))
        return found

    async def _one(self, asked: HeldOutPrompt) -> PlayedEpisode | None:
        async with self._places:
            for name in (asked.name, f"{asked.name}-again"):
                if time.monotonic() > self._deadline:
                    limit = f"evaluation.hold_s = {self._config.hold_s:g} s"
                    self._pin.breaks(EngineError(f"{limit} have passed"))
                if self._pin.broken.done():
                    return None
                self.counts["eval/played_again"] += name != asked.name
                played = await self._play(name, asked)
                if not played.failure:
                    return played
                if played.failure != ENDED:
                    log.warning("held-out: the agent of %s %s", name, played.detail)
            return None

    async def _play(self, name: str, asked: HeldOutPrompt) -> PlayedEpisode:
        turns = self._agents.turns.episodes
        turns[name] = EpisodeTurns(pin=self._pin)
        self._open.add(name)
        try:
            played = await self._agents.runner.play(name, asked.prompt, asked.sampling)
        finally:
            self._open.discard(name)
            del turns[name]
        self._sealed |= played.blob_uris()
        return played
