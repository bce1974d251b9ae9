"""Plays episodes of `task.agent`: a gateway, and one external program per episode, or workers.

Both live on an event loop of their own, in a thread of the controller's process: rendering and
tokenising do not stop the controller's loop, although they share its interpreter.  Turns are
sampled through the controller's engines, on its loop.

    controller loop                     agent loop
    play --------------------------->   open episode, start program
    engines <--- turn requests ------   gateway <--- HTTP --- program
    PlayedEpisode <------------------   program ends, end episode
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from moerl.agents.agent_process import ProgramEnd, run_program
from moerl.agents.agent_workers import AgentWorkers
from moerl.agents.gateway import Endpoint, FinishedEpisode, Gateway
from moerl.agents.open_episode import EpisodeLimits, Policy
from moerl.agents.prompt_tokens import PromptTokens
from moerl.agents.stop_texts import StopFinder
from moerl.agents.tool_calls import AnswerParser
from moerl.config.schema import TaskConfig
from moerl.controller.agent_episodes import ENDED, PlayedEpisode, PlayedTurn, TurnEngine
from moerl.controller.pooled_turns import episode_of
from moerl.errors import RecordError
from moerl.types import (
    Array,
    GenerateRequest,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Segment,
)

T = TypeVar("T")
_LOG_BYTES = 16 << 20  # of the log of all programs; one older file is kept
_MOST_IN_ENVIRONMENT = 100_000  # bytes; Linux takes 128 KiB in one variable
_SHOWN = 300  # characters of a program's last words in an error


@dataclass(frozen=True, slots=True, eq=False)
class PolicySettings:
    """What a policy needs besides its engine.  context_tokens: the longest sequence."""

    tokens: PromptTokens
    parser: AnswerParser
    sampling: SamplingParams
    context_tokens: int
    audit: bool
    logprobs: Callable[[Rollout], Array] | None = None  # of a turn, for clients that want them


class AgentPrograms:
    """The `EpisodeRunner` protocol; used from the controller's event loop."""

    def __init__(self, task: TaskConfig, settings: PolicySettings, log_file: Path) -> None:
        self._task, self._settings, self._log_file = task, settings, log_file
        self._there: _AgentLoop | None = None

    async def start(self, engine: TurnEngine) -> None:
        here = _EngineFar(engine, asyncio.get_running_loop())
        table = _EpisodeTable(self._task, self._settings, here, self._log_file)
        self._there = _AgentLoop(table)
        await self._there.run(table.start())

    async def play(self, name: str, prompt: Prompt) -> PlayedEpisode:
        assert self._there is not None, "start comes first"
        return await self._there.run(self._there.table.play(name, prompt))

    def end(self, name: str) -> None:
        assert self._there is not None, "start comes first"
        self._there.loop.call_soon_threadsafe(self._there.table.end, name)

    async def close(self) -> None:
        there, self._there = self._there, None
        if there is not None:
            await there.run(there.table.close())
            await there.stop()


class _AgentLoop:
    """The thread of gateway and programs."""

    def __init__(self, table: _EpisodeTable) -> None:
        self.table, self.loop = table, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="agents", daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        await asyncio.to_thread(self._thread.join)
        self.loop.close()


@dataclass(slots=True)
class _Clock:
    """Seconds in which at least one turn of an episode was with the engines."""

    seconds: float = 0.0
    running: int = 0
    since: float = 0.0

    def begin(self, now: float) -> None:
        if not self.running:
            self.since = now
        self.running += 1

    def stop(self, now: float) -> None:
        self.running -= 1
        if not self.running:
            self.seconds += now - self.since


@dataclass(slots=True, eq=False)
class _EngineFar:
    """Engines that are used from another event loop."""

    engine: TurnEngine
    loop: asyncio.AbstractEventLoop
    clocks: dict[str, _Clock] = field(default_factory=dict)  # by episode

    async def generate(
        self, requests: Sequence[GenerateRequest]
    ) -> Sequence[Segment | RecordError]:
        now = asyncio.get_running_loop().time
        clock = self.clocks.setdefault(episode_of(requests[0].rollout_id), _Clock())
        clock.begin(now())
        try:
            return await self._there(self.engine.generate(requests))
        finally:
            clock.stop(now())

    async def abort(self, names: Sequence[str]) -> None:
        await self._there(self.engine.abort(names))

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))


