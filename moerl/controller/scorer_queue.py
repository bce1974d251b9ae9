"""The requests to one scorer: batches, repeats under the same key, a rate, and pauses.

A scorer that is slow, dead, or answers nonsense harms no rollout: its open requests are repeated.
After `_BREAK` messages in a row without an answer it gets a single request now and then, until it
answers.  A request fails when others were answered and it was not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from moerl.config.reward_terms import RewardTerm
from moerl.controller.step_metrics import ScorerCounts
from moerl.controller.task_group import TaskGroup
from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import ScoreError, ScorerDown
from moerl.core.types import Score

Answer = Score | ScoreError
Ask = Callable[[Sequence[ScoreRequest]], Awaitable[Sequence[Answer]]]

_START_S = 120.0  # seconds for a restart of the scorer, besides the time of the requests
_BREAK = 3  # messages in a row without an answer, after which pauses begin
_PAUSE_S = 1.0, 30.0  # the first pause, which doubles, and the longest


@dataclass(slots=True, eq=False)
class _Waiting:
    """Requests that travel in one message."""

    asked: tuple[ScoreRequest, ...]
    done: asyncio.Future[list[Answer]]
    since: float  # seconds of the event loop
    tries: int = 0
    answered: int = 0  # messages that the scorer had answered when it failed first


class ScorerQueue:
    """Used by one event loop."""

    def __init__(
        self,
        name: str,
        term: RewardTerm,
        timeout_s: float,
        ask: Ask,
        counts: ScorerCounts,
        tasks: TaskGroup,
    ) -> None:
        """Start without requests.  ask: sends a message; may raise ScorerDown."""
        self._name, self._term, self._timeout_s, self._ask = name, term, timeout_s, ask
        self._counts, self._tasks = counts, tasks
        self._waiting: dict[asyncio.Future[list[Answer]], _Waiting] = {}  # oldest first
        self._messages = 0  # that are not answered
        self._failed = 0  # messages in a row
        self._answered = 0  # messages
        self._next_at = self._heard_at = asyncio.get_running_loop().time()
        self._flushing: asyncio.Handle | None = None

    @property
    def is_full(self) -> bool:
        """Whether no further episode should start."""
        return sum(len(one.asked) for one in self._waiting.values()) >= self._term.queue

    def put(self, *asked: ScoreRequest) -> asyncio.Future[list[Answer]]:
        """Ask, in one message.  Cancel the future to withdraw the requests."""
        loop = asyncio.get_running_loop()
        if not (self._waiting or self._messages):
            self._heard_at = loop.time()  # it had nothing to answer
        done: asyncio.Future[list[Answer]] = loop.create_future()
        self._waiting[done] = _Waiting(asked, done, loop.time())
        done.add_done_callback(lambda future: self._waiting.pop(future, None))
        self._counts.asked += len(asked)
        self._counts.waiting_max = max(self._counts.waiting_max, len(self._waiting))
        self._flush_at(0.0)
        return done

    def _flush_at(self, when: float) -> None:
        """Send the waiting requests later in this tick, as siblings end together."""
        if self._flushing is None:
            loop = asyncio.get_running_loop()
            if when > loop.time():
                self._flushing = loop.call_at(when, self._flush)
            else:
                self._flushing = loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = None
        now = asyncio.get_running_loop().time()
        most = 1 if self._failed >= _BREAK else self._term.in_flight
        while self._waiting and self._messages < most:
            if now < self._next_at:
                self._flush_at(self._next_at)
                return
            if self._term.per_second:
                self._next_at = now + 1.0 / self._term.per_second
            self._messages += 1
            self._tasks.spawn(self._send(self._take(now)))

    def _take(self, now: float) -> list[_Waiting]:
        """The next message.  A request that got no answer is sent alone: it may be the cause."""
        batch: list[_Waiting] = []
        for one in list(self._waiting.values()):
            size = sum(len(other.asked) for other in (*batch, one))
            alone = one.tries or self._failed >= _BREAK
            if batch and (alone or batch[0].tries or size > self._term.batch):
                break
            batch.append(self._waiting.pop(one.done))
            self._counts.wait_s += (now - one.since) * len(one.asked)
            if alone:
                break
        return batch

    async def _send(self, batch: Sequence[_Waiting]) -> None:
        requests = [request for one in batch for request in one.asked]
        begin = asyncio.get_running_loop().time()
        limit_s = self._timeout_s * len(requests) + _START_S
        try:
            async with asyncio.timeout(limit_s):
                found = await self._ask(requests)
            if len(found) != len(requests):
                raise ScorerDown(f"it gave {len(found)} answers to {len(requests)} requests")
        except TimeoutError:
            self._not_answered(batch, ScorerDown(f"it did not answer within {limit_s:g} s"))
        except ScorerDown as error:
            self._not_answered(batch, error)
        else:
            self._heard(batch, found)
        finally:
            self._messages -= 1
            self._counts.messages += 1
            self._counts.answer_s += asyncio.get_running_loop().time() - begin
            self._tasks.notify()
            self._flush_at(0.0)

    def _heard(self, batch: Sequence[_Waiting], found: Sequence[Answer]) -> None:
        self._failed, self._heard_at = 0, asyncio.get_running_loop().time()
        self._answered += 1
        answers = iter(found)
        for one in batch:
            mine = [next(answers) for _ in one.asked]
            errors = [answer for answer in mine if isinstance(answer, ScoreError)]
            if errors and self._repeats_errors and one.tries < self._term.retries:
                self._again(one)
            elif not one.done.done():
                self._counts.unscored += len(errors)
                scores = [answer for answer in mine if isinstance(answer, Score)]
                self._counts.cost += sum(score.metrics.get("cost", 0.0) for score in scores)
                one.done.set_result(mine)

    @property
    def _repeats_errors(self) -> bool:
        """A function that raised would raise again."""
        return self._term.where in ("http", "judge")

    def _not_answered(self, batch: Sequence[_Waiting], error: ScorerDown) -> None:
        now = asyncio.get_running_loop().time()
        if error.wait_s:  # it asks for a pause
            self._next_at = max(self._next_at, now + error.wait_s)
        else:
            self._failed += 1
        if (pauses := self._failed - _BREAK) >= 0:
            first, longest = _PAUSE_S
            self._next_at = max(self._next_at, now + min(longest, first * 2.0 ** min(pauses, 16)))
        is_down = now - self._heard_at >= self._term.down_s
        for one in batch:
            others = self._answered > one.answered and one.tries
            if is_down or (not error.wait_s and others and one.tries >= self._term.retries):
                self._give_up(one, error)
            else:
                self._again(one, counts=not error.wait_s)
        if is_down:
            for one in list(self._waiting.values()):
                self._give_up(one, error)

    def _again(self, one: _Waiting, *, counts: bool = True) -> None:
        if one.done.done():  # withdrawn
            return
        if counts:
            one.answered = one.answered if one.tries else self._answered
            one.tries += 1
        self._counts.repeated += len(one.asked)
        one.since = asyncio.get_running_loop().time()
        self._waiting[one.done] = one

    def _give_up(self, one: _Waiting, error: ScorerDown) -> None:
        if not one.done.done():
            self._counts.unscored += len(one.asked)
            name = one.asked[0].prompt.name
            refused = ScoreError(f"scorer {self._name}, {name}: {error}")
            one.done.set_result([refused] * len(one.asked))
