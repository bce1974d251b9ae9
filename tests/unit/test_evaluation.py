"""Evaluation: one version, its turn, never in the way of training for longer than allowed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moerl.config.reward_terms import RewardTerm, RoleConfig
from moerl.config.schema import EvaluationConfig
from moerl.controller.evaluation import interval_95, pass_at, sampling_of
from moerl.core.messages import Stop, TakePlan
from moerl.core.types import PolicyVersion, Prompt, SamplingParams, Score
from tests.helpers.controllers import CONFIG, Prompts, StubScorer, make, running, sibling, train
from tests.helpers.stub_engine import StubEngine

EVERY_TWO = EvaluationConfig(every=2, prompts=3, samples=2, max_requests=4, hold_s=5.0)


def with_evaluation(tmp_path: Path, engine: StubEngine, evaluation: EvaluationConfig) -> Any:
    config = replace(CONFIG, evaluation=evaluation)
    return make(tmp_path, engine, config, held_out=Prompts())


def evaluations(reports: list) -> list[dict[str, float]]:
    return [r.metrics for r in reports if "eval/reward_mean" in r.metrics]


async def test_every_second_version_is_evaluated_whole(tmp_path: Path) -> None:
    engine = StubEngine()
    controller, reports = with_evaluation(tmp_path, engine, EVERY_TWO)
    await running(controller, train(controller, 4))
    found = evaluations(reports)
    assert [row["eval/step"] for row in found] == [0.0, 2.0]
    assert all(row["eval/reward_mean"] == 0.5 for row in found)  # the stub: 0 and 1
    assert all(row["eval/reward_best"] == 1.0 for row in found)
    asked = [r for r in engine.requests if r.rollout_id.startswith("eval-0.2")]
    assert len(asked) == 6
    assert {r.sampling.top_k for r in asked} == {1}, "greedy unless a temperature is set"
    assert not list(tmp_path.glob("blobs/**/*eval*"))


def test_the_last_weights_are_evaluated_whatever_their_number(tmp_path: Path) -> None:
    """A row of its own, after those of all steps."""

    async def scenario(evaluation: EvaluationConfig) -> list:
        controller, reports = with_evaluation(tmp_path / str(evaluation), StubEngine(), evaluation)

        async def work() -> None:
            await train(controller, 4)
            assert isinstance(await controller.handle(TakePlan(4, 60.0, 0)), Stop)
            assert isinstance(await controller.handle(TakePlan(4, 60.0, 0)), Stop), "asked twice"

        await running(controller, work())
        return reports

    reports = asyncio.run(scenario(replace(EVERY_TWO, every=3)))
    assert [row["eval/step"] for row in evaluations(reports)] == [0.0, 3.0, 4.0]
    steps = [report.step for report in reports]
    assert steps == list(range(len(steps))), "3 may have ended too late for the row of a step"
    assert len(steps) in (5, 6)
    assert str(reports[-1].version) == "0.4"
    assert all(name.startswith("eval/") for name in reports[-1].metrics)
    assert len(asyncio.run(scenario(EvaluationConfig()))) == 4


def test_an_update_waits_for_the_evaluation_and_no_longer_than_allowed(tmp_path: Path) -> None:
    """The engine never answers it: after hold_s the update goes on, and no figure is made up."""

    async def scenario(hold_s: float) -> tuple[list, float]:
        engine = StubEngine(holds=lambda first: first.rollout_id.startswith("eval"))
        controller, reports = with_evaluation(
            tmp_path / str(hold_s), engine, replace(EVERY_TWO, every=100, hold_s=hold_s)
        )
        begin = asyncio.get_running_loop().time()
        await running(controller, train(controller, 2))
        return reports, asyncio.get_running_loop().time() - begin

    for hold_s in (0.05, 0.5):
        reports, took_s = asyncio.run(scenario(hold_s))
        assert took_s >= hold_s
        assert evaluations(reports) == []


@pytest.mark.parametrize("who", ["engine", "scorer"])
async def test_an_evaluation_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """The next one takes place."""
    monkeypatch.setattr("moerl.controller.evaluation._SCORE_S", 0.2)

    class SilentScorer(StubScorer):
        async def rewards(self, prompt: Prompt, episodes: Any) -> list[Score]:
            if who == "scorer" and episodes[0].name.startswith("eval-0.0"):
                await asyncio.Event().wait()
            return await super().rewards(prompt, episodes)

    evaluation = replace(EVERY_TWO, hold_s=0.3)
    task = replace(CONFIG.task, score_timeout_s=0.05)
    config = replace(CONFIG, evaluation=evaluation, task=task)
    hangs = "eval-0.0" if who == "engine" else "none"
    engines = StubEngine(hangs=lambda first: first.rollout_id.startswith(hangs))
    scorer = SilentScorer()
    held_out = {"held_out": Prompts(), "scorer": scorer}
    controller, reports = make(tmp_path, engines, config, **held_out)

    async def work() -> None:
        await train(controller, 2)
        await asyncio.sleep(1.0)  # nothing is trained meanwhile: no update ends it
        await train(controller, 4, start=PolicyVersion(1, 2), consumed=(0, 1, 2, 3))
        assert isinstance(await controller.handle(TakePlan(4, 60.0, 1)), Stop)

    await running(controller, work())
    steps = [row["eval/step"] for row in evaluations(reports)]
    assert 0.0 not in steps
    assert steps[-1] == 4.0
    assert sum(r.metrics.get("eval/given_up", 0) for r in reports) == 1


async def test_without_the_setting_nothing_is_evaluated(tmp_path: Path) -> None:
    engine = StubEngine()
    controller, reports = with_evaluation(tmp_path, engine, EvaluationConfig())
    await running(controller, train(controller, 4))
    assert evaluations(reports) == []


def test_its_distribution() -> None:
    training = SamplingParams(9, temperature=0.7, top_p=0.9, top_k=30, stop_token_ids=(2,))
    greedy = sampling_of(EvaluationConfig(), training)
    assert greedy == SamplingParams(9, top_k=1, stop_token_ids=(2,))
    plain = sampling_of(EvaluationConfig(temperature=0.6), training)
    assert plain == SamplingParams(9, temperature=0.6, stop_token_ids=(2,))


@pytest.mark.parametrize("right", [0, 1, 13, 63, 64])
def test_an_interval_of_right_answers_ends_where_the_score_test_does(right: int) -> None:
    """Wilson's definition: a bound is the share that lies 1.96 of its own standard errors away."""
    share = right / 64
    low, high = interval_95([1.0] * right + [0.0] * (64 - right))
    assert 0.0 <= low <= share <= high <= 1.0
    for bound in (low, high):
        assert abs(share - bound) == pytest.approx(1.96 * (bound * (1 - bound) / 64) ** 0.5)
    assert high - low > 0.05, "all right says little more of 64 answers than nearly all right"


