"""Engines that join and leave while the controller's loops run, and requests over the control
API.
"""

from __future__ import annotations

import asyncio
import fcntl
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.config.schema import RunConfig
from moerl.core.errors import ConfigError, EngineError, MoerlError
from moerl.core.messages import Ok, SetEngines, SyncTarget
from moerl.core.types import PolicyVersion
from moerl.launch.nodes.control_api import ControlApi, request
from moerl.launch.supervision.engine_supervisor import check_removal
from moerl.runtime.run_dir import RunDir
from tests.helpers.controllers import CONFIG, PublishingTrainer, commit, hello, make, running
from tests.helpers.stub_engine import StubEngine, always


async def test_an_engine_that_joins_works_on_the_newest_weights_only(tmp_path: Path) -> None:
    first, second = StubEngine(), StubEngine()
    controller, _ = make(tmp_path, first, replace(CONFIG, run=RunConfig(steps=12)))
    trainer = PublishingTrainer(controller)

    async def work() -> None:
        await trainer.hello()
        await trainer.step()
        controller.engine_joins(1, second, 1)
        await asyncio.sleep(0.05)
        assert not second.requests, "it was sent requests on the weights it started with"
        assert controller.context.pool.table()[1]["state"] == "behind"
        await trainer.step()
        assert trainer.told == [(0, 1)]
        assert controller.context.pool.table()[1]["version"] == str(trainer.version)
        while trainer.version.step < 12:
            await trainer.step()

    await running(controller, work())
    assert sorted(group.group_id for group in trainer.groups) == list(range(24))
    assert trainer.told == [(0, 1)], "it was told once"
    asked = [{r.rollout_id for r in engine.requests} for engine in (first, second)]
    assert all(asked)
    assert not asked[0] & asked[1]


async def test_what_runs_on_an_engine_that_leaves_goes_on_elsewhere(tmp_path: Path) -> None:
    """Its partial rollouts are finished by the other one; no token is sampled twice."""
    first, second = StubEngine(holds=always), StubEngine()
    controller, _ = make(tmp_path, first, more_engines=(second,))
    trainer = PublishingTrainer(controller, (0, 1))

    async def work() -> None:
        await trainer.hello()
        member = controller.context.pool.engines[0]
        while not member.generating:
            await asyncio.sleep(0.001)
        leaving = asyncio.create_task(controller.engine_leaves(0))
        while member.generating:
            await asyncio.sleep(0.001)
        asked = len(first.requests)
        assert first.cut == asked > 0, "nothing was interrupted: the test shows nothing"
        await asyncio.sleep(0.05)
        assert not leaving.done(), "the trainer may still be publishing to it"
        await trainer.step()
        await trainer.step()
        await leaving
        assert trainer.told == [(1,)]
        with pytest.raises(EngineError, match="engine 0 is not in this run"):
            await controller.handle(commit(trainer.version))
        await trainer.step()
        await trainer.step()
        assert len(first.requests) == asked, "it was sent requests after it left"
        assert set(controller.producer._engines._prefix_index._known) == {1}, "what it knew is kept"

    await running(controller, work())
    assert sorted(group.group_id for group in trainer.groups) == list(range(8))
    rollouts = [r for group in trainer.groups for r in group.rollouts()]
    assert {r.num_sampled for r in rollouts} == {4}
    assert first.tokens + second.tokens == 4 * len(rollouts), "a token was lost"


async def test_with_drain_a_rollout_ends_where_it_began(tmp_path: Path) -> None:
    """Two slices per rollout, one version each: nothing of it moves to another engine."""
    first, second = StubEngine(), StubEngine()
    rollout = replace(CONFIG.rollout, in_flight_mode="drain", slice_tokens=2)
    config = replace(CONFIG, rollout=rollout)
    controller, _ = make(tmp_path, first, config, more_engines=(second,))
    trainer = PublishingTrainer(controller, (0, 1))

    async def work() -> None:
        await trainer.hello()
        member = controller.context.pool.engines[0]
        while not member.generating:
            await asyncio.sleep(0.001)
        leaving = asyncio.create_task(controller.engine_leaves(0))
        for _ in range(4):
            await trainer.step()
        await leaving

    await running(controller, work())
    asked = [{r.rollout_id for r in engine.requests} for engine in (first, second)]
    assert all(asked)
    assert not asked[0] & asked[1]
    rollouts = [r for group in trainer.groups for r in group.rollouts()]
    assert {len(r.versions) for r in rollouts} == {1}


async def test_a_trainer_that_starts_again_is_told_who_is_there(tmp_path: Path) -> None:
    controller, _ = make(tmp_path, StubEngine())

    async def work() -> None:
        again = hello(PolicyVersion(0, 0))
        assert await controller.handle(again) == Ok(), "as configured"
        controller.engine_joins(3, StubEngine(), 2)
        told = await controller.handle(hello(PolicyVersion(1, 0)))
        assert told == SetEngines((SyncTarget(0, 1), SyncTarget(3, 2)))

    await running(controller, work())


@pytest.mark.parametrize(
    ("engine", "idle", "leaving", "what"),
    [
        (7, (), (), "ENGINE = 7 is not usable: the run's engines are 0, 1"),
        (0, (), (0,), "leaving already"),
        (0, (), (1,), "the last working engine: add another first"),
        (0, (1,), (), "the last working engine: add another first"),
    ],
)
def test_a_removal_that_is_refused(
    engine: int, idle: tuple[int, ...], leaving: tuple[int, ...], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        check_removal(engine, (0, 1), idle, leaving)
    check_removal(1, (0, 1), idle, ())


def test_the_control_api(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with pytest.raises(MoerlError, match="is not being trained now"):
        request(run, 1.0, do="list")
    control_api = ControlApi(run)
    assert (run.control_api.stat().st_mode & 0o777) == 0o700
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(MoerlError, match="did not answer within"):
            request(run, 0.2, do="list")
        assert not list(control_api.poll()), "a question that nobody waits for is taken back"

        def serve() -> None:
            answers = [{"answer": 5}, {"refused": "no"}]
            while answers:
                for name, question in control_api.poll():
                    assert question["do"] == "add"
                    control_api.answer(name, answers.pop(0))

        thread = threading.Thread(target=serve)
        thread.start()
        assert request(run, 30.0, do="add") == 5
        with pytest.raises(MoerlError, match=r"^no$"):
            request(run, 30.0, do="add")
        thread.join()
    assert not list(run.control_api.iterdir()), "questions and answers do not pile up"
