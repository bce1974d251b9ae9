"""Agents of the oracle's runs, in this process and on the loop of the controller.

Users write `Answering` (a class with reset, step, close) and `program` (a client of the gateway).
What follows below `agents_of` belongs to the machinery that plays them, and changes with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import pytest

from moerl.agents.agent_loop import AgentRunner
from moerl.agents.environments.environment_episodes import EnvironmentEpisodes, EpisodeFailed
from moerl.agents.environments.episode_environment import (
    EpisodeEnd,
    Observation,
    PolicyAnswer,
    StartFields,
)
from moerl.agents.episode_types import PlainAnswers, Policy
from moerl.agents.programs import agent_programs
from moerl.agents.programs.agent_process import ProgramEnd
from moerl.agents.prompt_tokens import PromptTokens
from moerl.agents.stop_texts import StopFinder
from moerl.config.schema import Config, TaskConfig
from moerl.config.task_mixture import by_label
from moerl.core.ids import without_life
from moerl.sandbox.isolation import Isolation
from tests.helpers.chat_tokenizer import chat_tokenizer
from tests.helpers.oracle_engine import delay_s, draw

T = TypeVar("T")
ENVIRONMENT, PROGRAM = "package:Answering", "program"  # in settings
_GONE_S = 0.0091  # after which an impatient client hangs up
_HANDLERS_S = 0.0517  # then the gateway has handled that


class Answering:
    """An environment of 1 to 4 turns with a reward for each."""

    async def reset(self, start: StartFields) -> Observation:
        self.name, self.turns = without_life(start.episode), 0
        await asyncio.sleep(delay_s(0.001, 0.009, self.name))
        return Observation(start.messages)

    async def step(self, answer: PolicyAnswer) -> Observation | EpisodeEnd:
        self.turns += 1
        key = self.name, self.turns, answer.text
        await asyncio.sleep(delay_s(0.002, 0.02, key))
        reward = draw(key, "reward") % 5 / 4
        if self.turns > draw(self.name, "turns") % 4:
            return EpisodeEnd(reward)
        said = f"again {draw(key) % 1000}"
        return Observation([{"role": "user", "content": said}], reward=reward)

    async def close(self) -> None: ...


async def program(asks: Asks, given: Mapping[str, Any]) -> float | None:
    """One to three turns; some programs begin anew, or leave a request.  Returns the reward."""
    name = without_life(given["episode"])
    messages = list(given["messages"])
    texts = []
    for turn in range(1 + draw(name, "turns") % 3):
        await asyncio.sleep(delay_s(0.001, 0.015, name, turn))
        if draw(name, turn, "leaves") % 4 == 0:
            await asks.hang_up(messages)
        answer = await asks.chat(messages)
        texts.append(answer["content"])
        messages += [answer, {"role": "user", "content": f"and {draw(name, turn) % 100}"}]
        if draw(name, turn, "branch") % 3 == 0:
            messages = messages[:1] if draw(name, turn, "anew") % 2 else messages[:-3]
            messages += [{"role": "user", "content": f"other {turn}"}]
    await asyncio.sleep(delay_s(0.001, 0.015, name))  # else answers that come together end together
    return draw(name, texts) % 5 / 4


@dataclass
class Asks:
    """A client of OpenAI's interface."""

    session: aiohttp.ClientSession
    url: str
    key: str

    async def chat(self, messages: list[Any]) -> dict[str, Any]:
        body = {"model": "m", "messages": messages}
        headers = {"Authorization": f"Bearer {self.key}"}
        async with self.session.post(
            f"{self.url}/chat/completions", json=body, headers=headers
        ) as reply:
            reply.raise_for_status()
            message: dict[str, Any] = (await reply.json())["choices"][0]["message"]
            return message

    async def hang_up(self, messages: list[Any]) -> None:
        """Ask, and leave before the answer comes."""
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(_GONE_S):
                await self.chat(messages)
        await asyncio.sleep(_HANDLERS_S)


@dataclass(frozen=True)
class Faults:
    """Of agents, by episode without life and try."""

    lost: frozenset[str] = frozenset()  # its worker dies at its first turn, once
    fails: frozenset[str] = frozenset()  # it raises, or exits with code 1


# --- what plays them ------------------------------------------------------------------------------
@dataclass
class Kills:
    """Programs and environments that run, by episode; each ends when its event is set."""

    programs: dict[str, asyncio.Event] = field(default_factory=dict)
    environments: dict[str, asyncio.Event] = field(default_factory=dict)


