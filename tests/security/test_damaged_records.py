"""A damaged, empty or short blob costs its group, never the run; the trainer reads what it trains.

The trainer here reads every byte of a plan, as ranks do, and dies of the first damaged blob.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moerl.config.schema import RunConfig, SyncConfig
from moerl.controller.controller import Controller
from moerl.controller.step_metrics import StepReport
from moerl.core.errors import BlobError, ProtocolError, TrainerError
from moerl.core.ids import ranges
from moerl.core.messages import (
    Failed,
    Hello,
    Plan,
    Refresh,
    Scored,
    StepDone,
    TakePlan,
    TakeRecords,
)
from moerl.core.types import BatchPlan, EpisodeGroup, PolicyVersion
from moerl.records import BlobStore
from moerl.records.blob_store import sizes_of
from moerl.records.header_check import group_refs, group_uris
from moerl.records.range_server import RangeServer
from moerl.records.remote_blobs import ClusterBlobs
from tests.helpers.controllers import (
    CONFIG,
    make,
    publish,
    running,
    scores_of,
    successor,
    with_ref_models,
)
from tests.helpers.damage import empty, flip, shorten
from tests.helpers.stub_engine import SealingEngine

START = PolicyVersion(0, 0)
STEPS = 5
STEPS_CONFIG = replace(CONFIG, run=RunConfig(steps=STEPS))


class ReadingTrainer:
    """Trains from the start to the last step; a damaged blob ends it and the next one starts."""

    def __init__(self, controller: Controller, store: BlobStore) -> None:
        self.controller, self.store = controller, store
        self.version = START
        self.trained: list[int] = []
        self.deaths: list[str] = []  # blobs that it died of
        self.spoil: Callable[[BatchPlan], None] = lambda plan: None  # before it reads a plan

    async def start(self) -> None:
        begins = tuple(PolicyVersion(i, 0) for i in range(self.version.incarnation))
        message = Hello(1, 1, self.version, ranges(self.trained), (*begins, self.version))
        await self.controller.handle(message)
        if self.version != START:
            await publish(self.controller, self.version)

    async def plan(self) -> BatchPlan:
        ask = TakePlan(self.version.step, 10.0, self.version.incarnation)
        while (reply := await self.controller.handle(ask)) == Refresh():
            await publish(self.controller, self.version)
        assert isinstance(reply, Plan), reply
        return reply.plan

    async def done(self, plan: BatchPlan) -> None:
        self.version = PolicyVersion(self.version.incarnation, plan.step + 1)
        await self.controller.handle(StepDone(plan.step, self.version, {}, ""))
        self.trained += [group.group_id for group in plan.groups]
        await publish(self.controller, self.version)

    async def report(self, error: BlobError) -> None:
        incarnation = self.version.incarnation
        self.deaths.append(error.uri)
        failed = Failed(0, str(error), incarnation=incarnation, blob=error.uri)
        await self.controller.handle(failed)

    async def train(self, steps: int = STEPS) -> None:
        while self.version.step < steps:
            plan = await self.plan()
            self.spoil(plan)
            try:
                read(self.store, *plan.groups)
            except BlobError as error:
                assert len(self.deaths) < 4, f"it dies again and again: {self.deaths}"
                await self.report(error)
                # every step is in a checkpoint
                self.version = PolicyVersion(self.version.incarnation + 1, self.version.step)
                await self.start()
            else:
                await self.done(plan)


def read(store: BlobStore, *groups: EpisodeGroup) -> None:
    for ref in group_refs(*groups):
        store.read_runs(ref, [(0, ref.num_bytes)])


def path_of(store: BlobStore, uri: str) -> Path:
    return store.root / uri.rpartition("/")[2]


DAMAGE = [flip, empty, shorten]


def only_blob(group: EpisodeGroup) -> str:
    return min(group_uris(group))


def once(number: int, damage: Callable[[Path], None], store: BlobStore) -> Callable:
    """Damage the first blob of the plan of a step, the first time it is given out."""
    damaged: list[str] = []

    def spoil(plan: BatchPlan) -> None:
        if plan.step == number and not damaged:
            damaged.append(only_blob(plan.groups[0]))
            damage(path_of(store, damaged[0]))

    return spoil


class World:
    """A controller whose engine seals its records in one store."""

    def __init__(self, tmp_path: Path, **kwargs: object) -> None:
        self.folder = tmp_path
        self.store = BlobStore(tmp_path / "blobs", "n")
        self.engine = SealingEngine(self.store)
        self.kwargs = {"blobs": self.store, "moe_layers": 1} | kwargs
        config = self.kwargs.pop("config", STEPS_CONFIG)
        self.controller, reports = make(tmp_path, self.engine, config, **self.kwargs)
        self._reports = [reports]  # of each controller
        self.trainer = ReadingTrainer(self.controller, self.store)

    def succeed(self, *, trainer_alive: bool) -> None:
        """The controller dies; another takes over from its journal."""
        self.controller, reports = successor(
            self.folder,
            self.engine,
            self.controller,
            config=STEPS_CONFIG,
            trainer_alive=trainer_alive,
            **self.kwargs,
        )
        self._reports.append(reports)
        self.trainer.controller = self.controller

    @property
    def reports(self) -> list[StepReport]:
        return [report for reports in self._reports for report in reports]

    def damaged(self) -> float:
        return self.controller.context.step_metrics["refused/damaged"]

    def lost(self) -> float:
        return sum(report.metrics["async/dropped_lost_groups"] for report in self.reports)

    async def until_ready(self, count: int) -> list[EpisodeGroup]:
        while self.controller.context.buffer.num_ready < count:
            await asyncio.sleep(0.002)
        return self.controller.context.buffer.ready()


def check_whole(world: World) -> None:
    assert sorted(world.trainer.trained) == list(range(2 * STEPS)), "each group once, none lost"
    assert [report.step for report in world.reports] == list(range(STEPS))


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_planned_blob_is_damaged(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """The trainer has the plan when it happens: one death, one group generated again."""
    world = World(tmp_path)
    trainer = world.trainer
    trainer.spoil = once(2, damage, world.store)

    async def work() -> None:
        await trainer.start()
        await trainer.train()

    await running(world.controller, work())
    check_whole(world)
    (uri,) = trainer.deaths
    assert world.damaged() == 1
    assert not path_of(world.store, uri).exists(), "the damaged blob stays"


@pytest.mark.parametrize("damage", [empty, shorten])
async def test_a_short_blob_is_never_planned(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    world = World(tmp_path)

    async def work() -> None:
        await world.trainer.start()
        groups = await world.until_ready(4)
        damage(path_of(world.store, only_blob(groups[0])))
        await world.trainer.train()

    await running(world.controller, work())
    check_whole(world)
    assert world.trainer.deaths == []
    assert world.lost() == 1


async def test_damage_that_does_not_come_alone_costs_one_death(tmp_path: Path) -> None:
    """After the first report the bytes of all waiting groups are compared."""
    world = World(tmp_path)
    trainer = world.trainer

    def spoil(plan: BatchPlan) -> None:
        if plan.step == 1 and not trainer.deaths:
            for group in (*plan.groups, *world.controller.context.buffer.ready()):
                flip(path_of(world.store, only_blob(group)))

    async def work() -> None:
        await trainer.start()
        await world.until_ready(4)
        trainer.spoil = spoil
        await trainer.train()

    await running(world.controller, work())
    check_whole(world)
    assert len(trainer.deaths) == 1
    assert world.damaged() >= 2


async def test_a_reader_that_stays_gets_a_new_plan(tmp_path: Path) -> None:
    """No restart: the step is planned again as soon as the blob was reported."""
    world = World(tmp_path)
    trainer = world.trainer

    async def work() -> None:
        await trainer.start()
        first = await trainer.plan()
        flip(path_of(world.store, only_blob(first.groups[0])))
        with pytest.raises(BlobError) as caught:
            read(world.store, *first.groups)
        await trainer.report(caught.value)
        with pytest.raises(ProtocolError, match="step 0 is not planned"):
            await world.controller.handle(StepDone(0, PolicyVersion(0, 1), {}, ""))
        await trainer.train()

    await running(world.controller, work())
    check_whole(world)
    assert world.damaged() == 1


async def test_a_report_that_comes_too_late_or_of_nothing_changes_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    trainer = world.trainer

    async def work() -> None:
        await trainer.start()
        trainer.spoil = once(1, flip, world.store)
        await trainer.train(3)
        (uri,) = trainer.deaths
        names = {path.name for path in world.store.root.iterdir()}
        for late in (uri, "blob://n/never", "blob://elsewhere/0.0-1-0"):
            await world.controller.handle(Failed(0, "late", incarnation=0, blob=late))
        assert names <= {path.name for path in world.store.root.iterdir()}
        await trainer.train()

    await running(world.controller, work())
    check_whole(world)
    assert world.damaged() == 1


async def test_a_late_report_of_a_batch_that_is_planned_again(tmp_path: Path) -> None:
    """The next trainer has the damaged batch already when the report of the last one comes."""
    world = World(tmp_path)
    trainer = world.trainer

    async def work() -> None:
        await trainer.start()
        plan = await trainer.plan()
        uri = only_blob(plan.groups[0])
        flip(path_of(world.store, uri))
        trainer.version = PolicyVersion(1, 0)
        await trainer.start()
        again = await trainer.plan()
        assert uri in group_uris(*again.groups), "nothing is known yet"
        await world.controller.handle(Failed(0, "late", incarnation=0, blob=uri))
        assert uri not in group_uris(*(await trainer.plan()).groups)
        await trainer.train()

    await running(world.controller, work())
    check_whole(world)
    assert world.damaged() == 1


@pytest.mark.parametrize("trainer_alive", [True, False], ids=["controller", "everything"])
async def test_the_report_goes_to_the_next_controller(tmp_path: Path, trainer_alive: bool) -> None:
    """The first one died with the batch planned and never heard of it."""
    world = World(tmp_path)
    trainer = world.trainer
    tasks = asyncio.create_task(world.controller.run())
    await trainer.start()
    await trainer.train(2)
    plan = await trainer.plan()
    uri = only_blob(plan.groups[1])
    flip(path_of(world.store, uri))
    world.succeed(trainer_alive=trainer_alive)
    tasks.cancel()
    await world.controller.rejoin([])

    async def work() -> None:
        if trainer_alive:
            await trainer.report(BlobError("flipped", uri))
        trainer.version = PolicyVersion(1, 2)
        await trainer.start()
        await trainer.train()

    await running(world.controller, work())
    assert sorted(trainer.trained) == list(range(2 * STEPS))
    assert trainer.deaths == ([uri] if trainer_alive else []), "adopted bytes are compared"
    assert world.damaged() == 1


@pytest.mark.parametrize("damage", DAMAGE)
async def test_adopted_blobs_are_compared_before_anything_is_planned(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    world = World(tmp_path)
    trainer = world.trainer
    tasks = asyncio.create_task(world.controller.run())
    await trainer.start()
    await trainer.train(1)
    doomed = (await world.until_ready(3))[-1]
    world.controller.context.tasks.fail(TrainerError("killed"))
    damage(path_of(world.store, only_blob(doomed)))
    world.succeed(trainer_alive=False)
    tasks.cancel()
    await world.controller.rejoin([])

    async def work() -> None:
        # in the background: there is no trainer yet
        buffer = world.controller.context.buffer
        while doomed.group_id in [group.group_id for group in buffer.ready()]:
            await asyncio.sleep(0.002)
        trainer.version = PolicyVersion(1, 1)
        await trainer.start()
        await trainer.train()

    await running(world.controller, work())
    assert sorted(trainer.trained) == list(range(2 * STEPS))
    assert trainer.deaths == []
    lost = sum(report.metrics["journal/lost_groups"] for report in world.reports)
    assert (world.damaged(), lost) == ((1, 0) if damage is flip else (0, 1))


async def test_without_restarts_the_run_ends_and_the_next_one_does_not(tmp_path: Path) -> None:
    supervision = replace(CONFIG.supervision, max_restarts=0)
    world = World(tmp_path, config=replace(STEPS_CONFIG, supervision=supervision))
    trainer = world.trainer
    trainer.spoil = once(1, flip, world.store)

    async def work() -> None:
        await trainer.start()
        await trainer.train()

    with pytest.raises(TrainerError, match="does not match its digest"):
        await running(world.controller, work())
    world.succeed(trainer_alive=False)
    trainer.version = PolicyVersion(1, 1)
    await running(world.controller, work())
    assert sorted(trainer.trained) == list(range(2 * STEPS))
    assert len(trainer.deaths) == 1


async def test_reference_ranks_report_while_the_trainer_waits(tmp_path: Path) -> None:
    """The batch is planned and waits for its scores; a mask of it is damaged."""
    config = replace(with_ref_models(tmp_path), run=RunConfig(steps=STEPS))
    world = World(tmp_path, config=config)
    trainer, handle = world.trainer, world.controller.handle

    async def score(start: int) -> None:
        while True:
            reply = await handle(TakeRecords(start, 1, 5.0))
            if not isinstance(reply, Plan):
                return
            read(world.store, *reply.plan.groups)
            await handle(Scored(scores_of(reply.plan, config).scores))

    async def work() -> None:
        await trainer.start()
        waiting = asyncio.create_task(trainer.plan())
        while not world.controller.context.batches.planned:
            await asyncio.sleep(0.002)
        (groups,) = world.controller.context.batches.planned.values()
        uri = only_blob(groups[0])
        flip(path_of(world.store, uri))
        with pytest.raises(BlobError) as caught:
            await score(0)
        assert caught.value.uri == uri
        await handle(Failed(0, "flipped", "ref_models", blob=uri))
        scoring = asyncio.create_task(score(1))
        plan = await waiting
        assert uri not in group_uris(*plan.groups)
        await trainer.done(plan)
        await trainer.train()
        scoring.cancel()

    await running(world.controller, work())
    check_whole(world)
    assert world.damaged() == 1
    assert trainer.deaths == []


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_damaged_blob_of_another_node(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Read over its range server: an altered answer, or one of 400."""
    server = RangeServer(tmp_path / "node", "127.0.0.1", 0, "t")
    reader = ClusterBlobs(tmp_path / "none", "", "t", timeout_s=5.0)
    config = replace(STEPS_CONFIG, sync=SyncConfig(timeout_s=5.0))
    engine = SealingEngine(ClusterBlobs(tmp_path / "node", server.node, "t"))
    controller, reports = make(tmp_path, engine, config, blobs=reader, moe_layers=1)
    trainer = ReadingTrainer(controller, reader)
    trainer.spoil = once(2, damage, engine.store)

    async def work() -> None:
        await trainer.start()
        await trainer.train()

    await running(controller, work())
    server.close()
    assert sorted(trainer.trained) == list(range(2 * STEPS))
    assert len(trainer.deaths) == 1
    assert reports[-1].metrics["refused/damaged"] == 1


