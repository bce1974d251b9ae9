"""Engines and trainer take turns: who has the memory at each moment, and after each death.

A stub trainer speaks the protocol of a trainer that is parked whenever it publishes or asks for a
plan.  `Memory` books who uses the memory at once, and raises where a table of the design forbids
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from moerl.config import resolve
from moerl.config.schema import Config, NodeGroup, Role
from moerl.controller import engine_calls, engine_pool
from moerl.controller.controller import Controller
from moerl.controller.engine_pool import EnginePhase
from moerl.controller.memory_schedule import MemoryPhase
from moerl.core.errors import EngineError, ProtocolError
from moerl.core.messages import (
    AskEngine,
    Message,
    Plan,
    Refresh,
    SessionMessage,
    SleepEngine,
    StepDone,
    TakePlan,
    WakeEngine,
)
from moerl.core.types import PolicyVersion
from tests.helpers.controllers import (
    CONFIG,
    commit,
    hello,
    make,
    running,
    successor,
    written_live,
)
from tests.helpers.stub_engine import StubEngine

TURNS = resolve(replace(CONFIG, cluster=replace(CONFIG.cluster, colocated="turns")))
ALL = ("kv_cache", "weights")


class Death(Exception):
    """The trainer is killed here."""


class Trainer:
    """Holds the memory from a plan to its step; dies at one point, `dies_at`."""

    def __init__(self, controller: Controller, engines: list[StubEngine], incarnation: int = 0):
        self.controller, self.engines, self.incarnation = controller, engines, incarnation
        self.step, self.dies_at, self.has_memory = 0, "", False
        self.trained: list[int] = []  # group ids

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.incarnation, self.step)

    def point(self, name: str) -> None:
        if self.dies_at == name:
            self.has_memory = False
            raise Death(name)

    def take_memory(self) -> None:
        """A start, or a step: every engine that has a process sleeps."""
        for engine in self.engines:
            assert engine.dead or engine.asleep == set(ALL), f"an engine has {engine.asleep}"
        self.has_memory = True

    async def start(self, step: int = 0) -> None:
        self.step = step
        await self.controller.close_turn()
        self.take_memory()
        self.point("start")
        await self.controller.handle(hello(self.version))
        await self.hand_over()

    async def hand_over(self) -> None:
        self.has_memory = False
        for index, engine in enumerate(self.engines):
            self.point("handing")
            try:
                turns = self.controller.context.memory_turns
                sleeps = turns is not None and index in turns._sleepers
                asked = (
                    written_live(self.version, index) if sleeps else [commit(self.version, index)]
                )
                for message in asked:
                    await self.controller.handle(message)
                    if engine.dirty:
                        self.point("writing")
            except EngineError:
                continue
            assert not engine.dirty

    async def plan(self) -> Plan:
        ask = TakePlan(self.step, 60.0, self.incarnation)
        while not isinstance(reply := await self.controller.handle(ask), Plan):
            assert reply == Refresh()
            await self.hand_over()
        return reply

    async def train(self) -> None:
        plan = await self.plan()
        self.take_memory()
        self.point("train")
        self.trained += [group.group_id for group in plan.plan.groups]
        self.step += 1
        await self.controller.handle(StepDone(self.step - 1, self.version, {}, ""))
        await self.hand_over()

    async def live(self, steps: int) -> None:
        await self.start()
        await self.run(steps)

    async def run(self, steps: int) -> None:
        while self.step < steps:
            await self.train()


def play(
    tmp_path: Path,
    engines: list[StubEngine],
    work: Callable[[Controller, Trainer], Coroutine[Any, Any, None]],
    config: Config = TURNS,
) -> tuple[Controller, Trainer, list[Any]]:
    found: list[Any] = []

    async def whole() -> None:
        controller, reports = make(tmp_path, engines[0], config, more_engines=engines[1:])
        trainer = Trainer(controller, engines)
        found[:] = [controller, trainer, reports]
        await running(controller, work(controller, trainer))

    asyncio.run(whole())
    return found[0], found[1], found[2]


@pytest.mark.parametrize("count", [1, 3])
def test_nobody_uses_the_memory_of_the_other(tmp_path: Path, count: int) -> None:
    engines = [StubEngine() for _ in range(count)]

    async def work(controller: Controller, trainer: Trainer) -> None:
        turns = controller.context.memory_turns
        assert turns is not None
        assert turns.phase == MemoryPhase.GENERATE
        await trainer.start()
        assert turns.phase == MemoryPhase.HANDING
        assert all(engine.asleep == {"kv_cache"} for engine in engines)
        await trainer.run(4)

    _, trainer, reports = play(tmp_path, engines, work)
    assert len(trainer.trained) == len(set(trainer.trained)) == 8
    rows = [report.metrics for report in reports]
    assert [len(rows), *(name in rows[-1] for name in ("turn/close_s", "turn/open_s"))] == [4, 1, 1]
    assert all(engine.moved["sleep"] == 5 for engine in engines), "a start and four plans"
    assert all(engine.refused == 0 for engine in engines), "no misuse reached an engine"


def test_groups_do_not_begin_on_a_sleeping_engine(tmp_path: Path) -> None:
    engine = StubEngine()

    async def work(controller: Controller, trainer: Trainer) -> None:
        await trainer.start()
        await trainer.plan()
        begun = len(engine.requests)
        await asyncio.sleep(0.1)
        assert len(engine.requests) == begun
        assert not controller.context.pool.serves(0)

    play(tmp_path, [engine], work)


async def test_without_turns_no_engine_is_asked_to_sleep(tmp_path: Path) -> None:
    controller, _ = make(tmp_path, engine := StubEngine())
    assert controller.context.memory_turns is None
    await running(controller, controller.close_turn())
    assert engine.moved == {}


# --- deaths ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("point", ["start", "handing", "writing", "train"])
def test_a_trainer_that_dies_finds_sleeping_engines(tmp_path: Path, point: str) -> None:
    """The next one has the memory for its start, publishes, and no group is trained twice."""
    engines = [StubEngine(), StubEngine()]

    async def work(controller: Controller, trainer: Trainer) -> None:
        trainer.dies_at = point
        with pytest.raises(Death):
            await trainer.live(2)
        after = Trainer(controller, engines, 1)
        await after.start()
        await after.run(3)
        assert len(after.trained) == len(set(after.trained)) == 6
        assert {engine.version for engine in engines} == {PolicyVersion(1, 3)}

    play(tmp_path, engines, work)


def test_a_parked_trainer_that_dies_while_engines_serve(tmp_path: Path) -> None:
    """Its last message still waits in the controller, and opens nothing while the next starts."""
    released = asyncio.Event()
    engine = StubEngine(holds=lambda request: not released.is_set())

    async def work(controller: Controller, trainer: Trainer) -> None:
        await trainer.start()
        left = asyncio.create_task(trainer.plan())
        turns = controller.context.memory_turns
        assert turns is not None
        await controller.generating()
        assert not left.done()
        await controller.close_turn()
        await asyncio.sleep(1.5)
        assert (engine.asleep, turns.phase) == (set(ALL), MemoryPhase.TRAIN)
        after = Trainer(controller, [engine], 1)
        await after.start()
        released.set()
        engine.interrupted.set()
        await after.run(2)
        with pytest.raises(ProtocolError):
            await left

    play(tmp_path, [engine], work)


def test_an_engine_that_dies_is_started_only_in_generate(tmp_path: Path) -> None:
    engines = [StubEngine(), StubEngine()]

    async def work(controller: Controller, trainer: Trainer) -> None:
        await trainer.start()
        await trainer.plan()
        trainer.take_memory()
        engines[1].kill()
        controller.engine_lost(1)
        allowed = asyncio.create_task(controller.generating())
        await asyncio.sleep(0.05)
        assert not allowed.done(), "the trainer has the memory"
        trainer.step = 1
        await controller.handle(StepDone(0, trainer.version, {}, ""))
        await trainer.hand_over()
        going_on = asyncio.create_task(trainer.run(4))  # with batches that are ready
        await allowed
        step = trainer.step
        await asyncio.sleep(0.3)
        assert trainer.step == step < 4, "no turn comes while it starts"
        engines[1] = StubEngine()
        controller.engine_back(1, engines[1])
        await going_on
        assert engines[1].version == trainer.version

    play(tmp_path, engines, work)


def test_a_trainer_and_its_only_engine_die_together(tmp_path: Path) -> None:
    """The engine starts first, in memory that nobody has; the next trainer publishes to it."""
    engines = [StubEngine()]

    async def work(controller: Controller, trainer: Trainer) -> None:
        trainer.dies_at = "train"
        with pytest.raises(Death):
            await trainer.live(1)
        engines[0].kill()
        controller.engine_lost(0)
        after = Trainer(controller, engines, 1)
        starting = asyncio.create_task(after.start())
        await controller.generating()
        assert not starting.done()
        engines[0] = StubEngine()
        controller.engine_back(0, engines[0])
        await starting
        assert engines[0].version == after.version
        await after.run(2)

    play(tmp_path, engines, work)


@pytest.mark.parametrize("point", ["generate", "train", "handing", "half asleep", "half awake"])
async def test_a_controller_that_takes_over_asks_the_engines(tmp_path: Path, point: str) -> None:
    engines = [StubEngine(), StubEngine()]
    first, _ = make(tmp_path, engines[0], TURNS, more_engines=engines[1:])
    loops = asyncio.create_task(first.run())
    trainer = Trainer(first, engines)
    await trainer.start()
    await trainer.run(1)
    turns = first.context.memory_turns
    assert turns is not None
    if point in ("generate", "half awake"):
        await turns.open()
    else:
        await trainer.plan()
    if point == "half asleep":
        await engines[0].move_memory(WakeEngine(0, ("weights",), 1.0))
    if point == "half awake":
        await engines[0].move_memory(SleepEngine(0, ALL, 1.0))
    loops.cancel()
    second, _ = successor(
        tmp_path, engines[0], first, config=TURNS, more_engines=engines[1:], trainer_alive=True
    )
    await second.rejoin([])
    after = second.context.memory_turns
    assert after is not None
    assert (after.phase == MemoryPhase.GENERATE) == (point == "generate")
    trainer.controller = second
    if point == "handing":
        trainer.step = 2
        await second.handle(StepDone(1, trainer.version, {}, ""))
        await trainer.hand_over()
    await running(second, trainer.run(4))
    assert len(trainer.trained) == len(set(trainer.trained))


class SlowToSay(StubEngine):
    """Says what sleeps only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.says = asyncio.Event(), asyncio.Event()

    async def session(self, message: SessionMessage) -> Message:
        if isinstance(message, AskEngine):
            self.asked.set()
            await self.says.wait()
        return await super().session(message)


