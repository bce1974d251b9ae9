"""Plays episodes with an environment object: turns of the policy, and its answers.

Turns are requested as by a client of the gateway, without HTTP, so they are recorded in the same
way.  The environment returns the next messages; the policy's answers stay in the conversation
unchanged, so each turn continues the turn before.

An episode whose turns, tokens or context are used up ends there, with the rewards so far.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from moerl.agents.agent_loop import AgentRunner, EpisodeTable
from moerl.agents.chat_messages import ChatMessage, Json, first_messages
from moerl.agents.chat_turns import ChatTurns
from moerl.agents.cross_loop_episode import CrossLoopEpisode
from moerl.agents.environments.episode_environment import (
    AnswerCall,
    EpisodeEnd,
    Observation,
    PolicyAnswer,
    StartFields,
)
from moerl.agents.episode_types import Ends, Policy, TurnAnswer
from moerl.agents.gateway.api_errors import ApiError
from moerl.config.reward_terms import RoleConfig
from moerl.config.schema import TaskConfig
from moerl.core.types import Prompt, Score, base_role, reward_problem
from moerl.episodes.finished_episode import ENDED
from moerl.episodes.open_episode import Outcome

log = logging.getLogger(__name__)

T = TypeVar("T")
_AGAIN, _TRIES = ("engine_unavailable", "record_refused"), 3  # as often as OpenAI's client asks
_LIMITS = ("context_length_exceeded", "turn_limit_exceeded", "token_limit_exceeded")


class EpisodeFailed(Exception):
    """Why an episode cannot be trained: a word, and the rest of "the agent of EPISODE ..."."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)


class OpenEnvironment(Protocol):
    """The environment of one episode; each method raises EpisodeFailed."""

    @property
    def counts(self) -> Mapping[str, float]:
        """Events of the episode, for metrics `agent/...`."""
        ...

    async def reset(self, start: StartFields) -> Observation: ...

    async def step(self, answer: PolicyAnswer) -> Observation | EpisodeEnd: ...

    async def close(self) -> None:
        """Never raises, and returns soon."""
        ...


class Environments(Protocol):
    """Where environments are opened (`moerl.agents.environments.environment_pool`)."""

    async def start(self) -> None: ...

    async def open(self, name: str) -> OpenEnvironment:
        """Raises EpisodeFailed."""
        ...

    async def close(self) -> None: ...


class EnvironmentEpisodes(AgentRunner):
    """An `EpisodeRunner`."""

    def __init__(self, task: TaskConfig, policy: Policy, environments: Environments) -> None:
        super().__init__(_EnvironmentTable(task, policy, environments))


@dataclass(slots=True, eq=False)
class _Talk:
    """The conversations so far, and the rewards."""

    roles: Mapping[str, RoleConfig]  # of the task
    role: str = ""  # that has the next turn
    conversations: dict[str, list[ChatMessage]] = field(default_factory=dict)  # by role
    tools: Sequence[Json] = ()
    own: dict[str, float] = field(default_factory=dict)  # rewards of roles
    reward: float = 0.0
    is_rewarded: bool = False  # the environment has given a reward, which may be 0

    def hear(self, observation: Observation) -> None:
        """Raises EpisodeFailed."""
        self.role = observation.role
        if self.role and base_role(self.role) not in self.roles:
            known = ", ".join(self.roles) or "(none)"
            detail = (
                f"has an environment that asks the role {self.role[:80]!r}; task.roles has {known}"
            )
            raise EpisodeFailed("environment", detail)
        self.messages.extend(_messages(observation.messages))
        if observation.tools is not None:
            self.tools = list(observation.tools)
        self.add(observation.reward)
        self.is_rewarded |= bool(observation.reward)

    @property
    def messages(self) -> list[ChatMessage]:
        return self.conversations.setdefault(self.role, [])

    def end(self, last: EpisodeEnd) -> None:
        """Raises EpisodeFailed."""
        self.is_rewarded |= last.reward is not None or bool(last.roles)
        self.add(last.reward or 0.0)
        for reward in last.roles.values():
            _check_reward(reward, reward)
        self.own = dict(last.roles)

    def add(self, reward: float) -> None:
        _check_reward(reward, self.reward + reward)
        self.reward += reward


