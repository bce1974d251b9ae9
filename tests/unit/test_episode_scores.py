"""Terms of a reward: by step, turn and episode, while their episode goes on; and their sum."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moerl.config.reward_terms import RewardTerm
from moerl.config.schema import Config
from moerl.controller.episode_scores import weighted
from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import ScoreError
from moerl.core.types import Score
from moerl.episodes.forks import step_ends
from tests.helpers.controllers import CONFIG, StubScorer, make, running, train
from tests.helpers.stub_engine import StubEngine

STEPS = RewardTerm("steps", where="http", url="http://x", unit="step", separator=" ")
WHOLE = RewardTerm("whole", where="http", url="http://x", weight=0.5)
GROUP = RewardTerm("best", where="http", url="http://x", unit="group")


class Watching(StubScorer):
    """Notes every request; its answer is the number of characters that were asked about."""

    def __init__(self, engine: StubEngine) -> None:
        super().__init__()
        self.engine, self.asked = engine, list[tuple[str, ScoreRequest]]()
        self.requests_then: dict[str, int] = {}  # requests of the engine when a key was asked
        self.blocks: Callable[[ScoreRequest], bool] = lambda request: False
        self.opened = asyncio.Event()
        self.at_once = self.most = 0

    async def score(
        self, task: str, term: str, asked: Sequence[ScoreRequest]
    ) -> list[Score | ScoreError]:
        self.asked += [(term, request) for request in asked]
        for request in asked:
            self.requests_then.setdefault(request.key, len(self.engine.requests))
        if any(map(self.blocks, asked)):
            await self.opened.wait()
        return [Score(float(size(request))) for request in asked]


def size(request: ScoreRequest) -> int:
    return len(request.episode.responses[-1]) - max(0, request.step_begin)


def config(*terms: RewardTerm, **rollout: Any) -> Config:
    task = replace(CONFIG.task, rewards=list(terms))
    return replace(CONFIG, task=task, rollout=replace(CONFIG.rollout, **rollout))


def played(tmp_path: Path, settings: Config, steps: int = 2) -> tuple[Watching, list, list]:
    async def body() -> tuple[Watching, list, list]:
        scorer = Watching(engine := StubEngine())
        controller, reports = make(tmp_path, engine, settings, scorer=scorer)
        plans = await running(controller, train(controller, steps))
        return scorer, [group for plan in plans for group in plan.groups], reports

    return asyncio.run(body())


def test_steps_are_asked_about_while_their_episode_goes_on(tmp_path: Path) -> None:
    """The text is `3 3 3 3`, a token a slice: a step is whole with the separator behind it."""
    scorer, groups, _ = played(tmp_path, config(STEPS, slice_tokens=1))
    steps = [request for _, request in scorer.asked if request.key.startswith("0.0.")]
    shown = [(one.step_begin, one.episode.responses[-1]) for one in steps]
    assert shown == [(0, "3 "), (2, "3 3 "), (4, "3 3 3 "), (6, "3 3 3 3")]
    first, last = (scorer.requests_then[steps[place].key] for place in (0, -1))
    assert first < last, "the engine was asked for further tokens meanwhile"
    score = groups[0].episodes[0].score
    assert score.reward == 2.0 + 2.0 + 2.0 + 1.0
    assert score.steps == ((1, 2.0), (2, 2.0), (3, 3.0))


@pytest.mark.parametrize("barrier", [False, True])
async def test_a_group_is_trained_with_its_last_score_and_others_do_not_wait(
    tmp_path: Path, barrier: bool
) -> None:
    """A step of group 1 stays without an answer; control: a step that waits for group 1."""
    term = replace(STEPS, batch=1)
    selection = "strict" if barrier else "oldest"
    settings = config(term, max_lag=8, buffer_depth=3, selection=selection)
    scorer = Watching(engine := StubEngine())
    scorer.blocks = lambda request: request.key.startswith("1.1.")
    controller, _ = make(tmp_path, engine, settings, scorer=scorer)

    async def work() -> set[int]:
        training = asyncio.create_task(train(controller, 2))
        await asyncio.wait([training], timeout=2.0 if barrier else 30.0)
        waited = not training.done()
        scorer.opened.set()
        plans = await training
        assert waited == barrier
        return {group.group_id for plan in plans for group in plan.groups}

    trained = await running(controller, work(), 60)
    assert len(trained) == 4
    assert (1 in trained) == barrier
    assert {0, 2} <= trained


def test_the_sum_of_terms_and_a_metric_of_each(tmp_path: Path) -> None:
    scorer, groups, reports = played(tmp_path, config(WHOLE, GROUP, replace(STEPS, unit="turn")))
    for group in groups:
        for episode in group.episodes:
            length = len("3 3 3 3")
            assert episode.score.metrics == {"whole": length, "best": length, "steps": length}
            assert episode.score.reward == pytest.approx(length * 2.5)
            assert episode.score.steps == ((3, pytest.approx(length * 2.5)),)
    together = [request.group for term, request in scorer.asked if term == "best"]
    assert set(Counter(together).values()) == {CONFIG.rollout.group_size}, "a group at once"
    assert reports[-1].metrics["reward/whole"] == 7.0
    asked = sum(report.metrics.get("scorer/asked/whole", 0) for report in reports)
    assert asked >= 2 * 2 * CONFIG.rollout.group_size


def test_a_full_queue_keeps_groups_from_starting_and_loses_nothing(tmp_path: Path) -> None:
    async def groups_begun(queue: int) -> int:
        slow = replace(WHOLE, queue=queue, batch=1, in_flight=1)
        scorer = Watching(engine := StubEngine())
        scorer.blocks = lambda request: True
        settings = config(slow, buffer_depth=8, max_lag=8, max_groups_in_flight=1)
        controller, _ = make(tmp_path / str(queue), engine, settings, scorer=scorer)

        async def work() -> int:
            training = asyncio.create_task(train(controller, 2))
            await asyncio.sleep(0.5)
            begun = {request.rollout_id.split(".")[0] for request in engine.requests}
            scorer.opened.set()
            plans = await training
            assert len({g.group_id for plan in plans for g in plan.groups}) == 4
            return len(begun)

        return await running(controller, work())

    few, many = (asyncio.run(groups_begun(queue)) for queue in (3, 4096))
    assert few < many, "control: a long queue lets all groups start that the buffer allows"


async def test_answers_for_an_episode_that_is_gone_are_withdrawn(tmp_path: Path) -> None:
    """Of a group that is cancelled as too old, nothing stays in the queues."""
    settings = config(STEPS, slice_tokens=1)
    scorer = Watching(engine := StubEngine())
    controller, _ = make(tmp_path, engine, settings, scorer=scorer)
    await running(controller, train(controller, 4))
    scores = controller.context.scores
    assert len(scores._episodes) <= 8 * CONFIG.rollout.group_size, "those in flight"
    kept = {name.split(".")[0] for name in scores._episodes}
    assert not kept & {"0", "1", "2", "3"}, "trained groups are forgotten"


@pytest.mark.parametrize(
    ("begin", "is_over", "ends"),
    [
        (0, False, [3, 6]),
        (3, False, [6]),
        (3, True, [6, 7]),
        (7, True, []),
    ],
)
def test_steps_end_behind_their_separator(begin: int, is_over: bool, ends: list[int]) -> None:
    assert step_ends("a\n\nb\n\nc", begin, "\n\n", is_over=is_over) == ends
    assert step_ends("", 0, "\n\n", is_over=is_over) == ([0] if is_over else [])


def test_a_term_without_steps_counts_at_the_end_beside_one_with_steps() -> None:
    terms = [RewardTerm("a", weight=2.0), RewardTerm("b", weight=-1.0)]
    scores = [Score(3.0, ((1, 1.0), (4, 2.0))), Score(5.0, metrics={"len": 2.0}, reason="long")]
    found = weighted(terms, scores, 6)
    assert found.reward == 1.0
    assert found.steps == ((1, 2.0), (4, 4.0), (5, -5.0))
    assert sum(reward for _, reward in found.steps) == found.reward
    assert found.metrics == {"a": 3.0, "b": 5.0, "b.len": 2.0}
    assert found.reason == "b: long"
    assert weighted(terms, [Score(1.0), Score(1.0)], 6).steps == ()
