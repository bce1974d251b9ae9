"""Agents that wait for tools: the time of a step with a group quorum and without.

    python bench/stragglers.py [--steps 60] [--quorum 6] [--slow 0.02]

The real Producer, Player, TurnRouter, ScoringStage and buffer, with stub engines and environments
that wait, under a clock that jumps to the next timer: seconds are those of the run that is played,
whatever the load of this machine.  Episodes have 3 to 8 turns.  Each waits for a tool before its
first turn and after each turn: a lognormal time of 5 s in the median, and with the chance of
--slow 30 times that.  A turn takes an engine 0 to 8 s.  A trainer takes plans, works, publishes
(which interrupts every turn on an engine) and reports.

Three runs of the same prompts with the same waits: groups that wait for all 8 siblings; groups that
close with 6 and carry the late ones into a later group; groups that drop the late ones.

Printed: seconds per step, which has 8 groups of any size, and per trained episode; and the bias of
lengths: means over the trained episodes beside means over all that began, without those of the last
ten minutes, which may still be open.  Every length is drawn by the name of the episode, so it is
known of episodes that were given up, too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import random
import selectors
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from controller_load import ENGINES, LAYERS, Records, StubScorer, Traffic, Trainer, Watch
from open_episodes import GROUP, MAX_TOKENS, TurnStubEngine, Waits, machine, wanted_tokens
from waiting_environment import MEDIAN_WAIT_S, num_turns

from moerl.config.load import resolve
from moerl.config.schema import (
    Config,
    EngineConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
)
from moerl.controller.context import Services
from moerl.controller.controller import Controller
from moerl.controller.journal.journal import Journal
from moerl.controller.player import EnvironmentRunner
from moerl.controller.step_metrics import StepReport
from moerl.core.ids import episode_of
from moerl.core.messages import Message, Plan, SamePlan
from moerl.core.types import Array, BatchPlan, ModelShape, Prompt
from moerl.episodes.finished_episode import RecordedTurn
from moerl.episodes.open_episode import EpisodeSpec

T = TypeVar("T")
GROUPS_PER_STEP, STEP_S, VOCABULARY = 8, 4.0, 1000
SLOW, SIGMA = 30, 0.5  # times the median; of the lognormal waits
OBSERVATION = np.arange(3, 43, dtype=np.int32)
WARM_STEPS = 10  # in which all groups begin together
OPEN_S = 600.0  # episodes that began later may be open at the end
ARMS = {
    "all siblings": {},
    "quorum, carry": {"late_siblings": "carry"},
    "quorum, drop": {"late_siblings": "drop"},
}
_COUNTS = ("carried_siblings", "dropped_siblings", "cancelled_groups")


class JumpingClock(selectors.DefaultSelector):
    """Time passes only when nothing can run; then it is that of the next timer."""

    now = 1.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(timeout if timeout is None else 0)
        if not events and timeout:
            self.now += timeout
        return events


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = JumpingClock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def run_jumping(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; clocks show the loop's time, and work for threads is done at once."""

    async def at_once(function: Callable[..., Any], /, *args: Any, **fields: Any) -> Any:
        return function(*args, **fields)

    loop, plain = JumpingLoop(), (time.monotonic, time.time, asyncio.to_thread)
    time.monotonic = time.time = loop.time
    asyncio.to_thread = at_once
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(work)
    finally:
        time.monotonic, time.time, asyncio.to_thread = plain


@dataclass
class Tools:
    """The waits of all episodes."""

    slow: float  # chance of a wait that is SLOW times the median
    begun: dict[str, float] = field(default_factory=dict)  # when, by episode

    def wait_s(self, name: str, place: int) -> float:
        draw = random.Random(f"tool {name} {place}")
        if draw.random() < self.slow:
            return MEDIAN_WAIT_S * SLOW
        return MEDIAN_WAIT_S * draw.lognormvariate(0.0, SIGMA)

    def lengths(self, name: str) -> tuple[float, float, float]:
        """Sampled tokens, turns, and seconds of waiting of a whole episode."""
        turns = num_turns(name)
        tokens = sum(wanted_tokens(f"{name}.t{turn}") for turn in range(turns))
        return tokens, turns, sum(self.wait_s(name, place) for place in range(turns + 1))

    def open(self, spec: EpisodeSpec) -> Waiting:
        self.begun[spec.name] = time.monotonic()
        return Waiting(spec, self)


class Waiting:
    """An `Environment` of one episode."""

    counts: Mapping[str, float] = {}

    def __init__(self, spec: EpisodeSpec, tools: Tools) -> None:
        self._spec, self._tools = spec, tools

    async def reset(self) -> Array:
        await asyncio.sleep(self._tools.wait_s(self._spec.name, 0))
        return self._spec.prompt_ids

    async def step(self, turns: Sequence[RecordedTurn]) -> Array | None:
        await asyncio.sleep(self._tools.wait_s(self._spec.name, len(turns)))
        return OBSERVATION if len(turns) < num_turns(self._spec.name) else None


class Prompts:
    def prompt(self, index: int) -> Prompt:
        return Prompt(index, (3, 4), "Do what is asked.", "", {})