class _EpisodeTable:
    """Gateway and running programs; used from the agent loop."""

    def __init__(
        self, task: TaskConfig, settings: PolicySettings, engine: _EngineFar, log_file: Path
    ) -> None:
        tokens, agent = settings.tokens, task.agent
        self._task, self._engine, self._log = task, engine, _program_log(log_file)
        policy = Policy(
            engine=engine,
            tokens=tokens,
            finder=StopFinder(tokens),
            parser=settings.parser,
            sampling=settings.sampling,
            audit=settings.audit,
            logprobs=settings.logprobs,
        )
        self._gateway = Gateway(policy, Endpoint())
        self._limits = EpisodeLimits(
            context_tokens=settings.context_tokens,
            turns=agent.max_turns,
            sampled_tokens=agent.max_sampled_tokens,
            wall_s=agent.wall_s,
        )
        self._workers = AgentWorkers(task, self._log) if agent.workers else None
        self._ends: dict[str, asyncio.Event] = {}  # set: the episode is to end
        self._playing: set[asyncio.Task[PlayedEpisode]] = set()

    async def start(self) -> None:
        await self._gateway.start()
        if self._workers is not None:
            self._workers.start()

    def end(self, name: str) -> None:
        if name in self._ends:
            self._ends[name].set()

    async def close(self) -> None:
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        if self._workers is not None:
            await self._workers.close()
        await self._gateway.stop()
        for handler in list(self._log.handlers):
            handler.close()
            self._log.removeHandler(handler)

    async def play(self, name: str, prompt: Prompt) -> PlayedEpisode:
        work = asyncio.ensure_future(self._play(name, prompt))
        self._playing.add(work)
        work.add_done_callback(self._playing.discard)
        return await work

    async def _play(self, name: str, prompt: Prompt) -> PlayedEpisode:
        now = asyncio.get_running_loop().time
        episode, begin = self._gateway.open_episode(name, self._limits), now()
        end = self._ends[name] = asyncio.Event()
        try:
            ended = await self._run(name, prompt, episode.key, end)
        finally:
            del self._ends[name]
            done = await self._gateway.end_episode(name)
        self._log_end(name, ended)
        clock = self._engine.clocks.pop(name, _Clock())
        seconds = {"engine_s": clock.seconds, "program_s": now() - begin - clock.seconds}
        return _played(self._task, prompt, done, ended, seconds)

    async def _run(self, name: str, prompt: Prompt, key: str, end: asyncio.Event) -> ProgramEnd:
        """The program's part of an episode."""
        given, url = self._given(name, prompt), self._gateway.base_url(name)
        if self._workers is not None:
            return await self._workers.play(name, given | {"base_url": url, "api_key": key}, end)
        text = msgspec.json.encode(given)
        variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
        if len(text) <= _MOST_IN_ENVIRONMENT:
            variables["MOERL_PROMPT"] = text.decode()
        try:
            return await run_program(self._task, variables, text, end)
        except OSError as error:
            return ProgramEnd(-1, b"", f"it cannot be started: {error}".encode(), "exit")

    def _given(self, name: str, prompt: Prompt) -> dict[str, object]:
        """What the program gets; the answer only where it gives the reward."""
        extra = dict(prompt.extra)
        messages = extra.pop("messages", None) or [{"role": "user", "content": prompt.text}]
        given: dict[str, object] = {"episode": name, "prompt": prompt.text}
        given |= {"messages": messages, "extra": extra}
        judges = self._task.agent.reward == "program"
        return given | {"answer": prompt.answer} if judges else given

    def _log_end(self, name: str, ended: ProgramEnd) -> None:
        printed = (ended.out + ended.err).decode(errors="replace").strip()
        self._log.info("%s: %s %d\n%s", name, ended.why, ended.code, printed)


def _program_log(file: Path) -> logging.Logger:
    found = logging.getLogger(f"{__name__}.output")
    found.propagate = False
    found.setLevel(logging.INFO)
    handler = RotatingFileHandler(file, maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    found.addHandler(handler)
    return found


def _played(
    task: TaskConfig,
    prompt: Prompt,
    done: FinishedEpisode,
    ended: ProgramEnd,
    seconds: dict[str, float],
) -> PlayedEpisode:
    turns = tuple(
        PlayedTurn(
            turn.sampled,
            turn.parent if turn.parent is not None and _continues(done, turn.index) else None,
        )
        for turn in done.turns
    )
    reward = _reward(ended.out) if task.agent.reward == "program" else None
    failure, detail = _failure(task, done, ended, reward)
    counts = {"turns": float(len(turns))} | seconds | {k: float(v) for k, v in done.counts.items()}
    return PlayedEpisode(
        episode_id=done.episode.episode_id,
        prompt=prompt,
        turns=turns,
        wasted=done.wasted,
        failure=failure,
        detail=detail,
        own_score=None if failure or reward is None else Score(reward),
        counts=counts,
    )


def _continues(done: FinishedEpisode, index: int) -> bool:
    """Whether the prompt of a turn begins with all tokens of its parent."""
    turn = done.turns[index]
    assert turn.parent is not None
    return turn.inherited == done.turns[turn.parent].rollout.num_tokens


def _failure(
    task: TaskConfig, done: FinishedEpisode, ended: ProgramEnd, reward: float | None
) -> tuple[str, str]:
    """Why an episode cannot be trained; empty if it can."""
    if ended.why == "ended":
        return ENDED, "was ended"
    if ended.why == "timeout":
        return "timeout", f"took longer than task.agent.wall_s = {task.agent.wall_s:g}"
    if ended.why == "error":
        return "error", f"has answered with an error: {_last_line(ended.err)}"
    if ended.why == "lost":
        return "lost", f"was lost with its worker, which {_last_line(ended.err)}"
    if ended.code:
        return "exit", f"ended with exit code {ended.code}: {_last_line(ended.err)}"
    if not done.turns:
        return "no_turn", "asked for no turn that was finished"
    if task.agent.reward == "program" and reward is None:
        return "no_reward", (
            'did not print {"reward": NUMBER} as its last line, but ' + repr(_last_line(ended.out))
        )
    return "", ""


def _last_line(printed: bytes) -> str:
    lines = printed.decode(errors="replace").strip().splitlines()
    return lines[-1][-_SHOWN:] if lines else ""


class _Reward(msgspec.Struct):
    reward: float


def _reward(printed: bytes) -> float | None:
    """Of the last line {"reward": x}; None where there is no finite number."""
    lines = printed.strip().splitlines()
    try:
        found = msgspec.json.decode(lines[-1] if lines else b"", type=_Reward).reward
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if math.isfinite(found) else None
