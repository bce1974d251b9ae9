"""Slices and cancelled groups on a real engine: no token is lost, and no answer changes.

The controller has a real host; only trainer, scorer and prompts are stand-ins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from moerl.config.schema import Config, EngineConfig, RolloutConfig, RunConfig, SamplingConfig
from moerl.core.messages import Answers, CommitUpdate, EngineStatus, Message, SessionMessage
from moerl.core.types import GenerateRequest, PolicyVersion, SamplingParams, Segment
from moerl.engine.host.host import EngineHost
from moerl.episodes.turn import TurnInFlight
from tests.helpers.controllers import make, running, train
from tests.helpers.replay_scenario import World, tokens
from tests.helpers.session_publisher import Publisher

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(600)]

STEPS = 8
SLICE = 12
ENDS = tuple(range(64, 70))  # token ids that end an answer: after 43 tokens on average
CONFIG = Config(
    run=RunConfig(steps=STEPS),
    rollout=RolloutConfig(
        groups_per_step=2,
        group_size=2,
        max_lag=100,
        buffer_depth=2,
        slice_tokens=SLICE,
        cancel_lag=0,
    ),
    sampling=SamplingConfig(max_new_tokens=200),
)
GREEDY = SamplingParams(90, top_k=1, ignore_eos=True)


@dataclass(eq=False)
class CountingEngine:
    """A host, with the tokens that its server handed back; a commit stages its version first."""

    host: EngineHost
    publisher: Publisher
    returned: int = 0
    cut: int = 0  # replies that ended by an abort

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        assert all(request.sampling.max_new_tokens <= SLICE for request in requests)
        await self.host.submit(requests)

    async def collect(self) -> Answers:
        answers = await self.host.collect()
        for _, reply in answers.replies:
            assert isinstance(reply, Segment), reply
            self.returned += sum(len(piece.output_ids) for piece in reply.pieces)
            self.cut += reply.pieces[-1].finish == "abort"
        return answers

    async def abort(self, names: Sequence[str]) -> None:
        await self.host.abort(names)

    async def session(self, message: SessionMessage) -> Message:
        assert isinstance(message, CommitUpdate)
        await self.publisher.stage(message.version)
        return await self.publisher.commit(message.version)

    async def forget(self, kept: Sequence[str] | None, life: int) -> None:
        await self.host.forget(kept, life)

    async def interrupt(self) -> None:
        await self.host.interrupt()

    async def status(self) -> EngineStatus:
        return await self.host.status()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("long"), EngineConfig(max_total_tokens=16384))
    weights = list(world.folders.values())
    versions = [PolicyVersion(0, step) for step in range(STEPS + 1)]
    world.folders = {version: weights[version.step % len(weights)] for version in versions}
    try:
        world.run(world.host.start(versions[0]), 240.0)
        yield world
    finally:
        world.run(world.host.stop())
        world.loop.close()


def answer(name: str, length: int, slice_tokens: int = 0) -> TurnInFlight:
    prompt = np.asarray(tokens(length, seed=length), np.int32)
    return TurnInFlight(name, prompt, GREEDY, audit=False, slice_tokens=slice_tokens)


async def finish(world: World, turns: Sequence[TurnInFlight]) -> list[list[int]]:
    """Ask until all are whole; their tokens."""
    while left := [turn for turn in turns if not turn.finished]:
        await world.call(left)
    return [turn.output_ids.tolist() for turn in turns]


async def aborted(world: World, turns: Sequence[TurnInFlight]) -> None:
    """Ask, and abort by name in the middle."""
    requests = [turn.request() for turn in turns]
    seen = world.prefills()
    running = asyncio.create_task(world.host.generate(requests))
    await world.decode_a_while(running, seen, steps=STEPS)
    await world.host.abort([request.name for request in requests])
    for turn, reply in zip(turns, await running, strict=True):
        assert isinstance(reply, Segment), reply
        turn.add(reply)


def test_greedy_answers_in_slices_are_those_in_one_piece(world: World) -> None:
    """Beside others that are cancelled, which continue to the same end; control: other prompts."""
    lengths = (20, 33, 47)

    async def scenario() -> tuple[list[list[int]], ...]:
        whole = await finish(world, [answer(f"whole.{n}", n) for n in lengths])
        stopped = [answer(f"stopped.{n}", n) for n in lengths]
        sliced = [answer(f"sliced.{n}", n, SLICE) for n in lengths]
        both = await asyncio.gather(aborted(world, stopped), finish(world, sliced))
        assert all(0 < turn.num_sampled < 90 for turn in stopped)
        assert [len(turn.segments) for turn in sliced] == [-(-90 // SLICE)] * len(lengths)
        return whole, both[1], await finish(world, stopped)

    whole, sliced, stopped = world.run(scenario())
    assert [len(ids) for ids in whole] == [90] * len(lengths)
    assert sliced == whole
    assert stopped == whole
    assert len({tuple(ids) for ids in whole}) == len(lengths)


def test_every_token_of_the_engine_is_trained_or_counted(world: World, tmp_path: Path) -> None:
    """A publish after each step makes what runs too old, as cancel_lag = 0 asks for."""
    publisher = Publisher(world.host, world.folders)
    engine = CountingEngine(world.host, publisher)

    async def scenario() -> tuple[int, int, float]:
        shape = replace(world.shape, eos_token_ids=ENDS)
        controller, reports = make(tmp_path, engine, CONFIG, blobs=world.store, model=shape)
        plans = await running(controller, train(controller, STEPS), timeout_s=240)
        groups = [group for plan in plans for group in plan.groups]
        assert sorted({group.group_id for group in groups}) == list(range(2 * STEPS))
        rollouts = [rollout for group in groups for rollout in group.rollouts()]
        assert {rollout.finish for rollout in rollouts} <= {"stop", "length"}
        lost = sum(report.metrics["async/cancelled_tokens"] for report in reports)
        return len(groups), sum(rollout.num_sampled for rollout in rollouts), lost

    num_groups, trained, lost = world.run(scenario(), 300.0)
    print(f"{num_groups} groups, {engine.returned} tokens: {trained} trained, {lost:g} cancelled")
    assert engine.cut
    assert lost > 0
    assert engine.returned == trained + lost
