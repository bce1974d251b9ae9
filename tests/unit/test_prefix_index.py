"""A prompt that comes again goes to the engine that knows it, within bounds."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.config.schema import RolloutConfig
from moerl.controller.engine_choice import CHUNK, PrefixIndex, leads_of
from moerl.core.messages import Ok
from moerl.core.types import PolicyVersion, Prompt
from tests.helpers.controllers import CONFIG, hello, make, running, train
from tests.helpers.patience import patience
from tests.helpers.stub_engine import StubEngine, always

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
LONG = tuple(range(3 * CHUNK + 7))


def test_what_is_known_is_a_common_lead() -> None:
    known = PrefixIndex()
    known.sent(0, V0, leads_of(LONG))
    assert known.length(0, V0, leads_of(LONG)) == len(LONG)
    assert known.length(0, V0, leads_of((*LONG[: 2 * CHUNK + 3], 9, 9))) == 2 * CHUNK
    assert known.length(0, V0, leads_of((5, *LONG[1:]))) == 0
    assert known.length(1, V0, leads_of(LONG)) == 0
    assert known.length(0, V0, leads_of((*LONG, *range(CHUNK)))) == 3 * CHUNK


def test_an_update_makes_it_forget() -> None:
    known = PrefixIndex()
    known.sent(0, V0, leads_of(LONG))
    assert known.length(0, V1, leads_of(LONG)) == 0, "its cache was emptied"
    known.sent(0, V1, leads_of(LONG[:CHUNK]))
    assert known.length(0, V1, leads_of(LONG)) == CHUNK
    assert known.length(0, V0, leads_of(LONG)) == 0


class Repeating:
    """Two prompts of 200 tokens, in turn."""

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, (3 + index % 2,) * 200, f"p{index}", None, {})


def kinds(engine: StubEngine) -> list[int]:
    """Which of the two prompts each group had, in order."""
    firsts = {r.rollout_id.split(".")[0]: int(r.token_ids[0]) - 3 for r in engine.requests}
    return list(firsts.values())


async def start_all(tmp_path: Path, engines: list[StubEngine], rollout: RolloutConfig) -> None:
    """Let the engines take what they may; nothing is answered."""
    config = replace(CONFIG, rollout=rollout)
    controller, _ = make(tmp_path, engines[0], config, more_engines=engines[1:])
    controller.producer.prompts = Repeating()
    assert await controller.handle(hello(V0)) == Ok()
    tasks = asyncio.create_task(controller.run())
    wanted = 2 * rollout.groups_per_step * rollout.group_size  # as many as the lag allows
    async with asyncio.timeout(patience(20)):
        while sum(len(engine.requests) for engine in engines) < wanted:
            await asyncio.sleep(0.01)
    await controller.stop()
    await tasks


@pytest.mark.parametrize("slack", [-1, 100, 1])
def test_prompts_that_come_again_go_where_they_are_known(tmp_path: Path, slack: int) -> None:
    rollout = replace(CONFIG.rollout, groups_per_step=4, buffer_depth=1)
    rollout = replace(rollout, prefix_slack=slack)
    engines = [StubEngine(hangs=always), StubEngine(hangs=always)]
    asyncio.run(start_all(tmp_path, engines, rollout))
    found = [kinds(engine) for engine in engines]
    assert sorted(kind for each in found for kind in each) == [0] * 4 + [1] * 4, "each once"
    homes = defaultdict(set)
    for engine, each in enumerate(found):
        for kind in each:
            homes[kind].add(engine)
    loads = sorted(map(len, found))
    if slack == 100:
        assert all(len(where) == 1 for where in homes.values()), "each prompt has one home"
    elif slack == -1:
        assert loads == [4, 4], "control: by load alone"
    else:
        assert loads[1] - loads[0] <= 2 + slack, "never further out of balance than allowed"


async def test_a_home_that_fails_is_not_waited_for(tmp_path: Path) -> None:
    """Turns of groups that began on an engine that fails go to another; nothing is lost."""
    engines = [StubEngine(), StubEngine(fails=always)]
    rollout = replace(CONFIG.rollout, prefix_slack=100)
    controller, reports = make(
        tmp_path, engines[0], replace(CONFIG, rollout=rollout), more_engines=engines[1:]
    )
    controller.producer.prompts = Repeating()
    plans = await running(controller, train(controller, 4))
    assert sorted(g.group_id for p in plans for g in p.groups) == list(range(8))
    assert engines[1].calls, "no group began there"
    assert not engines[1].requests
    pool = controller.context.pool
    assert [pool.engines[index].groups for index in (0, 1)] == [0, 0], "homes have moved"
    found = [r.metrics.get("async/cached_frac") for r in reports]
    assert 0.0 in found, "the stub caches nothing"
