"""Answers that take half an hour, under a fake clock: no call is lost, and nothing is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from moerl.config import load_config
from moerl.config.schema import Config, RolloutConfig, RunConfig, SamplingConfig
from moerl.controller import controller as controller_module
from moerl.controller.controller import Controller
from moerl.core.errors import EngineError, ProtocolError
from moerl.core.messages import Answers, Message, Ok, Plan, SessionMessage, StepDone, TakePlan
from moerl.core.types import Finish, GenerateRequest, PolicyVersion, Segment
from tests.helpers.controllers import hello, make, publish
from tests.helpers.fake_clock import run_with_fake_clock
from tests.helpers.stub_engine import StubEngine

LENGTH = 1800  # tokens and seconds of an answer
ROOM = 4  # answers that the engine decodes side by side; the others wait for room
LARGE = load_config("qwen3-30b-a3b")
CONFIG = Config(
    run=RunConfig(steps=4),
    rollout=RolloutConfig(groups_per_step=2, group_size=2, max_lag=2),
    sampling=SamplingConfig(max_new_tokens=LENGTH),
)


@dataclass(eq=False)
class Running:
    request: GenerateRequest
    sampled: int = 0
    aborted: bool = False


class SlowEngine(StubEngine):
    """A token per second and request; an update and an abort return what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.decoding, self.queue = list[Running](), list[Running]()
        self.sampled = self.returned = 0  # tokens
        self.stuck = self.deaf = False  # decodes nothing, does not hear aborts either
        self.room = ROOM
        self.aborts: list[str] = []
        self.calls = self.most_calls = 0  # messages of the controller in progress
        self.clock: asyncio.Task[None] | None = None

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        with self._in_progress():
            self.requests += requests
            self.queue += [Running(request) for request in requests]
            self.clock = self.clock or asyncio.create_task(self._tick())

    async def collect(self) -> Answers:
        with self._in_progress():
            return await self.mailbox.collect()

    async def session(self, message: SessionMessage) -> Message:
        with self._in_progress():
            return await super().session(message)

    @contextmanager
    def _in_progress(self) -> Iterator[None]:
        self.calls += 1
        self.most_calls = max(self.most_calls, self.calls)
        try:
            yield
        finally:
            self.calls -= 1

    async def abort(self, names: Sequence[str]) -> None:
        self.aborts += names
        if not self.deaf:
            self._end([one for one in self._all() if one.request.name in names], aborted=True)

    async def _update(self, version: PolicyVersion) -> None:
        self._end(self._all(), aborted=True)
        self.version = version

    def _all(self) -> list[Running]:
        return [*self.decoding, *self.queue]

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(10.0)
            while self.queue and len(self.decoding) < self.room:
                self.decoding.append(self.queue.pop(0))
            if self.stuck or not self.decoding:
                continue
            self.mailbox.progress += 1
            for one in self.decoding:
                one.sampled = min(one.sampled + 10, one.request.sampling.max_new_tokens)
            done = [o for o in self.decoding if o.sampled == o.request.sampling.max_new_tokens]
            self._end(done, aborted=False)

    def _end(self, ended: list[Running], *, aborted: bool) -> None:
        for one in ended:
            (self.decoding if one in self.decoding else self.queue).remove(one)
            self.returned += one.sampled
            segment = Segment(
                one.request.rollout_id,
                np.full(one.sampled, 3, np.int32),
                np.full(one.sampled, -0.1, np.float32),
                self.version,
                Finish.ABORT if aborted else Finish.LENGTH,
                None, None, None, 0, 0, 0.0, 0.0,
            )  # fmt: skip
            self.mailbox.put(one.request.name, segment)


async def train(controller: Controller, steps: int, publishes: bool = True) -> list:
    """As the trainer does, with the default settings."""
    assert await controller.handle(hello(PolicyVersion(0, 0))) == Ok()
    plans = []
    for step in range(steps):
        ask = TakePlan(step, CONFIG.trainer.step_timeout_s, 0)
        while (reply := await controller.handle(ask)) == Ok():
            pass
        assert isinstance(reply, Plan), reply
        plans.append(reply.plan)
        await asyncio.sleep(300.0)  # the step
        version = PolicyVersion(0, step + 1)
        await controller.handle(StepDone(step, version, {"loss/pg": 0.0}, ""))
        if publishes:
            await publish(controller, version)
    return plans


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are minutes apart, which is nothing here."""

    async def nothing() -> None: ...

    monkeypatch.setattr(controller_module, "trim_memory_loop", nothing)


async def train_patiently(controller: Controller, steps: int) -> list:
    tasks = asyncio.create_task(controller.run())
    try:
        job = asyncio.create_task(train(controller, steps))
        await asyncio.wait({tasks, job}, return_when=asyncio.FIRST_COMPLETED)
        return await (job if job.done() else tasks)
    finally:
        await controller.stop()


@pytest.mark.parametrize("slice_tokens", [0, 600])
def test_no_call_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_tokens: int
) -> None:
    """Every token that the engine samples is trained or waits to be: none is sampled twice."""

    async def body() -> None:
        engine = SlowEngine()
        rollout = replace(CONFIG.rollout, slice_tokens=slice_tokens)
        controller, reports = make(tmp_path, engine, replace(CONFIG, rollout=rollout))
        plans = await train_patiently(controller, 4)
        assert sorted(g.group_id for p in plans for g in p.groups) == list(range(8))
        rollouts = [r for p in plans for g in p.groups for r in g.rollouts()]
        assert {r.num_sampled for r in rollouts} == {LENGTH}
        assert engine.returned == LENGTH * len(rollouts), "a token was lost or sampled twice"
        assert not engine.aborts
        assert sum(report.metrics["async/stalled_requests"] for report in reports) == 0
        assert asyncio.get_running_loop().time() < 3.0 * LENGTH * len(rollouts) / ROOM

    run_with_fake_clock(body(), monkeypatch)


def test_no_call_of_a_large_recipe_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 answers a step, in slices, on an engine of the recipe's size; lag, timeouts and all
    else are the recipe's.
    """

    async def body() -> None:
        engine = SlowEngine()
        engine.room = LARGE.engine.max_running_requests
        config = replace(CONFIG, rollout=LARGE.rollout, run=RunConfig(steps=2))
        controller, reports = make(tmp_path, engine, config)
        plans = await train_patiently(controller, 2)
        rollouts = [r for p in plans for g in p.groups for r in g.rollouts()]
        assert len({r.rollout_id for r in rollouts}) == 2 * 64 * 16
        assert {r.num_sampled for r in rollouts} == {LENGTH}
        assert engine.returned == LENGTH * len(rollouts), "a token was lost or sampled twice"
        assert sum(report.metrics["async/stalled_requests"] for report in reports) == 0

    run_with_fake_clock(body(), monkeypatch)


