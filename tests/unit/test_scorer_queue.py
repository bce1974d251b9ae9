"""Slow, dead, lying and flooded scorers: every request is answered once, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from moerl.config.reward_terms import RewardTerm
from moerl.controller.scorer_queue import Answer, ScorerQueue
from moerl.controller.step_metrics import ScorerCounts
from moerl.controller.task_group import TaskGroup
from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import ScoreError, ScorerDown
from moerl.core.types import Prompt, Score
from tests.helpers.episode_views import view
from tests.helpers.fake_clock import run_with_fake_clock

PROMPT = Prompt(0, (1,), "p", None, {})
HTTP = RewardTerm("x", where="http", url="http://x")
Says = Callable[[Sequence[ScoreRequest]], Awaitable[Sequence[Answer]]]


@dataclass
class Bed:
    """A queue in front of a scripted scorer."""

    says: Says
    term: RewardTerm = HTTP
    messages: list[tuple[float, list[str]]] = field(default_factory=list)  # (seconds, keys)
    counts: ScorerCounts = field(default_factory=ScorerCounts)

    def open(self) -> ScorerQueue:
        self.tasks = TaskGroup()
        return ScorerQueue("x", self.term, 10.0, self._ask, self.counts, self.tasks)

    async def _ask(self, asked: Sequence[ScoreRequest]) -> Sequence[Answer]:
        now = asyncio.get_running_loop().time()
        self.messages.append((now, [one.key for one in asked]))
        return await self.says(asked)

    @property
    def asked(self) -> Counter[str]:
        return Counter(key for _, keys in self.messages for key in keys)


def request(number: int, group: str = "") -> ScoreRequest:
    return ScoreRequest(f"{number}.0", PROMPT, view("a"), group=group)


async def right(asked: Sequence[ScoreRequest]) -> list[Answer]:
    return [Score(float(one.key.partition(".")[0])) for one in asked]


def play(bed: Bed, work: Callable[[ScorerQueue], Awaitable[Any]], patch: pytest.MonkeyPatch) -> Any:
    async def body() -> Any:
        queue = bed.open()
        try:
            return await work(queue)
        finally:
            await bed.tasks.stop()

    return run_with_fake_clock(body(), patch)


async def rewards(queue: ScorerQueue, count: int) -> list[float]:
    found = await asyncio.gather(*(queue.put(request(number)) for number in range(count)))
    return [one.reward if isinstance(one, Score) else float("nan") for (one,) in found]


def test_requests_of_one_tick_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(right, replace(HTTP, batch=4))
    assert play(bed, lambda queue: rewards(queue, 10), monkeypatch) == list(map(float, range(10)))
    assert [len(keys) for _, keys in bed.messages] == [4, 4, 2]
    assert (bed.counts.asked, bed.counts.messages, bed.counts.repeated) == (10, 3, 0)


def test_a_group_is_never_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(right, replace(HTTP, batch=4))

    async def work(queue: ScorerQueue) -> list[list[Answer]]:
        groups = [[request(10 * g + s, str(g)) for s in range(3)] for g in range(3)]
        return await asyncio.gather(*(queue.put(*group) for group in groups))

    found = play(bed, work, monkeypatch)
    assert [[one.reward for one in group] for group in found][2] == [20.0, 21.0, 22.0]
    assert [len(keys) for _, keys in bed.messages] == [3, 3, 3]


def test_what_a_dead_scorer_did_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead for 100 s: few messages meanwhile, one request each, and no answer is lost."""

    async def dies(asked: Sequence[ScoreRequest]) -> list[Answer]:
        if asyncio.get_running_loop().time() < 100.0:
            raise ScorerDown("it died")
        return await right(asked)

    bed = Bed(dies, replace(HTTP, batch=4))
    assert play(bed, lambda queue: rewards(queue, 20), monkeypatch) == list(map(float, range(20)))
    dead = [keys for when, keys in bed.messages if when < 100.0]
    assert len(dead) < 16, "pauses grow"
    assert all(len(keys) == 1 for keys in dead[-4:]), "by a single request"
    assert bed.counts.unscored == 0


def test_a_stopped_scorer_costs_its_deadline_and_no_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stops(asked: Sequence[ScoreRequest]) -> list[Answer]:
        if asyncio.get_running_loop().time() < 300.0:
            await asyncio.Event().wait()
        return await right(asked)

    bed = Bed(stops)
    assert play(bed, lambda queue: rewards(queue, 5), monkeypatch) == list(map(float, range(5)))
    assert bed.counts.repeated >= 5


