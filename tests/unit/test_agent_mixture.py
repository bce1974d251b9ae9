"""Mixtures with agents: tasks of text, of environments and of programs in one run."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moerl.agents.environments.environment_episodes import EnvironmentEpisodes
from moerl.config.clusters import placement
from moerl.config.load import load_config
from moerl.config.schema import Config, EvaluationConfig
from moerl.config.task_mixture import by_label
from moerl.core.types import EpisodeGroup, Prompt
from moerl.planning.dry_run import _processes
from tests.helpers.agent_stubs import SHAPE, HeldOutEnvironments, policy_of
from tests.helpers.controllers import CONFIG, Prompts, make, running, train
from tests.helpers.stub_engine import StubEngine

TASKS: list[dict[str, Any]] = [
    {"label": "text", "sampling": {"max_new_tokens": 3}},
    {"label": "one", "environment": "a:B", "sampling": {"temperature": 0.9}},
    {"label": "two", "environment": "a:C", "max_turns": 1, "reward": "source"},
]
LABELS = [task["label"] for task in TASKS]


class Mixed(Prompts):
    def prompt(self, index: int) -> Prompt:
        return replace(super().prompt(index), task=LABELS[index % len(LABELS)])


def config_of(**changes: Any) -> Config:
    rollout = replace(CONFIG.rollout, groups_per_step=3, selection="strict")
    return replace(CONFIG, tasks=TASKS, rollout=rollout, **changes)


def agents_of(
    config: Config, pools: dict[str, HeldOutEnvironments]
) -> dict[str, EnvironmentEpisodes]:
    entries, policy = by_label(config), policy_of()
    return {
        label: EnvironmentEpisodes(entries[label], policy, pool) for label, pool in pools.items()
    }


def trained(
    tmp_path: Path, engine: StubEngine, **changes: Any
) -> tuple[list[EpisodeGroup], list[dict[str, float]], dict[str, HeldOutEnvironments]]:
    pools = {"one": HeldOutEnvironments(), "two": HeldOutEnvironments()}

    async def body() -> tuple[list[EpisodeGroup], list[dict[str, float]]]:
        config = config_of(**changes)
        controller, reports = make(
            tmp_path,
            engine,
            config,
            prompts=Mixed(),
            held_out=Mixed(),
            agents=agents_of(config, pools),
            model=SHAPE,
        )
        plans = await running(controller, train(controller, 4), 60)
        return [g for plan in plans for g in plan.groups], [one.metrics for one in reports]

    groups, rows = asyncio.run(body())
    return groups, rows, pools


def test_text_and_two_agents_are_trained_side_by_side(tmp_path: Path) -> None:
    """Each by what plays it, in the order of the prompts, with its own limits."""
    engine = StubEngine()
    groups, rows, pools = trained(tmp_path, engine)
    assert [group.group_id for group in groups] == list(range(12))
    assert Counter(group.prompt.task for group in groups) == dict.fromkeys(LABELS, 4)
    sampled = {
        label: {
            sum(node.rollout.num_sampled for node in episode.turns)
            for group in groups
            if group.prompt.task == label
            for episode in group.episodes
        }
        for label in LABELS
    }
    assert sampled == {"text": {3}, "one": {8}, "two": {4}}, "one turn, two turns, a limit of one"
    for label, pool in pools.items():
        numbers = {int(name.partition(".")[0]) % 3 for name in pool.names}
        assert numbers == {LABELS.index(label)}, "no episode of another task"
    asked = {int(r.rollout_id.partition(".")[0]) % 3: r.sampling for r in engine.requests}
    assert [asked[place].temperature for place in range(3)] == [1.0, 0.9, 1.0]
    assert sum(row["sample/groups/text"] for row in rows) == 4


def test_each_task_of_the_mixture_is_evaluated_by_what_plays_it(tmp_path: Path) -> None:
    evaluation = EvaluationConfig(every=2, prompts=2, samples=2, max_requests=3, hold_s=5.0)
    engine = StubEngine()
    _, rows, pools = trained(tmp_path, engine, evaluation=evaluation)
    found = [row for row in rows if "eval/reward_mean" in row]
    assert [row["eval/step"] for row in found] == [0.0, 2.0]
    assert found[0]["eval/length_mean/text"] == 3.0
    assert (found[0]["eval/length_mean/one"], found[0]["eval/length_mean/two"]) == (8.0, 4.0)
    assert {f"eval/reward_mean/{label}" for label in LABELS} <= found[0].keys()
    for pool in pools.values():
        assert len([name for name in pool.names if name.startswith("eval-0.0")]) == 4
    asked = [r for r in engine.requests if r.rollout_id.startswith("eval-0.0")]
    assert {one.sampling.top_k for one in asked} == {1}


def test_an_engine_that_dies_costs_no_group_of_any_task(tmp_path: Path) -> None:
    groups, rows, _ = trained(tmp_path, StubEngine(fails_at=6))
    assert [group.group_id for group in groups] == list(range(12))
    assert not sum(row["scorer/failed"] for row in rows)


def test_the_dry_run_names_each_agent() -> None:
    config = load_config(
        "digits-mixture",
        [
            "tasks.three.agent.command=[python, agent.py]",
            "tasks.five.environment=examples.live_environment:Locks",
        ],
    )
    (name,) = {node.name for node in [placement(config).controller]}
    rows = [row for row in _processes(config, placement(config), name) if "agents" in row[0]]
    assert [row[0] for row in rows] == ["agents three", "agents five"]
    assert "python agent.py" in rows[0][-1]


@pytest.mark.parametrize("label", ["three", "turns"])
def test_settings_of_an_agent_belong_to_its_task(label: str) -> None:
    config = load_config("digits-mixture", [f"tasks.{label}.agent.command=[python, agent.py]"])
    found = {entry.label: entry.agent.command for entry in by_label(config).values()}
    assert found == {"three": [], "five": [], "turns": []} | {label: ["python", "agent.py"]}
