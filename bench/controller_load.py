"""The controller alone under load: tens of thousands of episodes in flight on stub engines.

    python bench/controller_load.py [--episodes 20000] [--seconds 300] [--quick]

The real controller with its buffer, admission, batching and step metrics, in one process and one
event loop.  Engines and scorer are stubs that wait like real ones (heavy-tailed answer times) and
give records of random tokens; requests, replies and plans go through the same encoding as between
processes (pickle to the engines as Ray does, msgpack to the trainer), whose cost falls on this
loop.  A trainer takes plans, waits, publishes (which interrupts every running call), reports and
saves.

Reported, and required (exit status 1 when not):
- lag of the event loop: how late a task that sleeps 5 ms wakes; 99% below 50 ms.  How much CPU the
  process used meanwhile tells its own blocking from that of a busy machine.
- bytes per sampled token that go through the controller, all directions; at most 16
- memory: its mean over a checkpoint's cycle, growth from the first to the last whole one, without
  the first steps, in which buffer, journal and rollouts of several versions fill up; flat
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import pickle
import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from moerl.config.schema import (
    Config,
    EngineConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)
from moerl.controller.context import Services
from moerl.controller.controller import Controller
from moerl.controller.journal.journal import Journal
from moerl.core.episode_view import ScoreRequest
from moerl.core.messages import (
    Answers,
    CommitUpdate,
    EngineStatus,
    Hello,
    Plan,
    SamePlan,
    StepDone,
    TakePlan,
    UpdateDone,
)
from moerl.core.serialization import encode
from moerl.core.types import (
    BatchPlan,
    BlobRef,
    Finish,
    GenerateRequest,
    LogprobBlob,
    ModelShape,
    PolicyVersion,
    Prompt,
    RoutingBlob,
    Score,
    Segment,
)
from moerl.engine.host.host import Mailbox
from moerl.records import BlobStore
from moerl.records.blob_store import Found

GROUP, DEPTH, ENGINES = 16, 4, 16
PROMPT, MEAN_TOKENS, MAX_TOKENS = 200, 800, 4000
LAYERS, EXPERTS, TOP_K = tuple(range(48)), 128, 8
CHECKPOINT_EVERY = 5  # steps; groups that a restart could train again are kept until then
WARM_CYCLES = 3  # checkpoints
LAG_MS, BYTES, GROWTH = 50.0, 16.0, 0.05
FIRST = PolicyVersion(0, 0)
_INLINE = np.zeros(0, np.float32)  # log-probabilities are sealed with the routes


class Traffic:
    """Bytes that went through the controller, and tokens that they were for.

    Requests and replies are divided by the tokens sampled, plans by those planned: at any moment
    most of what was sampled is still in the buffer.
    """

    def __init__(self) -> None:
        self.bytes: dict[str, int] = dict.fromkeys(("requests", "replies", "plans"), 0)
        self.sampled = self.planned = 0

    def per_token(self) -> dict[str, float]:
        tokens = {"requests": self.sampled, "replies": self.sampled, "plans": self.planned}
        return {kind: total / max(1, tokens[kind]) for kind, total in self.bytes.items()}

    def carry(self, kind: str, value: Any) -> Any:
        """To another process and back."""
        data = pickle.dumps(value, protocol=5)
        self.bytes[kind] += len(data)
        return pickle.loads(data)


class StubEngine:
    """Answers after a heavy-tailed time; an update interrupts what runs."""

    def __init__(self, index: int, traffic: Traffic, scale_s: float) -> None:
        self.index, self.traffic, self.scale_s = index, traffic, scale_s
        self.version, self.updated = FIRST, asyncio.Event()
        self.draw, made = random.Random(index), np.random.default_rng(index)
        self.ids = made.integers(0, 150_000, 10 * MAX_TOKENS, dtype=np.int32)
        self.line = asyncio.Lock()  # answers of one engine arrive one after another
        self.tokens = 0
        self.mailbox = Mailbox()
        self.running = set[asyncio.Task[None]]()

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        carried = self.traffic.carry("requests", requests)
        groups: dict[str, list[GenerateRequest]] = {}
        for request in carried:
            groups.setdefault(request.rollout_id.partition(".")[0], []).append(request)
        for group in groups.values():
            task = asyncio.create_task(self._generate(group))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    async def collect(self) -> Answers:
        return self.traffic.carry("replies", await self.mailbox.collect())

    async def abort(self, names: Sequence[str]) -> None: ...

    async def _generate(self, requests: Sequence[GenerateRequest]) -> None:
        version = self.version
        begin = time.time()
        seconds = min(8.0, self.draw.lognormvariate(0.0, 1.0)) * self.scale_s
        updated = self.updated
        try:
            async with asyncio.timeout(seconds):
                await updated.wait()
        except TimeoutError:
            done = 1.0
        else:
            done = min(1.0, (time.time() - begin) / seconds)
        async with self.line:
            await asyncio.sleep(0)
            for request in requests:
                self.mailbox.put(request.name, self._one(request, version, done, begin))

    def wanted(self, request: GenerateRequest) -> int:
        """Tokens of the whole answer."""
        drawn = random.Random(request.rollout_id).lognormvariate(0.0, 0.8)
        return min(MAX_TOKENS, int(drawn * MEAN_TOKENS / 1.38))

    def _one(
        self, request: GenerateRequest, version: PolicyVersion, done: float, begin: float
    ) -> Segment:
        left = max(1, self.wanted(request) - request.num_sampled)
        count = left if done == 1.0 else int(left * done)
        self.tokens += count
        self.traffic.sampled += count
        first = request.rows_from
        end = request.num_tokens + count - 1
        at = self.draw.randrange(9 * MAX_TOKENS)
        routing = sealed = None
        if count:
            uri = f"blob://n0/{request.rollout_id}.{request.segment}.0"
            ref = BlobRef(uri, 0, "uint8", (len(LAYERS), end - first, TOP_K), "0" * 16)
            routing = RoutingBlob(ref, first, end, version, LAYERS, EXPERTS)
            values = BlobRef(uri, ref.num_bytes, "float32", (count,), "0" * 16)
            sealed = LogprobBlob(values, request.num_sampled, count)
        return Segment(
            rollout_id=request.rollout_id,
            output_ids=self.ids[at : at + count],
            logprobs=_INLINE,
            version=version,
            finish=Finish.STOP if done == 1.0 else Finish.ABORT,
            routing=routing,
            sampling_mask=None,
            audit_rows=None,
            engine=self.index,
            cached_tokens=0,
            start_s=begin,
            end_s=time.time(),
            sealed_logprobs=sealed,
        )

    async def session(self, update: CommitUpdate) -> UpdateDone:
        await asyncio.sleep(0.05)  # the pause of a real one
        self.version = update.version
        self.updated.set()
        self.updated = asyncio.Event()
        return UpdateDone(pause_s=0.01, aborted=0)

    async def status(self) -> EngineStatus:
        return EngineStatus(self.index, self.version, 1, 0, self.tokens, 0.0)


class StubScorer:
    async def score(self, task: str, term: str, asked: Sequence[ScoreRequest]) -> list[Score]:
        await asyncio.sleep(0.05)
        siblings = [request.key.split(".")[1] for request in asked]
        return [Score(float(int(sibling.partition("~")[0][-1]) % 2)) for sibling in siblings]

    async def reply(self, prompt: Prompt, responses: Sequence[str]) -> str:
        raise AssertionError("nothing is asked of an environment")


class Records(BlobStore):
    """The stub engines seal nothing, and whoever asks is told that all is there."""

    def find(self, uris: Iterable[str], patience_s: float = 0.0) -> Found:
        return Found(set(), set())


class Prompts:
    def prompt(self, index: int) -> Prompt:
        return Prompt(index, tuple(range(PROMPT)), "", None, {})


class Watch:
    """Lateness of a short sleep, and memory, as the run goes on."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self.held_ms: list[float] = []  # CPU of this process in the same time
        self.rss: dict[int, list[int]] = {}  # by checkpoint of the trainer
        self.cycle = 0

    async def run(self) -> None:
        own, beat = psutil.Process(), 0
        while True:
            begin, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.005)
            self.held_ms.append((time.thread_time() - cpu) * 1e3)
            self.late_ms.append((time.perf_counter() - begin - 0.005) * 1e3)
            beat += 1
            if beat % 40 == 0:
                self.rss.setdefault(self.cycle, []).append(own.memory_info().rss)


