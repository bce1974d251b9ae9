"""Scores responses in a pool of worker processes, each response with a timeout.

A reward is user code: it may raise, hang, exit or return nonsense.  Each of these becomes a
`ScoreError` of that response alone; a hung or crashed worker is killed and replaced.  The caller
decides what a failed score means for the run.

Processes, because a hung thread cannot be ended and math-verify uses SIGALRM, which only the main
thread of a process may use (pebble runs tasks there).  Spawned, because the parent has event loops
and threads.  A worker whose parent was killed ends within a second, even during a reward.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence

from pebble import ProcessExpired, ProcessPool

from moerl.config.schema import TaskConfig
from moerl.data.environments import Environment, make_environment
from moerl.data.rewards import Reward, make_reward
from moerl.errors import ScoreError
from moerl.types import Episode, Prompt, Score

_reward: Reward | None = None  # set once in each worker by `_prepare`
_environment: Environment | None = None


class ProcessScorer:
    """The `Scorer` protocol over worker processes."""

    def __init__(self, task: TaskConfig, workers: int, timeout_s: float) -> None:
        """Raises ConfigError when the task's reward cannot be made.  Workers start on first use."""
        make_reward(task)
        make_environment(task)
        self._environment = task.environment
        self._name = task.reward or task.dataset or task.name
        self._timeout_s = timeout_s
        self._pool = ProcessPool(
            max_workers=workers,
            initializer=_prepare,
            initargs=(task, os.getpid()),
            context=multiprocessing.get_context("spawn"),
        )

    async def score(
        self, prompt: Prompt, episodes: Sequence[Episode], responses: Sequence[Sequence[str]]
    ) -> list[Score]:
        """Scores of all episodes, in order.  Raises the first ScoreError after all have ended."""
        results = await self.score_each(prompt, episodes, responses)
        for result in results:
            if isinstance(result, ScoreError):
                raise result
        return [result for result in results if isinstance(result, Score)]

    async def score_each(
        self, prompt: Prompt, episodes: Sequence[Episode], responses: Sequence[Sequence[str]]
    ) -> list[Score | ScoreError]:
        """A Score or an error for each episode."""
        assert len(episodes) == len(responses), (
            f"{len(episodes)} episodes, {len(responses)} of texts"
        )
        return await asyncio.gather(*(self._one(prompt, list(turns)) for turns in responses))

    async def reply(self, prompt: Prompt, responses: Sequence[str]) -> str:
        """Reply of task.environment, with the timeout of a reward.  Raises ScoreError."""
        future = self._pool.schedule(
            _reply, args=(prompt, list(responses)), timeout=self._timeout_s
        )
        failure: str | None = None
        try:
            answer, failure = await asyncio.wrap_future(future)
        except TimeoutError:
            failure = f"took longer than task.score_timeout_s = {self._timeout_s}"
        except ProcessExpired as error:
            failure = f"ended its process with exit code {error.exitcode}"
        if failure is not None:
            raise ScoreError(f"environment {self._environment} {failure} for prompt {prompt.index}")
        return answer

    def close(self) -> None:
        """End all workers, running rewards included."""
        self._pool.stop()
        self._pool.join()

    async def _one(self, prompt: Prompt, responses: list[str]) -> Score | ScoreError:
        future = self._pool.schedule(_evaluate, args=(prompt, responses), timeout=self._timeout_s)
        try:
            outcome = await asyncio.wrap_future(future)
        except TimeoutError:
            outcome = f"took longer than task.score_timeout_s = {self._timeout_s}"
        except ProcessExpired as error:
            outcome = f"ended its process with exit code {error.exitcode}"
        if isinstance(outcome, Score):
            outcome = _refusal(outcome, responses) or outcome
        if isinstance(outcome, str):
            return ScoreError(f"reward {self._name} {outcome} for prompt {prompt.index}")
        return outcome


def _prepare(task: TaskConfig, parent: int) -> None:
    global _reward, _environment
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _reward, _environment = make_reward(task), make_environment(task)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _refusal(score: Score, responses: Sequence[str]) -> str:
    """Why a score cannot be used; "" if it can."""
    length = len(responses[-1])
    if score.turns and len(score.turns) != len(responses):
        return f"has rewards for {len(score.turns)} of {len(responses)} turns"
    for number in (score.reward, *(value for _, value in score.text_steps), *score.turns):
        if not math.isfinite(number):
            return f"gave a non-finite reward ({number})"
    if not 0.0 <= score.errors < math.inf:
        return f"counted {score.errors} errors"
    ends = [end for end, _ in score.text_steps]
    if ends != sorted(ends) or any(not 0 <= end <= length for end in ends):
        return f"has steps that end at characters {ends} of {length}"
    return ""


def _evaluate(prompt: Prompt, responses: list[str]) -> Score | str:
    """The reward, or an error message: a user's exception may not survive pickling."""
    assert _reward is not None, "worker used before _prepare"
    try:
        return _reward(prompt, responses)
    except (Exception, SystemExit) as error:
        return f"raised {type(error).__name__}: {error}"


def _reply(prompt: Prompt, responses: list[str]) -> tuple[str, str | None]:
    """The environment's reply, and an error message or None."""
    assert _environment is not None, "worker used before _prepare, or without task.environment"
    try:
        answer = _environment(prompt, responses)
        if not isinstance(answer, str):
            return "", f"returned {type(answer).__name__}, want text (empty: the episode ends)"
        return answer, None
    except (Exception, SystemExit) as error:
        return "", f"raised {type(error).__name__}: {error}"
