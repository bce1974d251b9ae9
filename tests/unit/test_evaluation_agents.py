"""Evaluations whose held-out prompts are played by agents: one version, and nothing guessed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moerl.config.checks import check
from moerl.config.load import load_config
from moerl.config.schema import EvaluationConfig, TaskConfig
from moerl.config.task_programs import AgentConfig
from moerl.core.types import PolicyVersion, Prompt, SamplingParams, Score
from moerl.episodes.finished_episode import FinishedEpisode
from moerl.episodes.open_episode import EnginePin
from tests.helpers.agent_stubs import (
    SHAPE,
    HeldOutEnvironments,
    environment_runner,
    play,
    program_runner,
)
from tests.helpers.chat_tokenizer import END, SIZE
from tests.helpers.controllers import CONFIG, Prompts, StubScorer, make, running, train
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.stub_engine import StubEngine

EVERY_TWO = EvaluationConfig(
    every=2, prompts=3, samples=2, max_requests=4, hold_s=5.0, temperature=0.6
)
GREEDY = SamplingParams(3, top_k=1, stop_token_ids=(END,))


def evaluated(
    tmp_path: Path,
    pool: HeldOutEnvironments,
    engine: StubEngine,
    evaluation: EvaluationConfig = EVERY_TWO,
    work: Callable[[Any], Any] = lambda controller: train(controller, 4),
    **changes: Any,
) -> tuple[list[dict[str, float]], list[Any]]:
    """Rows of metrics, and what was trained."""

    async def body() -> tuple[list[dict[str, float]], list[Any]]:
        task = TaskConfig(environment="a:B", **changes)
        config = replace(CONFIG, task=task, evaluation=evaluation)
        controller, reports = make(
            tmp_path,
            engine,
            config,
            agents={"": environment_runner(task, pool)},
            model=SHAPE,
            held_out=Prompts(),
        )
        plans = await running(controller, work(controller), 60)
        return [report.metrics for report in reports], plans

    return asyncio.run(body())


def evaluations(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [row for row in rows if "eval/reward_mean" in row]


def test_held_out_prompts_are_played_at_one_version_and_not_trained(tmp_path: Path) -> None:
    pool, engine = HeldOutEnvironments(), StubEngine()
    rows, plans = evaluated(tmp_path, pool, engine)
    found = evaluations(rows)
    assert [row["eval/step"] for row in found] == [0.0, 2.0]
    for row in found:
        assert (row["eval/reward_mean"], row["eval/reward_best"]) == (0.5, 1.0)
        assert row["eval/reward_se"] == pytest.approx(0.5 / 6**0.5)
        assert (row["eval/failed"], row["eval/played_again"]) == (0.0, 0.0)
        assert row["eval/length_mean"] == 8.0, "two turns of four tokens"
    asked = [one for one in engine.requests if one.rollout_id.startswith("eval")]
    assert {one.sampling.temperature for one in asked} == {0.6}
    trained = [one for one in engine.requests if not one.rollout_id.startswith("eval")]
    assert {one.sampling.temperature for one in trained} == {1.0}
    assert len([name for name in pool.names if name.startswith("eval-0.2")]) == 6
    names = {episode.episode_id for p in plans for g in p.groups for episode in g.episodes}
    assert not any(name.startswith("eval") for name in names)
    played = sum(row.get("agent/episodes", 0) for row in rows)
    assert played <= len([name for name in pool.names if not name.startswith("eval")])
    assert not list(tmp_path.glob("blobs/**/*eval*"))


def test_a_failed_episode_is_played_once_more_and_then_has_no_reward(tmp_path: Path) -> None:
    """Of one prompt both fail twice, of another one once; the mean is over those that ended."""
    pool = HeldOutEnvironments(breaks=("eval-0.0-1.0", "eval-0.0-1.1", "eval-0.0-2.0"))
    pool.breaks += ("eval-0.2-0.0",)

    class Once(HeldOutEnvironments):
        async def open(self, name: str) -> Any:
            if name == "eval-0.2-0.0-again":
                self.breaks = ()
            return await super().open(name)

    once = Once(breaks=pool.breaks)
    rows, _ = evaluated(tmp_path, once, StubEngine())
    first, second = evaluations(rows)
    assert (first["eval/failed"], first["eval/played_again"]) == (3.0, 3.0)
    assert first["eval/reward_mean"] == pytest.approx(2 / 3), "rewards 0, 1 and 1"
    assert first["eval/reward_best"] == 1.0
    assert (second["eval/failed"], second["eval/played_again"]) == (0.0, 1.0)
    assert second["eval/reward_mean"] == 0.5
    assert not sum(row.get("scorer/failed", 0.0) for row in rows)


def test_where_every_episode_fails_there_is_no_figure_and_the_run_goes_on(tmp_path: Path) -> None:
    rows, plans = evaluated(tmp_path, HeldOutEnvironments(breaks=("eval-0.0",)), StubEngine())
    assert [row["eval/step"] for row in evaluations(rows)] == [2.0]
    assert sum(row.get("eval/given_up", 0) for row in rows) == 1
    assert len(plans) == 4


@pytest.mark.parametrize("checks", [True, False])
def test_an_update_behind_hold_s_cancels_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: bool
) -> None:
    """Control: without the check, later turns of the same episodes are of newer weights."""
    pool, engine = HeldOutEnvironments(), StubEngine()
    if not checks:
        monkeypatch.setattr(EnginePin, "check", lambda *_: None)

    async def work(controller: Any) -> list[Any]:
        pool.held = asyncio.Event()
        training = asyncio.create_task(train(controller, 2))
        while controller.context.pool.engines[0].version < PolicyVersion(0, 1):
            await asyncio.sleep(0.01)
        pool.held.set()
        plans = await training
        while controller.context.pool.engines[0].held_until:
            await asyncio.sleep(0.01)
        return plans

    rows, plans = evaluated(tmp_path, pool, engine, replace(EVERY_TWO, every=100, hold_s=0.3), work)
    assert len(plans) == 2
    assert not evaluations(rows)
    asked = {one.rollout_id for one in engine.requests if one.rollout_id.startswith("eval")}
    assert {name[-3:] for name in asked} == ({".t0"} if checks else {".t0", ".t1"})


def test_an_engine_that_dies_costs_the_evaluation_only(tmp_path: Path) -> None:
    pool = HeldOutEnvironments()
    rows, plans = evaluated(
        tmp_path, pool, StubEngine(fails=lambda first: first.rollout_id.startswith("eval-0.0"))
    )
    assert [row["eval/step"] for row in evaluations(rows)] == [2.0]
    assert sum(row.get("eval/given_up", 0) for row in rows) == 1
    assert len(plans) == 4


def test_an_evaluation_that_hangs_is_cancelled_behind_twice_hold_s(tmp_path: Path) -> None:
    pool = HeldOutEnvironments()

    async def work(controller: Any) -> list[Any]:
        pool.held = asyncio.Event()
        plans = await train(controller, 1)
        while not controller.context.step_metrics["eval/given_up"]:
            await asyncio.sleep(0.01)
        return plans

    evaluation = replace(EVERY_TWO, every=100, hold_s=0.2)
    rows, _ = evaluated(tmp_path, pool, StubEngine(), evaluation, work)
    assert not evaluations(rows)
    opened = {name for name in pool.names if name.startswith("eval")}
    assert opened == {name for name in pool.closed if name.startswith("eval")}


def test_task_reward_scores_held_out_episodes(tmp_path: Path) -> None:
    class ByName(StubScorer):
        async def rewards(self, prompt: Prompt, episodes: Any) -> list[Score]:
            if not episodes[0].name.startswith("eval"):
                return await super().rewards(prompt, episodes)
            assert all(len(episode.turns) == 2 for episode in episodes)
            return [Score(0.25) for _ in episodes]

    async def body() -> list[dict[str, float]]:
        task = TaskConfig(environment="a:B", reward="source")
        config = replace(CONFIG, task=task, evaluation=EVERY_TWO)
        agents = environment_runner(task, HeldOutEnvironments(breaks=("eval-0.0-1.0",)))
        controller, reports = make(
            tmp_path, StubEngine(), config, agents={"": agents}, model=SHAPE, held_out=Prompts(),
            scorer=ByName(),
        )  # fmt: skip
        await running(controller, train(controller, 4), 60)
        return [report.metrics for report in reports]

    first, _ = evaluations(asyncio.run(body()))
    assert (first["eval/reward_mean"], first["eval/failed"]) == (0.25, 1.0)


# --- programs ------------------------------------------------------------------------------------
WORKER = """
import json, sys, urllib.request
for line in sys.stdin:
    asked = json.loads(line)
    assert asked["index"] == 7 and asked["held_out"] == asked["episode"].startswith("eval")
    if asked["prompt"] == "die" and not asked["episode"].endswith("again"):
        sys.exit("lost")
    body = {"messages": asked["messages"], "temperature": 1.0}
    headers = {"Authorization": "Bearer " + asked["api_key"]}
    url = asked["base_url"] + "/chat/completions"
    reply = urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))
    json.load(reply)
    own = {name: asked[name] for name in ("episode", "secret")}
    print(json.dumps(own | {"reward": 1}), flush=True)