def test_what_is_looked_up_is_as_long_as_it_was_sealed(tmp_path: Path) -> None:
    server = RangeServer(tmp_path / "node", "127.0.0.1", 0, "t")
    here = ClusterBlobs(tmp_path / "node", server.node, "t")
    far = ClusterBlobs(tmp_path / "none", "", "t", timeout_s=5.0)
    refs = here.seal("a", [np.zeros(9000, np.uint8), np.ones(5, np.int32)])
    (uri,) = sizes = sizes_of(refs)
    path = path_of(here, uri)
    assert sizes[uri] == path.stat().st_size
    for store in (here, far):
        assert store.find(sizes).gone == set()
    shorten(path)
    for store in (here, far):
        assert store.find(sizes).gone == {uri}
        assert store.damaged(refs) == {uri}
        assert store.damaged([]) == set()
    path.unlink()
    for store in (here, far):
        assert store.find(sizes).gone == {uri}
        assert store.damaged(refs) == set(), "it is missing"
    server.close()


async def test_a_trained_group_that_a_restart_would_train_again(tmp_path: Path) -> None:
    """Its blob is kept for that restart, and damaged by then."""
    world = World(tmp_path)
    trainer = world.trainer

    async def work() -> None:
        await trainer.start()
        await trainer.train(1)
        kept = next(iter(world.controller.context.batches.trained.values()))
        uri = only_blob(kept)
        flip(path_of(world.store, uri))
        trainer.version, trainer.trained = PolicyVersion(1, 0), []
        await trainer.start()
        trainer.spoil = lambda plan: None
        await trainer.train()
        assert trainer.deaths == [uri]

    await running(world.controller, work())
    assert sorted(trainer.trained) == list(range(2 * STEPS))
    assert world.damaged() == 1


async def test_a_damaged_blob_that_two_groups_share(tmp_path: Path) -> None:
    """Late siblings refer to the prompt rows of the first group: both are dropped."""
    world = World(tmp_path)
    trainer, context = world.trainer, world.controller.context

    async def work() -> None:
        await trainer.start()
        first, second = (await world.until_ready(4))[:2]
        uri = only_blob(first)
        turn = second.episodes[0].turns[0]
        shared = replace(turn.rollout, routing=first.rollouts()[0].routing)
        episode = replace(second.episodes[0], turns=(replace(turn, rollout=shared),))
        context.buffer._ready[second.group_id] = replace(
            second, episodes=(episode, *second.episodes[1:])
        )
        context.ref_counts.share([uri])
        flip(path_of(world.store, uri))
        await trainer.report(BlobError("flipped", uri))
        await trainer.train()

    await running(world.controller, work())
    check_whole(world)
    assert world.damaged() == 2