def test_messages_in_progress_do_not_grow_with_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an actor with bounded concurrency always has room for a publish or an abort."""

    async def body() -> None:
        engine = SlowEngine()
        rollout = replace(CONFIG.rollout, groups_per_step=40, group_size=8)
        sampling = replace(CONFIG.sampling, max_new_tokens=40)
        config = replace(CONFIG, rollout=rollout, sampling=sampling, run=RunConfig(steps=2))
        controller, _ = make(tmp_path, engine, config)
        await train_patiently(controller, 2)
        assert len(engine.requests) >= 2 * 40 * 8
        assert 1 < engine.most_calls <= 3, "one submit, one collect, one of a publish"

    run_with_fake_clock(body(), monkeypatch)


@pytest.mark.parametrize("deaf", [False, True], ids=["abort", "deaf"])
def test_an_engine_without_progress_is_told_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: bool
) -> None:
    """Its requests are aborted by name; their tokens are kept and continued."""

    async def body() -> None:
        engine = SlowEngine()
        engine.deaf = deaf
        controller, reports = make(tmp_path, engine, CONFIG)

        def stick(now: bool) -> None:
            engine.stuck = now
            if not now and deaf:  # the server was started again
                for one in engine._all():
                    engine.mailbox.put(one.request.name, EngineError("its server was killed"))
                engine.decoding.clear()
                engine.queue.clear()

        loop = asyncio.get_running_loop()
        loop.call_later(900.0, stick, True)
        loop.call_later(900.0 + 1500.0, stick, False)
        plans = await train_patiently(controller, 4)
        assert sorted(g.group_id for p in plans for g in p.groups) == list(range(8))
        rollouts = [r for p in plans for g in p.groups for r in g.rollouts()]
        assert {r.num_sampled for r in rollouts} == {LENGTH}
        assert engine.aborts
        assert sum(report.metrics["async/stalled_requests"] for report in reports) > 0
        if not deaf:
            assert engine.returned == LENGTH * len(rollouts), "a token was lost or sampled twice"

    run_with_fake_clock(body(), monkeypatch)


def test_groups_that_are_too_old_are_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens are counted, and the engine is told; control: without the bound all finish."""

    async def cancelled(folder: Path, lag: int) -> tuple[float, SlowEngine]:
        engine = SlowEngine()
        rollout = replace(CONFIG.rollout, cancel_lag=lag, max_lag=100)
        run = replace(CONFIG.run, steps=6)
        controller, reports = make(folder, engine, replace(CONFIG, rollout=rollout, run=run))
        plans = await train_patiently(controller, 6)
        assert len({g.group_id for p in plans for g in p.groups}) == 12
        for name in ("async/cancelled_groups", "async/cancelled_tokens"):
            assert (sum(report.metrics[name] for report in reports) > 0) == bool(engine.aborts)
        trained = sum(r.num_sampled for p in plans for g in p.groups for r in g.rollouts())
        lost = sum(report.metrics["async/cancelled_tokens"] for report in reports)
        return engine.returned - trained - lost, engine

    async def body() -> None:
        for lag, aborts in ((0, True), (-1, False)):
            untold, engine = await cancelled(tmp_path / str(lag), lag)
            assert untold == 0
            assert bool(engine.aborts) == aborts

    run_with_fake_clock(body(), monkeypatch)


def test_a_batch_that_nothing_works_on_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        engine = SlowEngine()
        engine.stuck = engine.deaf = True
        controller, _ = make(tmp_path, engine, CONFIG)
        with pytest.raises(ProtocolError, match="no batch of 2 groups after"):
            await train_patiently(controller, 1)

    run_with_fake_clock(body(), monkeypatch)
