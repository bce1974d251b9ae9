"""Thousands of open episodes: the lag of the controller's loop, and whether episodes wait.

    python bench/open_episodes.py [--episodes 2000] [--seconds 240] [--scale 1.0] [--workers 1]
        [--json FILE]

The real Producer, TurnRouter, ScoringStage and recording of turns, in the process and the two
event loops of a run.  Engines and environments are stubs that wait: an environment 0 to 60 s per
turn (lognormal, median 5 s), an engine 0 to 8 s, so most episodes last a minute, some several.
Their waits are drawn by the name of the turn, so the time that an episode would take alone is their
sum.  A trainer takes plans, publishes (which interrupts every turn on an engine) and reports.

--scale multiplies all waits, for short runs: 0.1 is ten times the load of a real run.  --workers 0
has the environments in this process instead of worker processes.

Printed: lag of the loop (how late a task that sleeps 5 ms wakes); CPU time of its callbacks, which
tells its own blocking from that of a busy machine; and over the ended episodes their time less the
time alone, which is what waiting for others, for event loops and for updates has cost, for those of
the first second apart, in which all begin at once.  Nothing is asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import random
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
from controller_load import (
    ENGINES,
    LAYERS,
    Records,
    StubEngine,
    StubScorer,
    Traffic,
    Trainer,
    Watch,
)
from waiting_environment import Waiting, all_waits_s

from moerl.agents.environments.environment_episodes import EnvironmentEpisodes, OpenEnvironment
from moerl.agents.environments.environment_pool import EnvironmentPool
from moerl.agents.episode_types import PlainAnswers, Policy
from moerl.agents.prompt_tokens import PromptTokens
from moerl.agents.stop_texts import StopFinder
from moerl.config.schema import (
    Config,
    EngineConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TinyModel,
    TrainerConfig,
)
from moerl.controller.context import Services
from moerl.controller.controller import Controller
from moerl.controller.journal.journal import Journal
from moerl.core.messages import CommitUpdate, UpdateDone
from moerl.core.types import GenerateRequest, ModelShape, Prompt
from moerl.episodes.open_episode import OpenEpisode, Outcome

GROUP = 8
MEAN_TOKENS, MAX_TOKENS, CONTEXT = 200, 1000, 32768


def draw(name: str) -> random.Random:
    return random.Random(name)


def wanted_tokens(turn: str) -> int:
    return max(1, min(MAX_TOKENS, int(draw(turn).lognormvariate(0.0, 0.8) * MEAN_TOKENS / 1.38)))


@dataclass
class Waits:
    """Seconds that turns wait on engines; and their sum for each episode that runs."""

    scale: float
    alone: Counter[str] = field(default_factory=Counter)

    def engine(self, request: GenerateRequest) -> float:
        """Of the whole turn, or of the rest after an interruption."""
        whole_s = self.scale * min(8.0, draw(f"engine {request.rollout_id}").lognormvariate(0, 1))
        if not request.segment:
            self.alone[request.rollout_id.rpartition(".")[0]] += whole_s
        return whole_s * (1 - request.num_sampled / wanted_tokens(request.rollout_id))


class TurnStubEngine(StubEngine):
    """Each turn takes its own time; an update interrupts what runs."""

    def __init__(self, index: int, traffic: Traffic, waits: Waits, vocab_size: int) -> None:
        super().__init__(index, traffic, 0.0)
        self.waits = waits
        self.cuts = dict[str, asyncio.Event]()  # set: the request ends; by its name
        self.ids = (
            np.random.default_rng(index).integers(3, vocab_size, len(self.ids)).astype(np.int32)
        )

    async def _generate(self, requests: Sequence[GenerateRequest]) -> None:
        await asyncio.gather(*map(self._turn, requests))

    async def _turn(self, request: GenerateRequest) -> None:
        version, begin, cut = self.version, time.time(), asyncio.Event()
        seconds, done = self.waits.engine(request), 1.0
        self.cuts[request.name] = cut
        try:
            async with asyncio.timeout(seconds):
                await cut.wait()
            done = min(0.999, (time.time() - begin) / max(seconds, 1e-9))
        except TimeoutError:
            pass
        del self.cuts[request.name]
        self.mailbox.put(request.name, self._one(request, version, done, begin))

    async def abort(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.cuts:
                self.cuts[name].set()

    async def session(self, update: CommitUpdate) -> UpdateDone:
        closed = await super().session(update)
        await self.abort(list(self.cuts))
        return closed

    def wanted(self, request: GenerateRequest) -> int:
        return wanted_tokens(request.rollout_id)


@dataclass
class StubEnvironments:
    """Environments in this process."""

    scale: float

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def open(self, name: str) -> OpenEnvironment:
        return Waiting(self.scale)


@dataclass
class Timed:
    """The runner, with the time of each episode against its time alone."""

    runner: EnvironmentEpisodes
    waits: Waits
    open_now: int = 0
    most: int = 0
    times: list[tuple[float, float, float]] = field(default_factory=list)  # begin, taken, alone

    async def start(self) -> None:
        await self.runner.start()

    async def run(self, episode: OpenEpisode) -> Outcome:
        name, begin = episode.name, time.monotonic()
        self.open_now += 1
        self.most = max(self.most, self.open_now)
        try:
            outcome = await self.runner.run(episode)
        finally:
            self.open_now -= 1
            alone = self.waits.alone.pop(name, 0.0) + self.waits.scale * all_waits_s(name)
        if not outcome.failure:
            self.times.append((begin, time.monotonic() - begin, alone))
        return outcome

    def end(self, name: str) -> None:
        self.runner.end(name)

    async def close(self) -> None:
        await self.runner.close()


class Callbacks:
    """CPU time of each callback of this thread's event loop."""

    def __init__(self) -> None:
        self.cpu_ms: list[float] = []

    def watch(self) -> None:
        here, run = threading.get_ident(), asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            if threading.get_ident() != here:
                run(handle)
                return
            begin = time.thread_time()
            run(handle)
            self.cpu_ms.append(1e3 * (time.thread_time() - begin))

        asyncio.Handle._run = timed  # type: ignore[method-assign]


