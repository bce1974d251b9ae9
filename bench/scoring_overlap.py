"""Does scoring cost step time?  The real controller; engine, trainer and scorer wait.

    python bench/scoring_overlap.py [--seconds 1.0] [--steps 12] [--json FILE]

Generation of a step's groups takes SECONDS, its scores take as long again, and training 0.8 times
as long.  Each arm is run with scores that take no time and with scores that wait: `stream`, where
groups are admitted with their last score while others are generated and trained, and `barrier`
(rollout.fixed_lag=0), where a step waits for all of it.  A scorer that computes in a process of its
own is printed, too; its cost is that of the cores that it takes.

Exit code 1 when a waiting scorer costs 10 % of step time or more in `stream`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for tests.helpers

from moerl.config import resolve
from moerl.config.schema import Config, RolloutConfig, RunConfig, SamplingConfig
from moerl.controller.controller import Controller
from moerl.core.episode_view import ScoreRequest
from moerl.core.messages import Plan, Refresh, StepDone, TakePlan
from moerl.core.types import GenerateRequest, PolicyVersion, Score
from tests.helpers.controllers import StubScorer, hello, make, publish, running, sibling
from tests.helpers.stub_engine import Reply, StubEngine

GROUPS, SIBLINGS, WARM = 8, 4, 3
TRAIN, MOST = 0.8, 0.10
Spend = Callable[[], Awaitable[None]]


class Engine(StubEngine):
    """A message takes `seconds`, however many requests it has."""

    seconds = 0.0

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Reply]:
        await asyncio.sleep(self.seconds)
        return await super().generate(requests)


class Scorer(StubScorer):
    def __init__(self, spend: Spend) -> None:
        super().__init__()
        self._spend = spend

    async def score(self, task: str, term: str, asked: Sequence[ScoreRequest]) -> list[Any]:
        await self._spend()
        return [Score(float(sibling(request.episode))) for request in asked]


def config_of(steps: int, *, barrier: bool) -> Config:
    rollout = RolloutConfig(
        groups_per_step=GROUPS, group_size=SIBLINGS, max_groups_in_flight=GROUPS
    )
    arm: dict[str, Any] = {"fixed_lag": 0} if barrier else {"max_lag": 4, "buffer_depth": 3}
    return resolve(
        Config(
            run=RunConfig(steps=steps),
            rollout=replace(rollout, **arm),
            sampling=SamplingConfig(max_new_tokens=4),
        )
    )


async def train(controller: Controller, steps: int, seconds: float) -> list[float]:
    """Seconds between the plans of the steps."""
    await controller.handle(hello(PolicyVersion(0, 0)))
    times = []
    for step in range(steps):
        while (reply := await controller.handle(TakePlan(step, 60.0, 0))) == Refresh():
            await publish(controller, PolicyVersion(0, step))
        assert isinstance(reply, Plan), reply
        times.append(time.monotonic())
        await asyncio.sleep(seconds)
        version = PolicyVersion(0, step + 1)
        await controller.handle(StepDone(step, version, {"loss/pg": 0.0}, ""))
        await publish(controller, version)
    return [b - a for a, b in zip(times[WARM:], times[WARM + 1 :], strict=False)]


def measured(seconds: float, steps: int, spend: Spend, *, barrier: bool) -> float:
    """Median seconds of a step."""

    async def body(folder: Path) -> list[float]:
        engine = Engine()
        engine.seconds = seconds
        config = config_of(steps, barrier=barrier)
        controller, _ = make(folder, engine, config, scorer=Scorer(spend))
        work = train(controller, steps, TRAIN * seconds)
        found: list[float] = await running(controller, work, 100 * seconds * steps)
        return found

    with tempfile.TemporaryDirectory() as folder:
        return statistics.median(asyncio.run(body(Path(folder))))


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()

    async def nothing() -> None: ...

    async def waits() -> None:
        await asyncio.sleep(given.seconds)

    found: dict[str, dict[str, float]] = {}
    with ProcessPoolExecutor(1) as pool:

        async def computes() -> None:
            await asyncio.get_running_loop().run_in_executor(pool, burn, given.seconds / GROUPS)

        for arm, barrier in (("stream", False), ("barrier", True)):
            spends = {"none": nothing, "waits": waits, "computes": computes}
            found[arm] = {
                name: measured(given.seconds, given.steps, spend, barrier=barrier)
                for name, spend in spends.items()
            }
    print(f"{'':10}{'no scores':>12}{'they wait':>12}{'cost':>8}{'they compute':>14}{'cost':>8}")
    for arm, row in found.items():
        costs = {name: row[name] / row["none"] - 1.0 for name in row}
        print(
            f"{arm:10}{row['none']:>10.2f} s{row['waits']:>10.2f} s{costs['waits']:>8.1%}"
            f"{row['computes']:>12.2f} s{costs['computes']:>8.1%}"
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(found["stream"]["waits"] / found["stream"]["none"] - 1.0 >= MOST)


if __name__ == "__main__":
    sys.exit(main())
