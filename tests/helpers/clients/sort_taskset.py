"""Sorting digits as a verifiers environment: up to three answers, and how many places are right."""

from __future__ import annotations

import random

import verifiers.v1 as vf

TURNS, DIGITS = 3, 4


class SortData(vf.TaskData):
    answer: str


class SortTask(vf.Task[SortData, vf.State, vf.TaskConfig]):
    pass


class SortTaskset(vf.Taskset[SortTask, vf.TasksetConfig]):
    def load(self) -> list[SortTask]:
        draw = random.Random(0)
        found = []
        for idx in range(2000):
            digits = [str(draw.randrange(10)) for _ in range(DIGITS)]
            data = SortData(idx=idx, prompt="".join(digits), answer="".join(sorted(digits)))
            found.append(SortTask(data, self.config.task))
        return found


class SortEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class SortEnv(vf.Env[SortEnvConfig]):
    async def run(self, task: SortTask, agents: vf.Agents) -> None:
        right, best = task.data.answer, 0
        async with agents.agent.interaction(task) as chat:
            said = await chat.turn()
            for turn in range(TURNS):
                found = sum(a == b for a, b in zip(said.last_reply, right, strict=False))
                best = max(best, found)
                if said.terminated or best == len(right) or turn == TURNS - 1:
                    break
                said = await chat.turn(f"{found} right")
        chat.trace.record_reward("places", best / len(right))


__all__ = ["SortEnv", "SortTaskset"]