def test_a_request_that_kills_its_scorer_is_given_up_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def poisoned(asked: Sequence[ScoreRequest]) -> list[Answer]:
        if any(one.key == "3.0" for one in asked):
            raise ScorerDown("status 500")
        return await right(asked)

    bed = Bed(poisoned, replace(HTTP, batch=4))
    found = play(bed, lambda queue: rewards(queue, 12), monkeypatch)
    assert [reward for number, reward in enumerate(found) if number != 3] == [
        float(number) for number in range(12) if number != 3
    ]
    assert found[3] != found[3], "it has no score"
    assert bed.asked["3.0"] <= 1 + HTTP.retries + 1
    assert bed.counts.unscored == 1


def test_a_scorer_that_is_down_for_good_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dead(asked: Sequence[ScoreRequest]) -> list[Answer]:
        raise ScorerDown("connection refused")

    async def work(queue: ScorerQueue) -> tuple[list[Any], float]:
        found = await asyncio.gather(*(queue.put(request(number)) for number in range(3)))
        return [one for (one,) in found], asyncio.get_running_loop().time()

    bed = Bed(dead, replace(HTTP, down_s=200.0))
    found, seconds = play(bed, work, monkeypatch)
    assert 200.0 <= seconds < 260.0
    assert all(isinstance(one, ScoreError) for one in found)
    assert "scorer x, prompt 0: connection refused" in str(found[0])


@pytest.mark.parametrize(("where", "tries"), [("http", 3), ("judge", 3), ("function", 1)])
def test_a_lie_is_asked_again_and_a_function_is_not(
    monkeypatch: pytest.MonkeyPatch, where: Any, tries: int
) -> None:
    async def lies(asked: Sequence[ScoreRequest]) -> list[Answer]:
        bad = {"0.0": ScoreError("gave nan")}
        return [bad.get(one.key) or Score(1.0) for one in asked]

    bed = Bed(lies, RewardTerm("x", where=where))
    found = play(bed, lambda queue: rewards(queue, 3), monkeypatch)
    assert found[1:] == [1.0, 1.0]
    assert found[0] != found[0]
    assert bed.asked == {"0.0": tries, "1.0": 1, "2.0": 1}


def test_too_few_and_too_many_answers_count_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def surplus(count: int) -> Says:
        left = [count]

        async def says(asked: Sequence[ScoreRequest]) -> list[Answer]:
            extra, left[0] = left[0], 0
            return [*await right(asked), *[Score(9.0)] * extra][: len(asked) + extra]

        return says

    for count in (-1, 3):
        bed = Bed(surplus(count))
        assert play(bed, lambda queue: rewards(queue, 4), monkeypatch) == [0.0, 1.0, 2.0, 3.0]
        assert bed.counts.repeated == 4


def test_a_rate_and_a_pause_that_the_scorer_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(right, replace(HTTP, batch=1, per_second=2.0))
    play(bed, lambda queue: rewards(queue, 5), monkeypatch)
    times = [when for when, _ in bed.messages]
    assert [round(b - a, 3) for a, b in pairwise(times)] == [0.5] * 4

    async def busy(asked: Sequence[ScoreRequest]) -> list[Answer]:
        if len(again.messages) == 1:
            raise ScorerDown("is busy", 7.0)
        return await right(asked)

    again = Bed(busy)
    assert play(again, lambda queue: rewards(queue, 3), monkeypatch) == [0.0, 1.0, 2.0]
    assert again.messages[1][0] - again.messages[0][0] == pytest.approx(7.0)


def test_messages_at_once_are_bounded_and_requests_can_be_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once: list[int] = [0]

    async def slow(asked: Sequence[ScoreRequest]) -> list[Answer]:
        at_once.append(at_once[-1] + 1)
        await asyncio.sleep(5)
        at_once.append(at_once[-1] - 1)
        return await right(asked)

    bed = Bed(slow, replace(HTTP, batch=1, in_flight=3, queue=4))

    async def work(queue: ScorerQueue) -> list[bool]:
        futures = [queue.put(request(number)) for number in range(10)]
        full = [queue.is_full]
        await asyncio.sleep(1)  # three are under way
        for future in futures[3:8]:
            future.cancel()
        await asyncio.sleep(0)
        full.append(queue.is_full)
        await asyncio.gather(*futures, return_exceptions=True)
        return full

    assert play(bed, work, monkeypatch) == [True, False]
    assert max(at_once) == 3
    assert set(bed.asked) == {"0.0", "1.0", "2.0", "8.0", "9.0"}