"""


def test_a_worker_plays_both_kinds_each_with_its_own_sampling(tmp_path: Path) -> None:
    """The worker dies in an episode of an evaluation: the episode is lost, the next one played."""
    engine = ScriptedEngine()
    engine.say(*[[SIZE - 1] * 4 for _ in range(3)])

    async def body() -> list[FinishedEpisode]:
        agent = AgentConfig(command=["python", "-c", WORKER], workers=1)
        agents = program_runner(tmp_path, TaskConfig(agent=agent, wall_s=60.0))
        await agents.start()
        try:
            good, dies = (Prompt(7, (1,), text, None, {}) for text in ("p", "die"))
            return [
                await play(agents, engine, "7.0", good),
                await play(agents, engine, "eval-0.0-7.0", good, GREEDY, held_out=True),
                await play(agents, engine, "eval-0.0-8.0", dies, GREEDY, held_out=True),
                await play(agents, engine, "eval-0.0-8.0-again", dies, GREEDY, held_out=True),
            ]
        finally:
            await agents.close()

    played = asyncio.run(body())
    assert [episode.failure for episode in played] == ["", "", "lost", ""]
    assert [(one.sampling.top_k, one.sampling.max_new_tokens) for one in engine.requests] == [
        (-1, 4),
        (1, 3),
        (1, 3),
    ]
    taken = [episode.counts.get("not_taken/temperature", 0) for episode in played]
    assert taken == [0, 0, 0, 0], "1.0 is the temperature of both"


def test_evaluations_are_taken_with_each_kind_of_agent() -> None:
    for recipe, agent in (
        ("digits-by-agent", "task.agent.workers=0"),
        ("digits-by-agent", "task.agent.workers=2"),
        ("quickstart", "task.environment=examples.live_environment:Locks"),
    ):
        check(load_config(recipe, [agent, "evaluation.every=2"]))
