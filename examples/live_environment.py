"""An environment that lives: it has a state, waits, and says what the policy reads next.

    moerl train quickstart task.environment=examples.live_environment:Locks \
        task.max_turns=6 rollout.groups_per_step=4 run.steps=40 --run locks

One object is one episode.  moerl asks it with three coroutines, in a worker process that holds many
of them on one event loop: wait with `await`, never with `time.sleep`.  Turns are recorded token by
token; messages go through the model's chat template.

The task shows digits and wants them sorted.  Each place is a lock that stays open once its digit
was right, so a later answer needs the other places only.  The reward is given step by step: a share
for each lock that opens.
"""

from __future__ import annotations

import asyncio

from moerl.agents.environments.episode_environment import (
    EpisodeEnd,
    EpisodeStart,
    Observation,
    PolicyAnswer,
)


class Locks:
    """One episode.  Arguments come from `task.environment_options`."""

    def __init__(self, wait_s: float = 0.01) -> None:
        self.wait_s = wait_s
        self.right, self.open = "", set[int]()

    async def reset(self, start: EpisodeStart) -> Observation:
        """What the policy reads first: here the prompt as it is.

        start: prompt, messages, the right answer, fields of the data set, and the tools of
        `task.tools`, which `Observation(tools=...)` would offer.
        """
        self.right = str(start.answer)
        return Observation(start.messages)

    async def step(self, answer: PolicyAnswer) -> Observation | EpisodeEnd:
        """What stands behind a turn: messages, or the end; both may bring a reward."""
        await asyncio.sleep(self.wait_s)  # a data base, a simulator, a game server
        pairs = zip(answer.text.strip(), self.right, strict=False)
        found = {place for place, (said, want) in enumerate(pairs) if said == want}
        reward = len(found - self.open) / len(self.right)
        self.open |= found
        if len(self.open) == len(self.right):
            return EpisodeEnd(reward)
        shown = "".join(digit if i in self.open else "_" for i, digit in enumerate(self.right))
        return Observation([{"role": "user", "content": shown}], reward=reward)

    async def close(self) -> None:
        """Called once, however the episode ends."""