class Trainer:
    """Takes plans, publishes, reports, and saves a checkpoint every few steps."""

    def __init__(self, step_s: float, traffic: Traffic, watch: Watch) -> None:
        self.step_s, self.traffic, self.watch = step_s, traffic, watch
        self.steps = 0
        self.ahead: BatchPlan | None = None  # the next step's plan, if it came with this one's

    def saved(self) -> int:
        """Optimizer steps inside the newest checkpoint."""
        return self.steps // CHECKPOINT_EVERY * CHECKPOINT_EVERY

    async def run(self, controller: Controller, until_s: float, steps: float = inf) -> None:
        await controller.handle(Hello(1, 1, FIRST, (), (FIRST,)))
        while time.monotonic() < until_s and self.steps < steps:
            await self._step(controller)

    async def _step(self, controller: Controller) -> None:
        step, traffic = self.steps, self.traffic
        reply = await controller.handle(TakePlan(step, 600.0, 0, self.ahead is not None))
        assert isinstance(reply, Plan | SamePlan), reply
        plan = reply.plan if isinstance(reply, Plan) else self.ahead
        assert plan is not None
        self.ahead = reply.ahead
        traffic.bytes["plans"] += len(await asyncio.to_thread(encode, reply))
        traffic.planned += sum(
            rollout.num_sampled for group in plan.groups for rollout in group.rollouts()
        )
        await asyncio.sleep(self.step_s)
        version = PolicyVersion(0, step + 1)
        self.steps += 1
        self.watch.cycle = self.steps // CHECKPOINT_EVERY
        await controller.handle(StepDone(step, version, {"mismatch/tokens": 1.0}, ""))
        for engine in range(ENGINES):
            await controller.handle(CommitUpdate(engine, version, 600.0))