def test_an_interval_of_other_rewards_is_the_normal_one() -> None:
    assert interval_95([-1.0, 3.0] * 8) == pytest.approx((1 - 1.96 / 2, 1 + 1.96 / 2))


async def test_each_task_of_a_mixture_is_evaluated(tmp_path: Path) -> None:
    """As many prompts of each, with its own limits; the plain names are over all answers."""

    class Mixed(Prompts):
        def prompt(self, index: int) -> Prompt:
            return replace(super().prompt(index), task="ab"[index % 2])

    class ByTask(StubScorer):
        async def rewards(self, prompt: Prompt, episodes: Any) -> list[Score]:
            if prompt.task == "b":
                return [Score(1.0) for _ in episodes]
            return await super().rewards(prompt, episodes)

    engine = StubEngine()
    tasks: list[dict[str, Any]] = [
        {"label": "a"},
        {"label": "b", "weight": 3, "sampling": {"max_new_tokens": 7, "temperature": 0.5}},
    ]
    config = replace(CONFIG, evaluation=EVERY_TWO, tasks=tasks)
    controller, reports = make(
        tmp_path, engine, config, held_out=Mixed(), prompts=Mixed(), scorer=ByTask()
    )
    await running(controller, train(controller, 4))
    row = evaluations(reports)[0]
    assert (row["eval/reward_mean/a"], row["eval/reward_mean/b"]) == (0.5, 1.0)
    assert row["eval/reward_mean"] == 0.75
    short = CONFIG.sampling.max_new_tokens
    assert (row["eval/length_mean/a"], row["eval/length_mean/b"]) == (short, 7.0)
    asked = [r for r in engine.requests if r.rollout_id.startswith("eval-0.0")]
    assert len(asked) == 2 * EVERY_TWO.prompts * EVERY_TWO.samples
    steps = [report.metrics for report in reports if "reward/mean" in report.metrics]
    assert all(step["reward/mean/b"] == 1.0 for step in steps if "reward/mean/b" in step)
    assert all(step["reward/zero_var_frac/a"] == 0.0 for step in steps)
    groups = CONFIG.rollout.groups_per_step
    assert all(s["sample/groups/a"] + s["sample/groups/b"] == groups for s in steps)
    trained = [r.sampling for r in engine.requests if not r.rollout_id.startswith("eval")]
    assert {(s.max_new_tokens, s.temperature) for s in trained} >= {(short, 1.0), (7, 0.5)}


