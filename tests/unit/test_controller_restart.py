"""A controller that dies: its successor goes on from the journal beside trainer and engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moerl.controller.controller import Controller
from moerl.controller.journal.journal import Journal
from moerl.controller.step_metrics import StepReport
from moerl.core.errors import EngineError, JournalError, ProtocolError
from moerl.core.messages import (
    CommitUpdate,
    Ok,
    Plan,
    StepDone,
    TakePlan,
    VerifyUpdate,
)
from moerl.core.types import PolicyVersion
from moerl.records.stream_files import StepFile, read_lines, surviving, whole_plan
from moerl.runtime import disk_wait
from tests.helpers.controllers import hello, make, publish, running, successor, train
from tests.helpers.streams import Writing
from tests.helpers.stub_engine import StubEngine


async def at_step(controller: Controller, step: int) -> list[int]:
    """Take the plan of a step; its group ids."""
    incarnation = controller.context.pool.incarnation or 0
    reply = await controller.handle(TakePlan(step, 60.0, incarnation))
    assert isinstance(reply, Plan), reply
    return [group.group_id for group in reply.plan.groups]


async def test_a_controller_that_dies_loses_nothing(tmp_path: Path) -> None:
    """Killed with step 1 planned and other groups ready: the trainer repeats what it asked."""
    engine, rewinds = StubEngine(), []
    first, _ = make(tmp_path, engine)
    tasks = asyncio.create_task(first.run())
    trained = [g.group_id for p in await train(first, 1) for g in p.groups]
    planned = await at_step(first, 1)
    while not first.context.buffer.num_ready:
        await asyncio.sleep(0.01)
    ready = {g.group_id: g.episodes[0].episode_id for g in first.context.buffer.ready()}
    asked = len(engine.requests)
    second, rows = successor(tmp_path, engine, first, trainer_alive=True, on_rewind=rewinds.append)
    tasks.cancel()
    assert rewinds == [1], "rows of unfinished steps are cut"
    await second.rejoin([])

    async def work() -> list[int]:
        assert await at_step(second, 1) == planned, "another plan for a step that was planned"
        done = StepDone(1, PolicyVersion(0, 2), {}, "")
        assert await second.handle(done) == Ok()
        assert await second.handle(done) == Ok(), "said twice"
        await publish(second, PolicyVersion(0, 2))
        ids = []
        for step in (2, 3):
            ids += await at_step(second, step)
            await second.handle(StepDone(step, PolicyVersion(0, step + 1), {}, ""))
            await publish(second, PolicyVersion(0, step + 1))
        return ids

    rest = await running(second, work())
    assert sorted(trained + planned + rest) == list(range(8)), "lost, or trained twice"
    assert [r.step for r in rows] == [1, 2, 3]
    assert rows[0].metrics["journal/adopted_groups"] >= len(ready) + len(planned)
    again = {int(r.rollout_id.split(".")[0]) for r in engine.requests[asked:]}
    assert not again & set(ready), "an admitted group was generated again"


async def test_a_step_whose_reply_was_lost_counts_once(tmp_path: Path) -> None:
    engine = StubEngine()
    first, _ = make(tmp_path, engine)
    tasks = asyncio.create_task(first.run())
    await train(first, 2)
    second, rows = successor(tmp_path, engine, first, trainer_alive=True)
    tasks.cancel()
    await second.rejoin([])

    async def work() -> None:
        assert await second.handle(StepDone(1, PolicyVersion(0, 2), {}, "")) == Ok()
        await at_step(second, 2)

    await running(second, work())
    assert rows == []


@pytest.mark.parametrize("damage", [False, True], ids=["", "another number of ranks"])
async def test_the_file_of_a_step_is_written_by_the_next_controller(
    tmp_path: Path, damage: bool
) -> None:
    """The first one died between plan and file.  The file has the plan that was trained."""
    engine, writing = StubEngine(), Writing(tmp_path)
    parts: dict[str, Any] = {"stream": writing.writer, "blobs": writing.blobs}
    first, _ = make(tmp_path, engine, **parts)
    tasks = asyncio.create_task(first.run())
    await train(first, 1)
    writing.writer.prepare = lambda plan: None  # type: ignore[method-assign]
    while not isinstance(reply := await first.handle(TakePlan(1, 5.0, 0)), Plan):
        pass
    writing.open()
    parts["stream"] = writing.writer
    second, _ = successor(tmp_path, engine, first, trainer_alive=True, **parts)
    tasks.cancel()
    await second.rejoin([])
    if damage:
        second.trainer._dp_size = 2
    done = StepDone(1, PolicyVersion(0, 2), {}, "")
    assert await running(second, second.handle(done)) == Ok()
    kept, _ = surviving(line for line, _ in read_lines(writing.folder.log))
    found, _ = whole_plan(StepFile(writing.folder, kept[1]))
    assert [g.group_id for g in found.groups] == [g.group_id for g in reply.plan.groups]
    assert (found.rows == reply.plan.rows) != damage


async def test_after_damage_the_trainer_starts_again(tmp_path: Path) -> None:
    """What it trained since its checkpoint is not known any more: nothing may be planned."""
    engine = StubEngine()
    first, _ = make(tmp_path, engine)
    tasks = asyncio.create_task(first.run())
    held = [g.group_id for p in await train(first, 2) for g in p.groups]
    first.context.services.journal.close()
    path = tmp_path / "journal" / "journal.sqlite"
    path.write_bytes(path.read_bytes()[:5000])
    second, _ = successor(tmp_path, engine, first, trainer_alive=True)
    tasks.cancel()
    await second.rejoin([])

    async def work() -> list:
        for message in (TakePlan(2, 1.0, 0), StepDone(1, PolicyVersion(0, 2), {}, "")):
            with pytest.raises(ProtocolError, match="it must restart from its checkpoint"):
                await second.handle(message)
        return await train(second, 4, tuple(held), PolicyVersion(1, 2))

    plans = await running(second, work())
    assert sorted(g.group_id for p in plans for g in p.groups) == [4, 5, 6, 7]


async def test_a_resume_keeps_finished_groups_that_are_legal(tmp_path: Path) -> None:
    """Everything died; the checkpoint holds step 1 of 2."""
    engine = StubEngine()
    first, _ = make(tmp_path, engine)
    tasks = asyncio.create_task(first.run())
    plans = await train(first, 2)
    held = [g.group_id for g in plans[0].groups]
    while first.context.buffer.num_ready < 2:
        await asyncio.sleep(0.01)
    legal = [g for g in first.context.buffer.ready() if g.newest <= PolicyVersion(0, 1)]
    tasks.cancel()
    fresh = StubEngine()
    second, _ = successor(tmp_path, fresh, first)
    rest = await running(second, train(second, 4, tuple(held), PolicyVersion(1, 1)))
    ids = [g.group_id for p in [plans[0], *rest] for g in p.groups]
    assert sorted(ids) == list(range(8))
    again = {int(r.rollout_id.split(".")[0]) for r in fresh.requests}
    assert not again & {g.group_id for g in legal}
    for plan in rest:
        for span in (s for g in plan.groups for r in g.rollouts() for s in r.versions):
            assert span.version.incarnation == 1 or span.version.step <= 1


async def test_trained_groups_wait_for_the_checkpoint_that_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of version 0.0 can be trained again by a trainer that starts from the beginning."""
    engine, saved = StubEngine(), [0]
    controller, _ = make(tmp_path, engine, saved_steps=lambda: saved[0])

    async def work() -> None:
        plans = await train(controller, 2)
        first = {g.group_id for p in plans for g in p.groups if g.newest.step == 0}
        assert set(controller.context.batches.trained) == first
        asked = len(engine.requests)
        await controller.handle(hello(PolicyVersion(1, 0)))
        await publish(controller, PolicyVersion(1, 0))
        assert set(await at_step(controller, 0)) == set(sorted(first)[:2])
        again = {int(r.rollout_id.split(".")[0]) for r in engine.requests[asked:]}
        assert not again & first, "what could be trained again was generated again"
        forgotten, last = [], {g.group_id for g in controller.context.batches.planned[0]}
        monkeypatch.setattr(controller.context.ref_counts, "forget", forgotten.append)
        saved[0] = 1
        await controller.handle(StepDone(0, PolicyVersion(1, 1), {}, ""))
        assert controller.context.batches.trained == {}
        assert {g.group_id for g in forgotten} == last, "their blobs are of no more use"

    await running(controller, work())


