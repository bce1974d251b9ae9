"""Scorers in Ray actors with resources of their own: a user's object, or a judge with its engine.

The actors belong to the scorer's process and end with it.  A dead or silent actor is ended and
replaced; its requests may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from moerl.config.reward_terms import RewardTerm
from moerl.config.task_mixture import TaskEntry
from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import EngineError, ScoreError, ScorerDown
from moerl.core.messages import Scorer
from moerl.core.types import Score
from moerl.launch.run_context import RunContext
from moerl.launch.supervision.engine_judge import EngineJudge
from moerl.launch.supervision.ray_proxy import ActorServer, log_to, own_errors
from moerl.scoring.scorers import DirectScorer

log = logging.getLogger(__name__)
_START_S = 600.0  # seconds for an actor to load its model
_CALLS = 1000  # of an actor at once

Place = Callable[[int], ActorHandle[Any]]


class RewardActor(ActorServer):
    """A scorer in its own process."""

    def __init__(self, context: RunContext, task: TaskEntry, term: RewardTerm, number: int) -> None:
        name = "-".join(filter(None, ("scorer", task.label, term.name, str(number))))
        log_to(context.run.logs / f"{name}.log")
        scorer: Scorer
        if term.where == "judge":
            scorer = EngineJudge(term, context.token, context.run.logs / f"{name}.engine.log")
        else:
            scorer = DirectScorer(task, term)
        super().__init__(scorer)


@dataclass(slots=True, eq=False)
class _Member:
    number: int
    actor: ActorHandle[Any]
    messages: int = 0  # that it has not answered
    asked: int = 0  # messages
    ready: asyncio.Task[None] | None = field(default=None, repr=False)


class ActorPool:
    """The `Scorer` protocol over equal actors.  Use it from one event loop."""

    def __init__(self, place: Place, count: int, timeout_s: float) -> None:
        """Start the actors.  place: starts actor number n.  timeout_s: of a request."""
        self._place, self._timeout_s = place, timeout_s
        self._members = [_Member(number, place(number)) for number in range(count)]

    async def score(self, asked: Sequence[ScoreRequest]) -> Sequence[Score | ScoreError]:
        """Answers, in order.  Raises ScorerDown."""
        member = min(self._members, key=lambda one: (one.messages, one.asked))
        member.messages += 1
        member.asked += 1
        limit_s = self._timeout_s * len(asked)
        try:
            with own_errors(f"actor {member.number}"):
                await self._started(member)
                async with asyncio.timeout(limit_s):
                    found: Any = await member.actor.ask.remote("score", list(asked))
            return list(found)
        except TimeoutError as error:
            self._replace(member)
            late = f"actor {member.number} did not answer within {limit_s:g} s"
            raise ScorerDown(late) from error
        except EngineError as error:
            member.ready = None
            raise ScorerDown(str(error)) from error
        finally:
            member.messages -= 1

    async def _started(self, member: _Member) -> None:
        """Wait until the actor has loaded its scorers."""
        if member.ready is None:
            member.ready = asyncio.get_running_loop().create_task(_answers(member.actor))
        async with asyncio.timeout(_START_S):
            await asyncio.shield(member.ready)

    def _replace(self, member: _Member) -> None:
        """End an actor that hangs, unless another call has done so."""
        if member not in self._members:
            return
        log.warning("actor %d does not answer: it is replaced", member.number)
        with contextlib.suppress(RayError):
            ray.kill(member.actor)
        other = _Member(member.number, self._place(member.number))
        self._members[self._members.index(member)] = other


async def _answers(actor: ActorHandle[Any]) -> None:
    await actor.pid.remote()


def actor_scorer(context: RunContext, task: TaskEntry, term: RewardTerm) -> ActorPool:
    """The actors of a term."""
    place = partial(_place, context.without_tokenizer(), task, term)
    return ActorPool(place, term.workers, task.timeout_of(term))


def _place(
    context: RunContext, task: TaskEntry, term: RewardTerm, number: int
) -> ActorHandle[RewardActor]:
    actor: Any = ray.remote(RewardActor)
    options = {"num_cpus": term.cpus, "num_gpus": term.gpus, "max_restarts": -1}
    placed: ActorHandle[RewardActor] = actor.options(**options, max_concurrency=_CALLS).remote(
        context, task, term, number
    )
    return placed