def agents_of(
    config: Config,
    faults: Faults,
    folder: Path,
    patch: pytest.MonkeyPatch,
    kills: Kills | None = None,
) -> dict[str, AgentRunner]:
    """By label of the task."""
    tokens, left, kills = PromptTokens(chat_tokenizer()), set(faults.lost), kills or Kills()
    policy = Policy(tokens, StopFinder(tokens), PlainAnswers(), 4000)
    patch.setattr(agent_programs, "run_program", _runs_here(faults, left, kills))
    return {
        label: EnvironmentEpisodes(entry, policy, EnvironmentsHere(faults, left, kills))
        if entry.environment
        else agent_programs.AgentPrograms(entry, policy, folder / f"agents-{label}.log")
        for label, entry in by_label(config).items()
        if entry.kind.uses_chat
    }


@dataclass
class EnvironmentsHere:
    """The pool of environments without its processes."""

    faults: Faults
    left: set[str]  # episodes whose worker is still to die
    kills: Kills

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def open(self, name: str) -> EnvironmentHere:
        killed = self.kills.environments[name] = asyncio.Event()
        return EnvironmentHere(without_life(name), self, name, killed)


@dataclass
class EnvironmentHere:
    name: str
    pool: EnvironmentsHere
    episode: str
    killed: asyncio.Event  # set: its worker is dead
    environment: Answering = field(default_factory=Answering)

    @property
    def counts(self) -> Mapping[str, float]:
        return {"environment/steps": float(self.environment.turns)}

    async def reset(self, start: StartFields) -> Observation:
        return await self._alive(self.environment.reset(start))

    async def step(self, answer: PolicyAnswer) -> Observation | EpisodeEnd:
        if self.name in self.pool.left:
            self.pool.left.remove(self.name)
            raise EpisodeFailed("lost", "has an environment whose worker died")
        if self.name in self.pool.faults.fails:
            raise EpisodeFailed("environment", "has an environment that raised")
        return await self._alive(self.environment.step(answer))

    async def _alive(self, work: Coroutine[Any, Any, T]) -> T:
        """The answer of a worker.  Raises EpisodeFailed when it is killed before it answers."""
        working = asyncio.ensure_future(work)
        if not await _comes_first(working, self.killed):
            raise EpisodeFailed("lost", "has an environment whose worker was killed")
        return working.result()

    async def close(self) -> None:
        await self.environment.close()
        del self.pool.kills.environments[self.episode]


async def _comes_first(working: asyncio.Future[Any], other: asyncio.Event) -> bool:
    """Whether work is done before an event is set; else it is cancelled."""
    waiting = asyncio.ensure_future(other.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return not waiting.done()
    finally:
        waiting.cancel()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def _runs_here(faults: Faults, left: set[str], kills: Kills) -> Callable[..., Any]:
    """`run_program` without a process."""

    async def run_program(
        task: TaskConfig,
        isolation: Isolation,
        variables: Mapping[str, str],
        text: bytes,
        end: asyncio.Event,
    ) -> ProgramEnd:
        given = msgspec.json.decode(text)
        name = without_life(given["episode"])
        killed = kills.programs[given["episode"]] = asyncio.Event()
        try:
            async with aiohttp.ClientSession() as session:
                asks = Asks(session, variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"])
                playing = asyncio.ensure_future(program(asks, given))
                living = asyncio.ensure_future(_comes_first(playing, end))
                if not await _comes_first(living, killed):
                    return ProgramEnd(-9, b"", b"", "exit")
        finally:
            del kills.programs[given["episode"]]
        if not living.result():
            return ProgramEnd(-1, b"", b"", "ended")
        if name in left:
            left.remove(name)
            return ProgramEnd(-1, b"", b"died", "lost")
        code = int(name in faults.fails)
        line = {"reward": playing.result(), "secret": given["secret"]}
        return ProgramEnd(code, msgspec.json.encode(line), b"", "exit")

    return run_program


def on_one_loop(patch: pytest.MonkeyPatch) -> None:
    """Loops for other threads are the running one, so that its clock is theirs."""
    loop = asyncio.get_running_loop()

    class SameLoop:
        def __getattr__(self, name: str) -> Any:
            return getattr(loop, name)

        def run_forever(self) -> None: ...

        def stop(self) -> None: ...

        def close(self) -> None: ...

    patch.setattr(asyncio, "new_event_loop", SameLoop)