class _EnvironmentTable(EpisodeTable):
    def __init__(self, task: TaskConfig, policy: Policy, environments: Environments) -> None:
        super().__init__()
        self._task, self._environments = task, environments
        self._policy, self._limits = policy, policy.limits(task)

    async def start(self) -> None:
        await self._environments.start()

    async def stop(self) -> None:
        await self._environments.close()

    async def play_one(self, episode: CrossLoopEpisode, end: asyncio.Event) -> Outcome:
        name, talk = episode.name, _Talk(self._task.roles)
        turns = ChatTurns(episode, self._policy, self._limits)
        counts: dict[str, float] = {}
        failure = "", ""
        try:
            start = self._start(name, episode.spec.prompt, held_out=episode.spec.held_out)
            await _until(end, self._limits.wall_s, self._converse(turns, start, talk, counts))
        except EpisodeFailed as error:
            failure = error.reason, error.detail
        except TimeoutError:
            failure = "timeout", f"took longer than task.wall_s = {self._limits.wall_s:g}"
        except Exception as error:  # an error of one episode does not end the run
            log.exception("the episode %s failed", name)
            failure = "error", f"failed: {error!r}"
        finally:
            await turns.end()
        if not failure[0]:
            failure = self._missing(talk, has_turns=bool(turns.forest.turns))
        own = Score(talk.reward, roles=talk.own) if self._task.brings_reward else None
        return turns.outcome(failure, own, counts)

    async def _converse(
        self, turns: ChatTurns, start: StartFields, talk: _Talk, counts: dict[str, float]
    ) -> None:
        """Raises EpisodeFailed."""
        environment = await self._environments.open(turns.name)
        try:
            seen: Observation | EpisodeEnd = await environment.reset(start)
            while isinstance(seen, Observation):
                talk.hear(seen)
                answer = await _turn(turns, talk)
                if answer is None:
                    counts["limits_reached"] = 1.0
                    talk.is_rewarded = True  # a reward at the end only is 0 here
                    return
                seen = await environment.step(answer)
            talk.end(seen)
        finally:
            await environment.close()
            counts |= environment.counts

    def _start(self, name: str, prompt: Prompt, *, held_out: bool) -> StartFields:
        """The right answer only where the environment gives the reward."""
        messages, extra = first_messages(prompt)
        answer = prompt.answer if self._task.brings_reward else None
        return StartFields(name, prompt.text, messages, answer, extra, held_out)

    def _missing(self, talk: _Talk, *, has_turns: bool) -> tuple[str, str]:
        if not has_turns:
            return "no_turn", "has an environment that ended before the first turn"
        if self._task.brings_reward and not talk.is_rewarded:
            return "no_reward", "has an environment that gave no reward"
        return "", ""


async def _turn(turns: ChatTurns, talk: _Talk) -> PolicyAnswer | None:
    """The policy's next turn, which is added to the conversation; None: a limit is reached."""
    for left in range(_TRIES)[::-1]:
        try:
            (answer,) = await turns.chat(talk.messages, talk.tools, Ends(), role=talk.role)
            talk.messages.append(ChatMessage("assistant", answer.text, list(answer.calls)))
            return _answer(answer)
        except ApiError as error:
            if error.code in _LIMITS:
                return None
            if error.code == "episode_ended":  # its seconds are used up
                raise TimeoutError from error
            if error.code not in _AGAIN or not left:
                raise EpisodeFailed(error.code, f"could not be sampled: {error.message}") from error
    raise AssertionError("the last try returns or raises")


def _answer(answer: TurnAnswer) -> PolicyAnswer:
    calls = tuple(
        AnswerCall(call.id, call.function.name, str(call.function.arguments))
        for call in answer.calls
    )
    return PolicyAnswer(answer.text, calls, answer.reasoning, answer.finish_reason)


def _check_reward(reward: float, total: float) -> None:
    if problem := reward_problem(reward) or reward_problem(total):
        detail = f"has an environment whose reward of {reward} {problem}"
        raise EpisodeFailed("no_reward", detail)


def _messages(given: Sequence[Json]) -> list[ChatMessage]:
    try:
        return msgspec.convert(list(given), list[ChatMessage])
    except msgspec.ValidationError as error:
        problem = f"has an environment whose messages cannot be used: {error}"
        raise EpisodeFailed("environment", problem) from error


async def _until(end: asyncio.Event, wall_s: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`.  Raises EpisodeFailed when `end` is set, TimeoutError."""
    running, ending = asyncio.ensure_future(work), asyncio.ensure_future(end.wait())
    try:
        await asyncio.wait({running, ending}, timeout=wall_s, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        if ending.done():
            raise EpisodeFailed(ENDED, "was ended")
        raise TimeoutError
    finally:
        ending.cancel()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
