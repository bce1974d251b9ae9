"""Episodes over one engine, without a controller: its turns are resumed as the controller does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import numpy as np

from moerl.agents.chat_turns import ChatTurns
from moerl.agents.cross_loop_episode import CrossLoopEpisode
from moerl.core.errors import EngineError, RecordError
from moerl.core.types import (
    Array,
    Finish,
    GenerateRequest,
    PolicyVersion,
    Prompt,
    SamplingParams,
    Segment,
)
from moerl.episodes.finished_episode import FinishedEpisode
from moerl.episodes.open_episode import EpisodeSpec, OpenEpisode, TurnCall
from moerl.records.header_check import blob_uris

PROMPT = Prompt(7, (1, 2), "p", "34", {"hint": 5})


class TurnEngine(Protocol):
    """An engine host, or `tests.helpers.scripted_engine.ScriptedEngine`."""

    async def generate(
        self, requests: Sequence[GenerateRequest]
    ) -> Sequence[Segment | RecordError]: ...

    async def stream(
        self, request: GenerateRequest, heard: Callable[[Array], None]
    ) -> Segment | RecordError: ...

    async def abort(self, names: Sequence[str]) -> None: ...


class OneEngineRouter:
    """The `Router` protocol."""

    def __init__(self, engine: TurnEngine) -> None:
        self._engine = engine
        self._running: set[asyncio.Task[None]] = set()

    def submit(self, call: TurnCall) -> None:
        self._spawn(self._sample(call))

    def withdraw(self, call: TurnCall) -> None:
        if call.engine is not None and call.asked is not None:
            self._spawn(self._engine.abort([call.asked.name]))

    def current(self, episode: OpenEpisode) -> PolicyVersion:
        return episode.newest

    async def _sample(self, call: TurnCall) -> None:
        try:
            while not (call.done.done() or call.turn.finished):
                await self._extend(call)
        except Exception as error:
            call.fail(error)
        else:
            if not call.done.done():
                call.done.set_result(None)

    async def _extend(self, call: TurnCall) -> None:
        reply = await self._ask(call)
        if call.done.done():  # nobody waits for it
            call.episode.uris |= blob_uris(reply)
            return
        turn, ends = call.turn, call.wanted.ends
        call.episode.add(call, reply)
        if not np.array_equal(turn.output_ids[: len(call.shown_ids)], call.shown_ids):
            raise EngineError("tokens that were told are lost")
        if not turn.finished:
            call.episode.resumed += 1
        elif ends is None or turn.segments[-1].finish is not Finish.STOP:
            return
        elif not await ends(turn.output_ids):
            turn.continue_behind_stop()

    async def _ask(self, call: TurnCall) -> Segment:
        told, before = call.wanted.on_tokens, call.turn.output_ids

        def heard(output_ids: Array) -> None:
            if told is not None and not call.done.done():
                call.shown_ids = np.concatenate([before, output_ids])
                told(call.shown_ids)

        call.asked, call.engine = call.turn.request(streams=told is not None), self._engine
        try:
            if told is not None:
                reply = await self._engine.stream(call.asked, heard)
            else:
                (reply,) = await self._engine.generate([call.asked])
        finally:
            call.engine = None
        if isinstance(reply, RecordError):
            raise reply
        return reply

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)


def open_episode(
    engine: TurnEngine, name: str, sampling: SamplingParams, prompt: Prompt = PROMPT, **spec: Any
) -> OpenEpisode:
    return OpenEpisode(EpisodeSpec(name, prompt, sampling, **spec), OneEngineRouter(engine))


def far(episode: OpenEpisode) -> CrossLoopEpisode:
    """An episode for a client on the running loop."""
    return CrossLoopEpisode(episode, asyncio.get_running_loop())


async def finished(
    episode: OpenEpisode, turns: ChatTurns, failure: tuple[str, str] = ("", "")
) -> FinishedEpisode:
    """The record of an episode whose turns have ended."""
    await asyncio.sleep(0)  # some may still be left out
    return episode.finish(turns.outcome(failure, None, {}))