@pytest.mark.parametrize(
    ("k", "rewards", "found"),
    [
        (1, [1.0, 0.0, 0.5, 0.0], 0.25),
        (2, [1.0, 0.0, 0.5, 0.0], 0.5),  # 1 - 3 x 2 / (4 x 3)
        (4, [1.0, 0.0, 0.5, 0.0], 1.0),
        (2, [0.0, 0.0], 0.0),
        (2, [1.0, 1.0, 0.0], 1.0),
    ],
)
def test_pass_at_k_is_unbiased(k: int, rewards: list[float], found: float) -> None:
    assert pass_at(k, rewards) == pytest.approx(found)


class Repeats(Prompts):
    """A file of two items, over and over."""

    def prompt(self, index: int) -> Prompt:
        return replace(super().prompt(index % 2), index=index)


class ByRole(StubScorer):
    """Says what the answers are: of the first item the wrong one is more frequent."""

    async def rewards(self, prompt: Prompt, episodes: Any) -> list[Score]:
        right = [sibling(one) == 0 or prompt.index == 1 for one in episodes]
        return [
            Score(float(one), roles={"a": 2.0 * one, "b.1": 0.5}, answer="right" if one else "no")
            for one in right
        ]


def test_items_count_once_and_figures_of_samples_and_roles(tmp_path: Path) -> None:
    async def scenario() -> dict[str, float]:
        engine = StubEngine()
        task = replace(
            CONFIG.task,
            roles={"a": RoleConfig(), "b": RoleConfig()},
            rewards=[RewardTerm("x", where="http", url="http://x")],
        )
        evaluation = replace(EVERY_TWO, prompts=5, samples=3)
        config = replace(CONFIG, evaluation=evaluation, task=task)
        controller, reports = make(tmp_path, engine, config, held_out=Repeats(), scorer=ByRole())
        await running(controller, train(controller, 2))
        asked = [r for r in engine.requests if r.rollout_id.startswith("eval-0.0")]
        assert len(asked) == 2 * 3, "each of the two items once, three answers"
        return evaluations(reports)[0]

    row = asyncio.run(scenario())
    assert row["eval/items"] == 2.0
    assert row["eval/pass_at_1"] == pytest.approx((1 / 3 + 1.0) / 2)
    assert row["eval/pass_at_2"] == pytest.approx((2 / 3 + 1.0) / 2)
    assert "eval/pass_at_4" not in row
    assert row["eval/majority"] == 0.5, "of the first item the wrong answer is more frequent"
    assert row["eval/role/a"] == pytest.approx(2.0 * row["eval/reward_mean"])
    assert row["eval/role/b"] == 0.5
