"""A verifiers environment that a tiny model learns from random weights: the last digit of a number.

The answer is one character; digits near the right one have a part of the reward.
"""

from __future__ import annotations

import random

import verifiers.v1 as vf

NUMBERS, NEAR = 1000, 4


class DigitData(vf.TaskData):
    answer: int


class DigitTask(vf.Task[DigitData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def near(self, trace: vf.Trace) -> float:
        said = (trace.last_reply or "")[:1]
        if not ("0" <= said <= "9"):
            return 0.0
        return max(0.0, 1.0 - abs(int(said) - self.data.answer) / NEAR)


class DigitTaskset(vf.Taskset[DigitTask, vf.TasksetConfig]):
    def load(self) -> list[DigitTask]:
        numbers = random.Random(0).sample(range(NUMBERS), NUMBERS)
        found = [
            DigitData(idx=idx, prompt=f"{number:03}", answer=number % 10)
            for idx, number in enumerate(numbers)
        ]
        return [DigitTask(data, self.config.task) for data in found]


__all__ = ["DigitTaskset"]
