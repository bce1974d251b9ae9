"""Samples one turn on an engine: one call of a client, however often the engine is interrupted.

A weight update ends the engine's request with its tokens so far; the rest is asked for under the
new weights, and the client sees nothing of it.  When the client leaves, the request is ended and
what it sealed is not kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace

from moerl.agents.gateway.answer_stream import AnswerStream
from moerl.agents.stop_texts import StopFinder, Stops
from moerl.controller.agent_episodes import TurnEngine
from moerl.controller.rollout_builder import PartialRollout, blob_uris
from moerl.controller.turn_rows import SampledTurn
from moerl.core.errors import EngineError, RecordError
from moerl.core.types import Finish, GenerateRequest, Segment

_WITHDRAW_S = 60.0  # seconds in which an ended request must come back
_AGAIN_S = 0.2  # between two orders to end it: it may not have arrived at the first


class TurnSampler:
    """The requests of one episode."""

    def __init__(
        self, engine: TurnEngine, finder: StopFinder, waste: Callable[[Iterable[str]], None]
    ) -> None:
        """waste: told blobs to which no turn of this call refers."""
        self._engine, self._finder, self._waste = engine, finder, waste
        self._withdrawn: set[asyncio.Task[None]] = set()
        self.resumed = 0  # requests for the rest of an interrupted turn

    async def sample(
        self, partial: PartialRollout, stops: Stops, shown: AnswerStream | None = None
    ) -> SampledTurn:
        """Raises RecordError, EngineError; then, and when it is cancelled, nothing is kept.

        shown: hears the tokens while they are sampled.
        """
        try:
            while not partial.finished:
                await self._extend(partial, stops, shown)
                if shown is not None and shown.has_lost(partial.output_ids.tolist()):
                    raise EngineError("tokens that a client has seen are lost with their engine")
            return partial.turn()
        except BaseException:
            self._waste(partial.blob_uris())
            raise

    async def close(self) -> None:
        """Wait for requests that are being ended."""
        await asyncio.gather(*self._withdrawn, return_exceptions=True)

    async def _extend(
        self, partial: PartialRollout, stops: Stops, shown: AnswerStream | None
    ) -> None:
        if shown is not None:
            shown.begin(partial.output_ids.tolist())
        reply = await self._ask(partial.request(), shown)
        try:
            partial.add(reply)
        except RecordError:
            self._waste(blob_uris(reply))
            raise
        self.resumed += not partial.finished
        last = partial.segments[-1] if partial.finished else None
        if last is None or last.finish is not Finish.STOP or not stops.texts:
            return
        if not self._finder.ends(partial.output_ids.tolist(), stops):
            full = partial.num_sampled == partial.sampling.max_new_tokens
            finish = Finish.LENGTH if full else Finish.ABORT
            partial.segments[-1] = replace(last, finish=finish)

    async def _ask(self, request: GenerateRequest, shown: AnswerStream | None) -> Segment:
        call = asyncio.ensure_future(self._reply(request, shown))
        try:
            reply = await asyncio.shield(call)
        except asyncio.CancelledError:
            task = asyncio.create_task(self._withdraw(request, call))
            self._withdrawn.add(task)
            task.add_done_callback(self._withdrawn.discard)
            raise
        if isinstance(reply, RecordError):
            raise reply
        return reply

    async def _reply(
        self, request: GenerateRequest, shown: AnswerStream | None
    ) -> Segment | RecordError:
        if shown is not None:
            return await self._engine.stream(replace(request, streams=True), shown.heard)
        (reply,) = await self._engine.generate([request])
        return reply

    async def _withdraw(
        self, request: GenerateRequest, call: asyncio.Future[Segment | RecordError]
    ) -> None:
        """End a request whose client is gone."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_WITHDRAW_S):
                while not call.done():
                    await self._engine.abort([request.name])
                    await asyncio.wait([call], timeout=_AGAIN_S)
        call.cancel()
        with contextlib.suppress(EngineError, asyncio.CancelledError):
            self._waste(blob_uris(await call))