@pytest.mark.parametrize("asks", ["a session that failed", "a turn that opens"])
def test_a_death_that_is_reported_while_the_engine_is_asked_is_not_forgotten(
    tmp_path: Path, asks: str
) -> None:
    """Else no turn would let it start, and `close` would wait for it to sleep."""
    engine = SlowToSay()

    async def work(controller: Controller, trainer: Trainer) -> None:
        await trainer.start()
        engine.dead = asks == "a session that failed"
        message = commit(trainer.version) if engine.dead else TakePlan(0, 60.0, 0)
        asking = asyncio.create_task(controller.handle(message))
        await engine.asked.wait()
        controller.engine_lost(0)
        engine.says.set()
        if engine.dead:
            with pytest.raises(EngineError):
                await asking
        await asyncio.sleep(0.1)
        assert controller.context.pool.engines[0].phase == EnginePhase.LOST
        asking.cancel()

    play(tmp_path, [engine], work)


async def test_an_engine_that_does_not_answer_a_new_controller_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps, so nothing would ever wake it."""
    monkeypatch.setattr(engine_calls, "ANSWER_S", 0.2)
    monkeypatch.setattr(engine_pool, "_REST_S", 0.05)
    engine = StubEngine()
    first, _ = make(tmp_path, engine, TURNS)
    loops = asyncio.create_task(first.run())
    trainer = Trainer(first, [engine])
    await trainer.start()
    loops.cancel()
    engine.is_hung = True
    second, _ = successor(tmp_path, engine, first, config=TURNS, trainer_alive=True)
    await second.rejoin([])
    assert second.context.pool.engines[0].phase == EnginePhase.RESTING
    engine.is_hung = False
    trainer.controller = second
    await running(second, trainer.run(3))


# --- states ---------------------------------------------------------------------------------------
def test_dirty_weights_are_never_admitted(tmp_path: Path) -> None:
    """A publish that failed: the engine is behind, and the trainer is told to publish again."""
    engine = StubEngine()

    async def work(controller: Controller, trainer: Trainer) -> None:
        await controller.close_turn()
        trainer.take_memory()
        await controller.handle(hello(trainer.version))  # and no publish
        ask = TakePlan(0, 60.0, 0)
        assert await controller.handle(ask) == Refresh()
        member = controller.context.pool.engines[0]
        assert (member.phase, member.behind) == (EnginePhase.ASLEEP, True)
        assert engine.asleep == set(ALL)
        await trainer.hand_over()
        await trainer.run(1)

    play(tmp_path, [engine], work)


def test_mixed_weights_are_never_admitted(tmp_path: Path) -> None:
    """A session that failed between two rounds; the same trainer writes the engine anew."""
    engine = StubEngine()

    async def work(controller: Controller, trainer: Trainer) -> None:
        trainer.dies_at = "writing"
        with pytest.raises(Death):
            await trainer.start()
        assert (engine.asleep, engine.dirty) == ({"kv_cache"}, True)
        assert await controller.handle(TakePlan(0, 60.0, 0)) == Refresh()
        assert (engine.asleep, engine.dirty) == ({"kv_cache"}, True)
        assert not engine.requests
        trainer.dies_at = ""
        await trainer.hand_over()
        await trainer.run(1)

    play(tmp_path, [engine], work)


def test_an_engine_that_refuses_for_now_is_asked_again(tmp_path: Path) -> None:
    engine = StubEngine()
    engine.refusals = 2

    async def work(controller: Controller, trainer: Trainer) -> None:
        await trainer.start()
        await trainer.run(1)

    play(tmp_path, [engine], work)
    assert engine.refusals == 0


async def test_late_turns_are_counted(tmp_path: Path) -> None:
    """A budget that passes without a batch ends nothing: generation goes on."""
    engine = StubEngine(holds=lambda request: not released.is_set())
    released = asyncio.Event()
    config = replace(TURNS, turn=replace(TURNS.turn, budget_s=0.2))
    controller, reports = make(tmp_path, engine, config)
    trainer = Trainer(controller, [engine])

    async def work() -> None:
        await trainer.start()
        planned = asyncio.create_task(trainer.train())
        await asyncio.sleep(2.2)
        assert not planned.done()
        released.set()
        engine.interrupted.set()
        await planned

    await running(controller, work())
    assert reports[0].metrics["turn/late"] >= 2


@pytest.mark.parametrize(("drops", "batches"), [(0, 1), (10**6, 3)])
def test_a_turn_gets_longer_while_it_drops_more_than_it_samples(
    tmp_path: Path, drops: int, batches: int
) -> None:
    """By a batch each time, up to those that buffer_depth 2 lets be ready, and not over the end."""
    engine = StubEngine()
    engine.drops = drops

    async def work(controller: Controller, trainer: Trainer) -> None:
        turns = controller.context.memory_turns
        assert turns is not None
        assert not turns.goes_on(2, 9), "one batch of two groups is enough at first"
        await trainer.start()
        await trainer.run(4)
        turns.phase = MemoryPhase.GENERATE
        for num_ready, num_left in ((1, 9), (2, 9), (5, 9), (6, 9), (2, 1), (3, 2), (4, 2)):
            is_short = 2 <= num_ready < 2 * min(batches, num_left)
            assert turns.goes_on(num_ready, num_left) == is_short
        turns._since -= turns._budget_s
        assert not turns.goes_on(2, 9), "a late turn comes"

    _, _, reports = play(tmp_path, [engine], work)
    rows = [report.metrics for report in reports]
    turns = [row["turn/recomputed_tokens"] for row in rows if "turn/generate_s" in row]
    assert set(turns) == {float(drops)}
    assert batches == 1 or len(turns) <= 3, "of one batch, of two, and of the last"


# --- settings -------------------------------------------------------------------------------------
# --- hybrid ---------------------------------------------------------------------------------------
TWO_GPUS = NodeGroup(roles=list(get_args(Role)), devices=2)
HYBRID = replace(
    TURNS,
    cluster=replace(TURNS.cluster, nodes={"all": TWO_GPUS}),
    engine=replace(TURNS.engine, count=2),
)


def test_an_engine_on_gpus_that_the_trainer_lacks_serves_on(tmp_path: Path) -> None:
    """It is never asked to sleep, takes every version, and no turn waits for its start."""
    shared, own = StubEngine(), StubEngine()

    async def work(controller: Controller, trainer: Trainer) -> None:
        trainer.engines = [shared]
        await trainer.start()
        own_version = {own.version}
        for step in range(3):
            trainer.engines = [shared]
            await trainer.plan()
            pool = controller.context.pool
            assert (pool.serves(0), pool.serves(1)) == (False, True)
            trainer.take_memory()
            trainer.step += 1
            await controller.handle(StepDone(step, trainer.version, {}, ""))
            trainer.engines = [shared, own]
            await trainer.hand_over()
            own_version.add(own.version)
        assert own_version == {PolicyVersion(0, step) for step in range(4)}
        own.kill()
        controller.engine_lost(1)
        trainer.engines = [shared]
        await trainer.run(4)
        after = controller.context.memory_turns
        assert after is not None
        assert after.phase == MemoryPhase.HANDING

    play(tmp_path, [shared, own], work, HYBRID)
    assert own.moved == {}
    assert shared.moved["sleep"] == 5, "a start and four plans"