@dataclass
class Recorder:
    """The controller, as the trainer sees it."""

    controller: Controller
    ahead: BatchPlan | None = None  # the next step's plan, if it came with this one's
    trained: list[str] = field(default_factory=list)  # episodes
    counts: list[int] = field(default_factory=list)  # of episodes, by plan
    times: list[float] = field(default_factory=list)  # of the plans

    async def handle(self, message: Message) -> Message:
        reply = await self.controller.handle(message)
        if isinstance(reply, Plan | SamePlan):
            self.times.append(time.monotonic())
            plan = reply.plan if isinstance(reply, Plan) else self.ahead
            assert plan is not None
            self.ahead = reply.ahead
            episodes = [episode for group in plan.groups for episode in group.episodes]
            self.counts.append(len(episodes))
            self.trained += [episode_of(episode.graph[0].name) for episode in episodes]
        return reply


def config_of(quorum: int, arm: Mapping[str, Any]) -> Config:
    return resolve(
        Config(
            run=RunConfig(steps=10**6),
            task=TaskConfig(environment="waiting_environment:Waiting", wall_s=36000.0),
            rollout=RolloutConfig(
                groups_per_step=GROUPS_PER_STEP,
                group_size=GROUP,
                group_quorum=quorum if arm else 0,
                max_lag=8,
                buffer_depth=1,
                max_groups_in_flight=2 * GROUPS_PER_STEP,
                **arm,
            ),
            sampling=SamplingConfig(max_new_tokens=MAX_TOKENS),
            engine=EngineConfig(count=ENGINES),
            trainer=TrainerConfig(max_tokens_per_microbatch=65536),
        )
    )


async def load(steps: int, quorum: int, slow: float, arm: Mapping[str, Any]) -> dict[str, Any]:
    config, traffic, tools = config_of(quorum, arm), Traffic(), Tools(slow)
    waits, trainer = Waits(1.0), Trainer(STEP_S, traffic, Watch())
    counts, lags = dict.fromkeys(_COUNTS, 0.0), list[float]()

    def on_step(report: StepReport) -> None:
        lags.append(report.metrics["async/lag_mean"])
        for name in _COUNTS:
            counts[name] += report.metrics.get(f"async/{name}", 0.0)

    with tempfile.TemporaryDirectory() as name:
        blobs = Records(Path(name) / "blobs", "n0")
        engines = {i: TurnStubEngine(i, traffic, waits, VOCABULARY) for i in range(ENGINES)}
        services = Services(
            model=ModelShape(VOCABULARY, len(LAYERS), LAYERS, 128, 8),
            engines=engines,  # type: ignore[arg-type]
            sizes=dict.fromkeys(engines, 1),
            scorer=StubScorer(),
            prompts=Prompts(),
            decode=lambda ids: "",
            encode=lambda text: list(text.encode()),
            blobs=blobs,
            journal=Journal(Path(name) / "journal", blobs),
            saved_steps=trainer.saved,
            on_step=on_step,
            on_rewind=lambda step: None,
            agents={"": EnvironmentRunner(tools.open)},
        )
        controller = Controller(config, services)
        controller.engines_started()
        running = asyncio.create_task(controller.run())
        recorder = Recorder(controller)
        training = asyncio.create_task(trainer.run(recorder, math.inf, steps))
        await asyncio.wait({running, training}, return_when=asyncio.FIRST_COMPLETED)
        end_s = time.monotonic()
        if running.done():
            running.result()
        await training
        await controller.stop()
        await running
    lag = round(float(np.mean(lags[WARM_STEPS:])), 2)
    return figures(tools, recorder, end_s) | {"lag_mean": lag} | counts


def figures(tools: Tools, recorder: Recorder, end_s: float) -> dict[str, Any]:
    """Of the steps behind the first ones, and of the episodes whose fate is known."""
    step_s = np.diff(recorder.times[WARM_STEPS:])
    counts = np.array(recorder.counts[WARM_STEPS:-1])
    known = {name for name, begun in tools.begun.items() if begun < end_s - OPEN_S}
    trained = known.intersection(recorder.trained)
    found: dict[str, Any] = {
        "steps": len(step_s),
        "step_s": round(float(step_s.mean()), 2),
        "step_s_p90": round(float(np.percentile(step_s, 90)), 2),
        "episodes_per_step": round(float(counts.mean()), 1),
        "episode_s": round(float(step_s.sum() / counts.sum()), 3),
        "episodes": len(known),
        "trained": len(trained),
        "twice": len(recorder.trained) - len(set(recorder.trained)),
    }
    of_all = np.array([tools.lengths(name) for name in sorted(known)])
    of_trained = np.array([tools.lengths(name) for name in sorted(trained)])
    for place, what in enumerate(("tokens", "turns", "waits_s")):
        means = of_trained[:, place].mean(), of_all[:, place].mean()
        found[what] = [round(float(mean), 1) for mean in means]
        found[f"{what}_bias"] = f"{means[0] / means[1] - 1:+.1%}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quorum", type=int, default=6)
    parser.add_argument("--slow", type=float, default=0.02, help="chance of a slow wait")
    args = parser.parse_args()
    print(machine() | vars(args))
    gc.freeze()
    base: dict[str, Any] = {}
    for name, arm in ARMS.items():
        found = run_jumping(load(args.steps, args.quorum, args.slow, arm))
        base = base or found
        step, episode = (found[what] / base[what] for what in ("step_s", "episode_s"))
        print(f"\n{name}: {step:.3f} of the seconds per step, {episode:.3f} per trained episode")
        for what, value in found.items():
            print(f"  {what:18} {value}", flush=True)


if __name__ == "__main__":
    main()