class Prompts:
    def prompt(self, index: int) -> Prompt:
        return Prompt(index, (3, 4), "Do what is asked.", "", {})


def tokens_of(folder: Path) -> PromptTokens:
    from transformers import AutoTokenizer

    from moerl.data.tiny_model import make_tiny_model

    make_tiny_model(folder, TinyModel(), 0)
    return PromptTokens(AutoTokenizer.from_pretrained(folder))


def config_of(episodes: int, scale: float, workers: int) -> Config:
    groups = max(1, episodes // GROUP)
    task = TaskConfig(
        environment="waiting_environment:Waiting",
        environment_options={"scale": scale},
        environment_workers=max(1, workers),
        wall_s=36000.0,
    )
    return Config(
        run=RunConfig(steps=10**6),
        task=task,
        rollout=RolloutConfig(
            groups_per_step=max(1, groups // 8),
            group_size=GROUP,
            max_lag=1000,
            buffer_depth=16,
            max_groups_in_flight=groups,
        ),
        sampling=SamplingConfig(max_new_tokens=MAX_TOKENS),
        engine=EngineConfig(count=ENGINES),
        trainer=TrainerConfig(max_tokens_per_microbatch=65536),
    )


async def load(episodes: int, seconds: float, scale: float, workers: int) -> dict[str, object]:
    config, waits, traffic = config_of(episodes, scale, workers), Waits(scale), Traffic()
    watch, callbacks = Watch(), Callbacks()
    trainer = Trainer(4.0 * scale, traffic, watch)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = tokens_of(folder / "model")
        policy = Policy(tokens, StopFinder(tokens), PlainAnswers(), CONTEXT)
        pool = EnvironmentPool(config.task) if workers else StubEnvironments(scale)
        runner = Timed(EnvironmentEpisodes(config.task, policy, pool), waits)
        engines = {i: TurnStubEngine(i, traffic, waits, tokens.vocab_size) for i in range(ENGINES)}
        blobs = Records(folder / "blobs", "n0")
        services = Services(
            model=ModelShape(tokens.vocab_size, len(LAYERS), LAYERS, 128, 8),
            engines=engines,  # type: ignore[arg-type]
            sizes=dict.fromkeys(range(ENGINES), 1),
            scorer=StubScorer(),
            prompts=Prompts(),
            decode=lambda ids: "",
            encode=lambda text: list(text.encode()),
            blobs=blobs,
            journal=Journal(folder / "journal", blobs),
            saved_steps=trainer.saved,
            on_step=lambda report: None,
            on_rewind=lambda step: None,
            agents={"": runner},
        )
        controller = Controller(config, services)
        controller.engines_started()
        callbacks.watch()
        running = asyncio.create_task(controller.run())
        beat = asyncio.create_task(watch.run())
        before_s, begin = time.process_time(), time.monotonic()
        training = asyncio.create_task(trainer.run(controller, begin + seconds))
        await asyncio.wait({running, training}, timeout=seconds)
        took_s, cpu_s = time.monotonic() - begin, time.process_time() - before_s
        beat.cancel()
        cpu_ms = list(callbacks.cpu_ms)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await controller.stop()
        await running
    known = {"steps": trainer.steps, "seconds": round(took_s, 1), "cpu_s": round(cpu_s, 1)}
    return known | figures(watch.late_ms, cpu_ms, runner)


def figures(late_ms: list[float], cpu_ms: list[float], runner: Timed) -> dict[str, object]:
    begins, taken, alone = np.array(runner.times or [(0.0, 0.0, 0.0)]).T
    over = taken - alone
    first = begins < begins.min() + 1.0
    return {
        "most_open": runner.most,
        "episodes_ended": len(runner.times),
        "loop_lag_ms": spread(np.array(late_ms), 2),
        "callback_cpu_ms": spread(np.array(cpu_ms), 2),
        "episode_s": spread(taken, 3),
        "episode_alone_s": spread(alone, 3),
        "longer_than_alone_s": spread(over, 4),
        "of_the_first_second_s": spread(over[first], 4),  # thousands begin at once
        "of_all_later_s": spread(over[~first], 4),
    }


def spread(values: np.ndarray, digits: int) -> dict[str, float]:
    found = np.percentile(values if len(values) else [np.nan], [50, 90, 99, 100])
    return dict(zip(("p50", "p90", "p99", "max"), found.round(digits).tolist(), strict=True))


def machine() -> dict[str, object]:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    load_1, _, _ = os.getloadavg()
    return {
        "commit": commit,
        "cpus": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "load_of_machine_before": round(load_1, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--scale", type=float, default=1.0, help="of all waits")
    parser.add_argument("--workers", type=int, default=1, help="0: none")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    known = machine()
    gc.freeze()
    found = (
        known
        | vars(args)
        | asyncio.run(load(args.episodes, args.seconds, args.scale, args.workers))
    )
    found["json"] = str(args.json or "")
    for name, value in found.items():
        print(f"{name:24} {value}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
