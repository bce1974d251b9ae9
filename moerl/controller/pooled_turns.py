"""The engines of a run as one engine for turns of agents.

A request waits for an engine that serves, and goes to the one that has sampled the turns before,
for its prefix cache, or to the least busy one.  Versions never go backwards inside an episode.
When an engine fails, the reply is empty and the rest is asked for again, on any engine.

Replies to episodes that may be trained are kept in the journal
(`moerl.controller.journal.turn_log`).  What
an earlier controller got for an equal request is given out again, if its weights are part of the
trainer's history and its records can be read whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moerl.controller.context import Context
from moerl.controller.engine_pool import EnginePhase, EngineState
from moerl.controller.rollout_builder import blob_refs, blob_uris
from moerl.core.errors import EngineError, RecordError
from moerl.core.ids import episode_of
from moerl.core.types import Array, Finish, GenerateRequest, PolicyVersion, Segment
from moerl.records.blob_store import sizes_of

log = logging.getLogger(__name__)

_NONE = PolicyVersion(0, 0)


class EnginePin:
    """The one engine, and the one version, of all turns of an evaluation."""

    def __init__(self, engine: int, version: PolicyVersion) -> None:
        self.engine, self.version = engine, version
        # Set when a turn could not have this engine and version
        self.broken: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()

    def breaks(self, error: EngineError) -> None:
        if not self.broken.done():
            self.broken.set_result(error)

    def check(self, *versions: PolicyVersion) -> None:
        if any(version != self.version for version in versions):
            self.breaks(EngineError(f"engine {self.engine} took an update while it was evaluated"))


@dataclass(slots=True, eq=False)
class EpisodeTurns:
    """State of an episode that runs."""

    newest: PolicyVersion = _NONE  # of its tokens
    oldest: dict[str, PolicyVersion] = field(default_factory=dict)  # by turn that may be trained
    withdrawn: set[str] = field(default_factory=set)  # turns that nobody waits for
    engine: int = -1  # of the last request
    uris: set[str] = field(default_factory=set)
    asked: dict[str, int] = field(default_factory=dict)  # requests, with the engine's step then
    pin: EnginePin | None = None  # of an evaluation

    def blob_uris(self) -> set[str]:
        return self.uris

    def oldest_step(self, *, runs_through_updates: bool) -> int | None:
        """As `GroupFlight.oldest_step`."""
        steps = [version.step for version in self.oldest.values()]
        if runs_through_updates:
            steps += self.asked.values()
        return min(steps, default=None)

    def add(self, reply: Segment) -> None:
        self.uris |= blob_uris(reply)
        versions = [piece.version for piece in reply.pieces if len(piece.output_ids)]
        if versions:
            self.newest = max([*versions, self.newest])
            if reply.rollout_id not in self.withdrawn:
                self.oldest.setdefault(reply.rollout_id, versions[0])

    def withdraw(self, turn: str) -> None:
        """A turn that will not be trained has no age."""
        self.withdrawn.add(turn)
        self.oldest.pop(turn, None)


class PooledTurns:
    """Used from the controller's event loop."""

    def __init__(self, context: Context) -> None:
        self._pool, self._tasks = context.pool, context.tasks
        self._step_metrics, self._buffer = context.step_metrics, context.buffer
        self._turn_log, self._blobs = context.services.journal.turns, context.services.blobs
        self._history = context.lineage
        self._ends_run = not context.config.supervision.max_restarts
        self.episodes: dict[str, EpisodeTurns] = {}
        self._asked: dict[str, EngineState] = {}  # engines by request
        self._waiting: set[str] = set()  # requests that have no engine yet
        self._withdrawn: set[str] = set()  # requests that are to end

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Segment | RecordError]:
        return list(await asyncio.gather(*map(self._generate, requests)))

    async def stream(
        self, request: GenerateRequest, heard: Callable[[Array], None]
    ) -> Segment | RecordError:
        """As `TurnEngine.stream`."""
        return await self._generate(request, heard)

    @property
    def sampling(self) -> set[str]:
        """Episodes with a turn on an engine."""
        return {episode_of(name) for name in self._asked}

    @property
    def queued(self) -> set[str]:
        """Episodes with a turn that no engine serves yet."""
        return {episode_of(name) for name in self._waiting}

    async def abort(self, names: Sequence[str]) -> None:
        """Raises EngineError."""
        self._withdrawn |= (self._waiting | self._asked.keys()).intersection(names)
        self._tasks.notify()
        for name in names:
            turn = name.rpartition("-s")[0]
            if turns := self.episodes.get(episode_of(turn)):
                turns.withdraw(turn)
            if member := self._asked.get(name):
                await member.engine.abort([name])

    async def _generate(
        self, request: GenerateRequest, heard: Callable[[Array], None] | None = None
    ) -> Segment | RecordError:
        turns = self.episodes.setdefault(episode_of(request.rollout_id), EpisodeTurns())
        try:
            if turns.pin is not None:
                return await self._pinned(request, turns, turns.pin, heard)
            if (known := await self._known(request)) is not None:
                turns.add(known)
                turns.engine = known.engine  # its prefix cache may have the turn
                return known
            return await self._sampled(request, turns, heard)
        finally:
            self._withdrawn.discard(request.name)

    async def _sampled(
        self,
        request: GenerateRequest,
        turns: EpisodeTurns,
        heard: Callable[[Array], None] | None,
    ) -> Segment | RecordError:
        self._waiting.add(request.name)
        try:
            index = await self._engine(turns, lambda: request.name in self._withdrawn)
        finally:
            self._waiting.discard(request.name)
        if index is None:
            return _nothing(request, turns)
        member, turns.engine = self._pool.members[index], index
        member.generating += 1
        self._asked[request.name] = member
        turns.asked[request.name] = member.version.step
        try:
            reply = await _reply(member, request, heard)
        except EngineError as error:
            self._rest(index, member, error)
            return _nothing(request, turns)
        finally:
            del self._asked[request.name], turns.asked[request.name]
            member.generating -= 1
            self._tasks.notify()
        if isinstance(reply, Segment):
            turns.add(reply)
            self._count(request, reply)
            if reply.num_sampled and request.name not in self._withdrawn:
                self._turn_log.add(request, reply)
        return reply

    async def _known(self, request: GenerateRequest) -> Segment | None:
        """The reply that an earlier controller got, renamed for this episode."""
        while (reply := self._turn_log.take(request)) is not None:
            if self._is_of_history(reply) and await asyncio.to_thread(self._is_whole, reply):
                self._turn_log.adopt(reply)
                self._step_metrics.turn_replayed(reply.num_sampled)
                pieces = [replace(p, rollout_id=request.rollout_id, rest=()) for p in reply.pieces]
                return replace(pieces[0], rest=tuple(pieces[1:]))
            log.warning("a turn of %s is sampled again: it cannot be used", reply.rollout_id)
            self._step_metrics.turns_lost(1)
        return None

    def _is_of_history(self, reply: Segment) -> bool:
        return all(
            self._history.holds(piece.version)
            and self._history.knows(piece.version, self._buffer.next_step)
            for piece in reply.pieces
        )

    def _is_whole(self, reply: Segment) -> bool:
        """Whether every byte of its records can be read.  Slow; thread-safe."""
        refs = list(blob_refs(reply))
        return not (self._blobs.find(sizes_of(refs)).gone or self._blobs.damaged(refs))

    async def _pinned(
        self,
        request: GenerateRequest,
        turns: EpisodeTurns,
        pin: EnginePin,
        heard: Callable[[Array], None] | None,
    ) -> Segment | RecordError:
        """A turn of an evaluation: elsewhere, or later, it is not.  Raises EngineError."""
        if member := self._pool.members.get(pin.engine):
            pin.check(member.version)
        else:
            pin.breaks(EngineError(f"engine {pin.engine} has left the run"))
        if member is None or pin.broken.done():
            raise pin.broken.result()
        self._asked[request.name] = member
        try:
            reply = await _reply(member, request, heard)
        except EngineError as error:
            pin.breaks(error)
            raise
        finally:
            del self._asked[request.name]
        if isinstance(reply, Segment):
            turns.add(reply)
            pin.check(*(piece.version for piece in reply.pieces if len(piece.output_ids)))
        return reply

    async def _engine(self, turns: EpisodeTurns, is_withdrawn: Callable[[], bool]) -> int | None:
        """The engine for a turn; None when nobody waits for it any longer."""
        while not is_withdrawn():
            members = self._pool.members
            able = [
                index
                for index in members
                if self._pool.serves(index) and members[index].version >= turns.newest
            ]
            if turns.engine in able:
                return turns.engine
            if able:
                return min(able, key=lambda index: members[index].generating)
            await self._tasks.wait_change(1.0)
        return None

    def _rest(self, index: int, member: EngineState, error: EngineError) -> None:
        """A request has failed with its engine."""
        if self._ends_run:
            self._tasks.fail(error)
            raise error
        if self._pool.members.get(index) is member and member.phase == EnginePhase.UP:
            log.warning("engine %d failed, its turns continue elsewhere: %s", index, error)
            self._pool.rest(index)

    def _count(self, request: GenerateRequest, reply: Segment) -> None:
        metrics = self._step_metrics
        metrics.prompt_tokens += request.num_tokens
        metrics.cached_tokens += reply.cached_tokens
        if request.num_sampled and len(reply.output_ids):
            metrics.recomputed_tokens += request.num_tokens - 1 - reply.cached_tokens


async def _reply(
    member: EngineState, request: GenerateRequest, heard: Callable[[Array], None] | None
) -> Segment | RecordError:
    """Raises EngineError."""
    if heard is not None:
        return await member.calls.stream(request, heard)
    (reply,) = await member.calls.ask([request])
    return reply


def _nothing(request: GenerateRequest, turns: EpisodeTurns) -> Segment:
    """A reply without a token: the same request is sent again."""
    return Segment(
        rollout_id=request.rollout_id,
        output_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        version=turns.newest,
        finish=Finish.ABORT,
        routing=None,
        sampling_mask=None,
        audit_rows=None,
        engine=max(0, turns.engine),
        cached_tokens=0,
        start_s=0.0,
        end_s=0.0,
    )
