"""The environment of bench/open_episodes.py: three to eight turns with a wait before each.

Waits are drawn by the name of the episode, so the process that measures knows them, too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

from moerl.agents.environments.episode_environment import (
    EpisodeEnd,
    EpisodeStart,
    Observation,
    PolicyAnswer,
    StartFields,
)

MOST_WAIT_S, MEDIAN_WAIT_S = 60.0, 5.0
OBSERVATION = "What you asked for was done, and this is what came of it. " * 8


def num_turns(name: str) -> int:
    return random.Random(f"turns {name}").randint(3, 8)


def wait_s(name: str, step: int) -> float:
    """Lognormal, 0 to 60 s."""
    drawn = random.Random(f"{name} {step}").lognormvariate(0.0, 1.2)
    return min(MOST_WAIT_S, MEDIAN_WAIT_S * drawn)


def all_waits_s(name: str) -> float:
    """Of a whole episode: before its first turn and after each."""
    return sum(wait_s(name, step) for step in range(num_turns(name) + 1))


class Waiting:
    """One episode, in a worker or in the process that measures."""

    counts: Mapping[str, float] = {}

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.name, self.step_idx = scale, "", 0

    async def reset(self, start: EpisodeStart | StartFields) -> Observation:
        self.name = start.episode
        await self._wait()
        return Observation(start.messages)

    async def step(self, answer: PolicyAnswer) -> Observation | EpisodeEnd:
        await self._wait()
        turns = num_turns(self.name)
        if self.step_idx > turns:
            return EpisodeEnd(float(turns % 2))
        return Observation([{"role": "user", "content": OBSERVATION}])

    async def close(self) -> None: ...

    async def _wait(self) -> None:
        await asyncio.sleep(self.scale * wait_s(self.name, self.step_idx))
        self.step_idx += 1