@pytest.mark.parametrize("died", ["before the commit", "after it"])
async def test_a_publish_that_a_controller_left_behind(tmp_path: Path, died: str) -> None:
    """It goes on, or is refused and done again; what the engine serves is never guessed.

    The engine keeps a session beyond any controller, as a real one does in its host.
    """
    engine, target = StubEngine(needs_verify=True), PolicyVersion(0, 1)
    verify = VerifyUpdate(0, target, (), 1.0)
    commit = CommitUpdate(0, target, 1.0)
    first, _ = make(tmp_path, engine)
    tasks = asyncio.create_task(first.run())
    await first.handle(hello(PolicyVersion(0, 0)))
    await first.handle(verify)
    if died == "after it":
        await first.handle(commit)
    second, _ = successor(tmp_path, engine, first, trainer_alive=True)
    tasks.cancel()
    await second.rejoin([])
    assert second.context.pool.engines[0].version == engine.version
    if died == "after it":
        with pytest.raises(EngineError, match="nothing was verified"):
            await second.handle(commit)
        assert second.context.pool.serves(0), "a refused commit leaves the engine as it was"
        await second.handle(verify)
    await second.handle(commit)
    assert second.context.pool.engines[0].version == engine.version == target
    await second.stop()


@pytest.mark.parametrize("write", ["began", "admitted", "planned", "done", "row"])
async def test_a_full_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    """Nothing is given out before its row is written; then the run goes on as if nothing was."""
    monkeypatch.setattr(disk_wait, "PAUSE_S", 0.01)
    full: dict[str, int] = {}  # failures so far, by what is written

    def refused(*args: object) -> bool:
        """Twice for the first thing that is written."""
        full[str(args)] = full.get(str(args), 0) + 1
        return str(args) == next(iter(full)) and full[str(args)] <= 2

    if write != "row":
        plain = getattr(Journal, write)

        def fails(journal: Journal, *args: object, **named: object) -> None:
            if refused(getattr(args[0], "group_id", args[0])):
                raise JournalError("database or disk is full")
            plain(journal, *args, **named)

        monkeypatch.setattr(Journal, write, fails)
    controller, reports = make(tmp_path, StubEngine())
    on_step = controller.context.services.on_step

    def add(report: StepReport) -> None:
        if write == "row" and refused(report.step):
            raise OSError(28, "No space left on device")
        on_step(report)

    handler = controller.trainer
    handler._services = replace(handler._services, on_step=add)
    plans = await running(controller, train(controller, 4))
    assert sorted(g.group_id for p in plans for g in p.groups) == list(range(8))
    assert [report.step for report in reports] == [0, 1, 2, 3]
    assert sum(report.metrics["journal/failed_writes"] for report in reports) >= 2


async def test_a_plan_that_could_not_be_written_is_not_given_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise JournalError("database or disk is full")

    controller, _ = make(tmp_path, StubEngine())

    async def work() -> None:
        await controller.handle(hello(PolicyVersion(0, 0)))
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "planned", full)
            for _ in range(2):  # a repeated request must not find it planned either
                with pytest.raises(ProtocolError, match="no batch of 2 groups"):
                    await controller.handle(TakePlan(0, 0.3, 0))
        assert not controller.context.batches.planned
        assert sorted(await at_step(controller, 0)) == [0, 1]

    await running(controller, work())
