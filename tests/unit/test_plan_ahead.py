"""The next step's plan comes with this one's if its batch is complete, and is not sent again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.controller.controller import Controller
from moerl.core.messages import Failed, Ok, Plan, SamePlan, StepDone, TakePlan
from moerl.core.types import BatchPlan, PolicyVersion
from moerl.records import BlobStore
from moerl.records.header_check import group_uris
from tests.helpers.controllers import CONFIG, hello, make, publish, running
from tests.helpers.patience import patience
from tests.helpers.stub_engine import SealingEngine, StubEngine

START = PolicyVersion(0, 0)


async def ready(controller: Controller, groups: int) -> None:
    """Until so many groups are ready: all that may start."""
    async with asyncio.timeout(patience(20)):
        while controller.context.buffer.num_ready < groups:
            await asyncio.sleep(0.001)


async def take(controller: Controller, step: int, *, came_ahead: bool) -> Plan | SamePlan:
    reply = await controller.handle(TakePlan(step, 60.0, 0, came_ahead))
    assert isinstance(reply, Plan | SamePlan), reply
    return reply


async def done(controller: Controller, step: int) -> None:
    version = PolicyVersion(0, step + 1)
    await controller.handle(StepDone(step, version, {}, ""))
    await publish(controller, version)


def ids(plan: BatchPlan | None) -> list[int]:
    assert plan is not None, "no plan"
    return [group.group_id for group in plan.groups]


async def test_a_plan_comes_once_and_is_the_plan_that_would_have_come(tmp_path: Path) -> None:
    controller, reports = make(tmp_path, StubEngine())

    async def work() -> None:
        assert await controller.handle(hello(START)) == Ok()
        await ready(controller, 6)
        first = await take(controller, 0, came_ahead=False)
        assert isinstance(first, Plan)
        assert (ids(first.plan), ids(first.ahead)) == ([0, 1], [2, 3])
        await done(controller, 0)
        await ready(controller, 4)
        again = await take(controller, 1, came_ahead=False)
        assert isinstance(again, Plan), "asked for whole"
        assert ids(again.plan) == [2, 3]
        second = await take(controller, 1, came_ahead=True)
        assert isinstance(second, Plan), "what came ahead since then is of step 2"
        await done(controller, 1)
        third = await take(controller, 2, came_ahead=True)
        assert isinstance(third, SamePlan)
        assert ids(second.ahead) == [4, 5]
        assert ids(third.ahead) == [6, 7]
        await done(controller, 2)
        last = await take(controller, 3, came_ahead=True)
        assert isinstance(last, SamePlan)
        assert last.ahead is None, "there is no fifth step"
        await done(controller, 3)

    await running(controller, work())
    assert [row.metrics["async/lag_max"] for row in reports] == [0, 1, 2, 2]
    assert all("async/buffer_age_mean_s" in row.metrics for row in reports)
    depths = [row.metrics["async/buffer_depth"] for row in reports]
    assert depths == [4, 4, 2, 0], "groups that were planned ahead wait, too"


async def test_nothing_is_waited_for(tmp_path: Path) -> None:
    """At lag 0 the next batch cannot be there."""
    rollout = replace(CONFIG.rollout, max_lag=0, buffer_depth=0)
    controller, _ = make(tmp_path, StubEngine(), replace(CONFIG, rollout=rollout))

    async def work() -> None:
        assert await controller.handle(hello(START)) == Ok()
        assert (await take(controller, 0, came_ahead=False)).ahead is None
        await done(controller, 0)
        with pytest.raises(AssertionError):  # the helper of this test can fail
            ids((await take(controller, 1, came_ahead=False)).ahead)

    await running(controller, work())


async def test_the_freshest_groups_are_chosen_when_they_are_trained(tmp_path: Path) -> None:
    rollout = replace(CONFIG.rollout, selection="freshest")
    controller, _ = make(tmp_path, StubEngine(), replace(CONFIG, rollout=rollout))

    async def work() -> None:
        assert await controller.handle(hello(START)) == Ok()
        await ready(controller, 6)
        assert (await take(controller, 0, came_ahead=False)).ahead is None

    await running(controller, work())


async def test_a_trainer_that_dies_with_a_plan_ahead_trains_its_groups(tmp_path: Path) -> None:
    controller, _ = make(tmp_path, StubEngine())

    async def work() -> None:
        assert await controller.handle(hello(START)) == Ok()
        await ready(controller, 6)
        await take(controller, 0, came_ahead=False)
        assert await controller.handle(hello(PolicyVersion(1, 0))) == Ok()
        await publish(controller, PolicyVersion(1, 0))
        reply = await controller.handle(TakePlan(0, 60.0, 1))
        assert isinstance(reply, Plan)
        assert (ids(reply.plan), ids(reply.ahead)) == ([0, 1], [2, 3])

    await running(controller, work())


@pytest.mark.parametrize("in_training", [False, True])
async def test_a_damaged_record_undoes_the_plan_ahead(tmp_path: Path, in_training: bool) -> None:
    """Of the plan ahead, or of the step in training, whose groups come before it."""
    store = BlobStore(tmp_path / "blobs", "n")
    controller, _ = make(tmp_path, SealingEngine(store), blobs=store, moe_layers=1)

    async def work() -> None:
        assert await controller.handle(hello(START)) == Ok()
        await ready(controller, 6)
        first = await take(controller, 0, came_ahead=False)
        assert isinstance(first, Plan)
        assert first.ahead is not None
        bad = (first.plan if in_training else first.ahead).groups[0]
        blob = min(group_uris(bad))
        path = store.root / blob.rpartition("/")[2]
        path.write_bytes(path.read_bytes()[:-1])
        await controller.handle(Failed(0, "it is short", incarnation=0, blob=blob))
        if not in_training:
            await done(controller, 0)
        step = 0 if in_training else 1
        reply = await take(controller, step, came_ahead=not in_training)
        assert isinstance(reply, Plan), "the plan that came ahead does not stand"
        assert bad.group_id not in ids(reply.plan) or blob not in group_uris(*reply.plan.groups)
        planned = ids(reply.plan) + (ids(reply.ahead) if reply.ahead else [])
        assert len(set(planned)) == len(planned)
        assert min(planned) >= 2 * step

    await running(controller, work())