async def load(episodes: int, seconds: float, step_s: float) -> bool:
    """Run, print, and say whether every requirement holds."""
    per_step = episodes // GROUP // (DEPTH + 1)
    config = Config(
        run=RunConfig(steps=10**6),
        rollout=RolloutConfig(
            groups_per_step=per_step,
            group_size=GROUP,
            max_lag=2 * DEPTH,
            buffer_depth=DEPTH,
            max_groups_in_flight=episodes,
        ),
        sampling=SamplingConfig(max_new_tokens=MAX_TOKENS),
        engine=EngineConfig(count=ENGINES),
        trainer=TrainerConfig(max_tokens_per_microbatch=65536),
    )
    traffic, watch = Traffic(), Watch()
    trainer = Trainer(step_s, traffic, watch)
    with tempfile.TemporaryDirectory() as folder:
        blobs = Records(Path(folder) / "blobs", "n0")
        services = Services(
            model=ModelShape(150_000, len(LAYERS), LAYERS, EXPERTS, TOP_K),
            engines={i: StubEngine(i, traffic, 2.0 * step_s) for i in range(ENGINES)},  # type: ignore[misc]
            sizes=dict.fromkeys(range(ENGINES), 1),
            scorer=StubScorer(),
            prompts=Prompts(),
            decode=lambda ids: "",
            encode=lambda text: list(text.encode()),
            blobs=blobs,
            journal=Journal(Path(folder) / "journal", blobs),
            saved_steps=trainer.saved,
            on_step=lambda report: None,
            on_rewind=lambda step: None,
        )
        controller = Controller(config, services)
        controller.engines_started()
        running = asyncio.create_task(controller.run())
        beat = asyncio.create_task(watch.run())
        before_s = time.process_time()
        await trainer.run(controller, time.monotonic() + seconds)
        cpu_s = time.process_time() - before_s
        most = controller.status()["async/in_flight"]
        beat.cancel()
        await controller.stop()
        await running
    return report(watch, traffic, trainer.steps, cpu_s, int(most))


def report(watch: Watch, traffic: Traffic, steps: int, cpu_s: float, in_flight: int) -> bool:
    """The figures and the requirements."""
    late = np.array(watch.late_ms)
    p50, p99, worst = np.percentile(late, [50, 99, 100])
    held50, held99, held = np.percentile(watch.held_ms, [50, 99, 100])
    per_token = traffic.per_token()
    cycles = [float(np.mean(rss)) / 2**20 for _, rss in sorted(watch.rss.items())]
    whole = cycles[WARM_CYCLES:-1]
    growth = whole[-1] / whole[0] - 1 if len(whole) > 2 else np.inf  # too few to tell: run longer
    print(f"{steps} steps, {traffic.planned:,} tokens planned, {in_flight:,} episodes in flight")
    print(f"CPU {cpu_s:.1f} s, {cpu_s / traffic.sampled * 1e6:.2f} us per sampled token")
    print(f"loop lag ms: 50% {p50:.1f}, 99% {p99:.1f}, worst {worst:.0f} ({len(late):,} beats)")
    print(f"of it own CPU ms: 50% {held50:.1f}, 99% {held99:.1f}, worst {held:.0f}")
    print("bytes per token: " + ", ".join(f"{k} {v:.2f}" for k, v in per_token.items()))
    print(f"memory by checkpoint, MiB: {', '.join(f'{mib:.0f}' for mib in cycles)}: {growth:+.1%}")
    checks = {
        f"99% of loop lag below {LAG_MS:g} ms": p99 < LAG_MS,
        f"at most {BYTES:g} bytes per token": sum(per_token.values()) <= BYTES,
        f"memory grows less than {GROWTH:.0%}": growth < GROWTH,
    }
    for text, holds in checks.items():
        print(f"{'PASS' if holds else 'FAIL'}  {text}")
    return all(checks.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--step-s", type=float, default=4.0, help="of the stub trainer")
    parser.add_argument("--quick", action="store_true", help="2,000 episodes, 200 s")
    args = parser.parse_args()
    episodes, seconds = (2_000, 200.0) if args.quick else (args.episodes, args.seconds)
    gc.freeze()
    raise SystemExit(0 if asyncio.run(load(episodes, seconds, args.step_s)) else 1)


if __name__ == "__main__":
    main()
