"""Environments for tests: they count, misbehave, or say what they see."""

from __future__ import annotations

import asyncio
import os
import time

from moerl.agents.environments.episode_environment import (
    EpisodeEnd,
    EpisodeStart,
    Observation,
    PolicyAnswer,
)


class Counting:
    """Counts its steps; an answer may name a fault.  Two steps, a point for each."""

    opened = 0

    def __init__(self, steps: int = 2, busy_s: float = 0.0, nap_s: float = 1.0) -> None:
        self.steps, self.count = steps, 0
        self.busy_s, self.nap_s = busy_s, nap_s

    async def reset(self, start: EpisodeStart) -> Observation:
        type(self).opened += 1
        self.start = start
        return Observation(start.messages)

    async def step(self, answer: PolicyAnswer) -> Observation | EpisodeEnd:
        self.count += 1
        fault = getattr(self, answer.text, None)
        if fault is not None:
            return await fault()  # type: ignore[no-any-return]
        if self.count >= self.steps:
            return EpisodeEnd(1.0)
        return Observation([{"role": "user", "content": f"step {self.count}"}], reward=1.0)

    async def close(self) -> None:
        type(self).opened -= 1

    # --- faults -----------------------------------------------------------------------------------
    async def raises(self) -> Observation:
        raise ValueError("no such move")

    async def returns_text(self) -> str:
        return "text"

    async def is_too_long(self) -> Observation:
        return Observation([{"role": "user", "content": "x" * (2 << 20)}])

    async def cannot_be_sent(self) -> Observation:
        return Observation([{"role": "user", "content": object()}])

    async def has_no_form(self) -> Observation:
        return Observation([{1: 2}])  # type: ignore[dict-item]

    async def held_out(self) -> Observation:
        return Observation([{"role": "user", "content": str(self.start.held_out)}])

    async def waits(self) -> Observation:
        await asyncio.sleep(1000)
        raise AssertionError

    async def naps(self) -> Observation:
        for _ in range(2):
            await asyncio.sleep(self.nap_s)
        return Observation([{"role": "user", "content": "rested"}])

    async def computes(self) -> Observation:
        time.sleep(self.busy_s)
        return Observation([{"role": "user", "content": "computed"}])

    async def blocks_later(self) -> Observation:
        self.task = asyncio.get_running_loop().create_task(self._blocks_soon())
        return Observation([{"role": "user", "content": "later"}])

    async def _blocks_soon(self) -> None:
        await asyncio.sleep(0.1)
        time.sleep(1000)

    async def blocks(self) -> Observation:
        time.sleep(1000)
        raise AssertionError

    async def exits(self) -> Observation:
        os._exit(3)

    async def sees(self) -> Observation:
        secret = os.environ.get("AWS_SECRET_ACCESS_KEY", "")
        text = f"{os.getpid()} {type(self).opened} {secret}"
        return Observation([{"role": "user", "content": text}])
