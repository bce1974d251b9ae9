"""What plays episodes on an event loop of its own: programs and environments alike.

The loop is a thread of the controller's process: rendering and tokenising do not stop the
controller's loop, although they share its interpreter.  Turns are sampled through the controller's
engines, on its loop.

    controller loop                     agent loop
    play --------------------------->   open episode, start what plays it
    engines <--- turn requests ------   OpenEpisode <--- program or environment
    PlayedEpisode <------------------   it ends, end episode
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from moerl.agents.episode_types import EpisodeLimits, FinishedEpisode, Policy
from moerl.agents.open_episode import NO_MASKS
from moerl.agents.prompt_tokens import PromptTokens
from moerl.agents.stop_texts import StopFinder
from moerl.agents.tool_calls import AnswerParser
from moerl.config.task_programs import AgentConfig
from moerl.controller.agent_episodes import ENDED, PlayedEpisode, PlayedTurn, TurnEngine
from moerl.core.errors import RecordError
from moerl.core.ids import episode_of
from moerl.core.types import (
    Array,
    GenerateRequest,
    LeftOut,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Segment,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class PolicySettings:
    """Parts that a policy needs besides its engine.  context_tokens: the longest sequence."""

    tokens: PromptTokens
    parser: AnswerParser
    sampling: SamplingParams
    context_tokens: int
    audit: bool
    logprobs: Callable[[Rollout], Array] | None = None  # of a turn, for clients that want them
    no_grammar: str = ""  # why grammars are refused; empty: they are taken

    def policy(self, engine: TurnEngine) -> Policy:
        return Policy(
            engine=engine,
            tokens=self.tokens,
            finder=StopFinder(self.tokens),
            parser=self.parser,
            sampling=self.sampling,
            audit=self.audit,
            logprobs=self.logprobs,
            no_grammar=self.no_grammar,
        )

    def limits(self, agent: AgentConfig) -> EpisodeLimits:
        return EpisodeLimits(
            context_tokens=self.context_tokens,
            turns=agent.max_turns,
            sampled_tokens=agent.max_sampled_tokens,
            wall_s=agent.wall_s,
        )


def no_grammar(agent: AgentConfig, *, masks: bool) -> str:
    """Why a run refuses grammars.  masks: those of the engines are replayed."""
    if not agent.grammars:
        return "not supported, because task.agent.grammars is false"
    return "" if masks else NO_MASKS


@dataclass(slots=True)
class EngineClock:
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
class EngineFar:
    """Engines that are used from another event loop."""

    engine: TurnEngine
    loop: asyncio.AbstractEventLoop
    clocks: dict[str, EngineClock] = field(default_factory=dict)  # by episode

    async def generate(
        self, requests: Sequence[GenerateRequest]
    ) -> Sequence[Segment | RecordError]:
        with self._timed(requests[0]):
            return await self._there(self.engine.generate(requests))

    async def stream(
        self, request: GenerateRequest, heard: Callable[[Array], None]
    ) -> Segment | RecordError:
        """heard: called from this loop."""
        here = asyncio.get_running_loop()

        def heard_there(output_ids: Array) -> None:
            with contextlib.suppress(RuntimeError):  # this loop is closed, and nobody waits
                here.call_soon_threadsafe(heard, output_ids)

        with self._timed(request):
            return await self._there(self.engine.stream(request, heard_there))

    async def abort(self, names: Sequence[str]) -> None:
        await self._there(self.engine.abort(names))

    @contextlib.contextmanager
    def _timed(self, request: GenerateRequest) -> Iterator[None]:
        now = asyncio.get_running_loop().time
        clock = self.clocks.setdefault(episode_of(request.rollout_id), EngineClock())
        clock.begin(now())
        try:
            yield
        finally:
            clock.stop(now())

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))


class EpisodeTable:
    """The episodes that run; used from the agent loop."""

    def __init__(self, engine: EngineFar) -> None:
        self.engine = engine
        self._ends: dict[str, asyncio.Event] = {}  # set: the episode is to end
        self._playing: set[asyncio.Task[PlayedEpisode]] = set()

    async def start(self) -> None:
        """Before the first episode."""

    async def stop(self) -> None:
        """After the last episode."""

    async def play_one(
        self, name: str, prompt: Prompt, end: asyncio.Event, held_out: SamplingParams | None
    ) -> PlayedEpisode:
        """One episode to its end, or until `end` is set."""
        raise NotImplementedError

    async def play(
        self, name: str, prompt: Prompt, held_out: SamplingParams | None
    ) -> PlayedEpisode:
        end = self._ends[name] = asyncio.Event()
        work = asyncio.ensure_future(self.play_one(name, prompt, end, held_out))
        self._playing.add(work)
        try:
            return await work
        finally:
            self._playing.discard(work)
            del self._ends[name]

    def end(self, name: str) -> None:
        if name in self._ends:
            self._ends[name].set()

    async def close(self) -> None:
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        await self.stop()


class AgentRunner:
    """The `EpisodeRunner` protocol; used from the controller's event loop."""

    def __init__(self, make_table: Callable[[EngineFar], EpisodeTable]) -> None:
        self._make_table = make_table
        self._there: _AgentLoop | None = None
        self._closed = False

    async def start(self, engine: TurnEngine) -> None:
        table = self._make_table(EngineFar(engine, asyncio.get_running_loop()))
        self._there = _AgentLoop(table)
        await self._there.run(table.start())

    async def play(
        self, name: str, prompt: Prompt, held_out: SamplingParams | None = None
    ) -> PlayedEpisode:
        if self._closed:  # a group that began while this was closed is cancelled like those before
            raise asyncio.CancelledError
        assert self._there is not None, "start comes first"
        return await self._there.run(self._there.table.play(name, prompt, held_out))

    def end(self, name: str) -> None:
        if self._closed:
            return
        assert self._there is not None, "start comes first"
        self._there.loop.call_soon_threadsafe(self._there.table.end, name)

    async def close(self) -> None:
        there, self._there, self._closed = self._there, None, True
        if there is not None:
            await there.run(there.table.close())
            await there.stop()


class _AgentLoop:
    """The thread of a table."""

    def __init__(self, table: EpisodeTable) -> None:
        self.table, self.loop = table, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="agents", daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        await asyncio.to_thread(self._thread.join)
        self.loop.close()


def played_episode(
    prompt: Prompt,
    done: FinishedEpisode,
    failure: tuple[str, str],
    reward: float | None,
    counts: Mapping[str, float],
) -> PlayedEpisode:
    """failure: one word, empty if it can be trained, and a sentence; reward: by the agent itself.

    counts: added to those of the turns.
    """
    turns = tuple(
        PlayedTurn(
            turn.sampled,
            turn.parent if turn.continues else None,
            turn.origin,
        )
        for turn in done.turns
    )
    recorded = {name: float(count) for name, count in done.counts.items()}
    left_out: LeftOut = "ended" if failure[0] == ENDED else "failed" if failure[0] else ""
    return PlayedEpisode(
        episode_id=done.name,
        prompt=prompt,
        turns=turns,
        wasted=done.wasted,
        failure=failure[0],
        detail=failure[1],
        own_score=None if failure[0] or reward is None else Score(reward),
        counts={"turns": float(len(turns)), **counts, **recorded},
        graph=tuple(replace(one, left_out=one.left_out or left_out) for one in done.graph),
    )
