"""All turns of all open episodes, and the engines that sample them.

A turn is with one engine at a time.  When an update or a slice cuts its request, or its engine
fails, the rest is requested in a callback: no coroutine wakes for a turn that waits or resumes.

An episode that has sampled `rollout.journal_tokens` has its replies kept in the journal
(`moerl.controller.journal.turn_log`).  An equal request gets the reply that an earlier controller
had, if its weights are part of the trainer's history and its records can be read whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from moerl.controller.context import Context
from moerl.controller.engine_calls import Reply
from moerl.controller.engine_choice import EngineChoice
from moerl.controller.engine_pool import EnginePhase, EngineState
from moerl.core.errors import AnswerError, EngineError, RecordError
from moerl.core.ids import without_life
from moerl.core.types import Array, Finish, GenerateRequest, PolicyVersion, Segment
from moerl.episodes.open_episode import EnginePin, OpenEpisode, TurnCall, VersionGone
from moerl.records.blob_store import sizes_of
from moerl.records.header_check import blob_refs, blob_uris, own_uris

log = logging.getLogger(__name__)

_MOST_ERRORS = 3  # in a row, of one engine
_APART_S = 2.0  # seconds; longer than a host needs to see that its server has died


class TurnRouter:
    """The `Router` protocol; used from the controller's event loop."""

    def __init__(self, context: Context, engines: EngineChoice) -> None:
        self._pool, self._tasks, self._engines = context.pool, context.tasks, engines
        self._step_metrics, self._buffer = context.step_metrics, context.buffer
        self._turn_log, self._blobs = context.services.journal.turns, context.services.blobs
        self._lineage, self._ref_counts = context.lineage, context.ref_counts
        self._ends_run = not context.config.supervision.max_restarts
        self._journal_tokens = context.config.rollout.journal_tokens
        self._to_log: list[tuple[GenerateRequest, Segment]] = []  # written at the end of this tick
        self._sent: dict[str, TurnCall] = {}  # by request
        # Turns without an engine, by the oldest version that may continue their episode
        self._waiting: dict[PolicyVersion, deque[TurnCall]] = {}

    async def run(self) -> None:
        """Send turns that wait as soon as an engine serves them; until cancelled."""
        while True:
            await self._tasks.wait_change(1.0)
            self._dispatch()

    def submit(self, call: TurnCall) -> None:
        """Sample a turn; then `call.done` has a result or an error."""
        call.asked = request = call.turn.request(streams=call.wanted.on_tokens is not None)
        is_trained = call.episode.spec.pin is None
        if is_trained and (reply := self._turn_log.take(request)) is not None:
            self._tasks.spawn(self._replay(call, reply))
        else:
            self._place(call)

    def withdraw(self, call: TurnCall) -> None:
        """Drop a turn whose caller has stopped waiting."""
        episode = call.episode
        if episode.count_lost is not None:
            episode.count_lost(call.turn.num_sampled)

        def late(reply: Reply) -> None:
            self._came_late(episode, reply)

        if isinstance(call.engine, EngineState) and call.asked is not None:
            del self._sent[call.asked.name]
            call.engine.calls.cancel([call.asked.name], late)
            self._has_left(call, call.engine)

    def current(self, episode: OpenEpisode) -> PolicyVersion:
        """The weights that would sample the next turn of an episode."""
        engines = self._pool.engines
        if (engine := engines.get(episode.engine)) is not None:
            return engine.version
        return max((one.version for one in engines.values()), default=episode.newest)

    def _came_late(self, episode: OpenEpisode, reply: Reply) -> None:
        """A reply to a turn that was withdrawn."""
        if not isinstance(reply, Segment):
            return
        if episode.count_lost is not None:
            episode.count_lost(reply.num_sampled)
        if episode.is_released:
            self._ref_counts.release(own_uris(reply))
        else:  # siblings may refer to rows of their prompt in this blob
            episode.uris |= blob_uris(reply)

    @property
    def waiting(self) -> set[str]:
        """Episodes with a turn that no engine serves yet."""
        calls = (call for waiting in self._waiting.values() for call in waiting)
        return {call.episode.name for call in calls if not call.done.done()}

    # --- sending ----------------------------------------------------------------------------------
    def _dispatch(self) -> None:
        engines = self._pool.engines
        serving = [engines[index].version for index in engines if self._pool.serves(index)]
        newest = max(serving, default=None)
        if newest is None:
            return
        for version in sorted(one for one in self._waiting if one <= newest):
            for call in self._waiting.pop(version):
                if not call.done.done():
                    self._place(call)

    def _place(self, call: TurnCall) -> None:
        """Send a turn to an engine, or let it wait for one."""
        version = call.wanted.version
        if version is not None and not self._engines.has(version):
            self._version_gone(call, version)
        elif (pin := call.episode.spec.pin) is not None:
            self._pinned(call, pin)
        elif (index := self._engines.for_turn(call)) is not None:
            self._send(call, index)
        else:
            self._waiting.setdefault(call.episode.newest, deque()).append(call)

    def _version_gone(self, call: TurnCall, version: PolicyVersion) -> None:
        self._step_metrics.add("agent/version_gone")
        call.fail(VersionGone(f"{call.turn.name}: no engine has the weights {version}"))

    def _pinned(self, call: TurnCall, pin: EnginePin) -> None:
        """A turn of an evaluation is sampled by one engine at one version, or not at all."""
        if engine := self._pool.engines.get(pin.engine):
            pin.check(engine.version)
        else:
            pin.breaks(EngineError(f"engine {pin.engine} has left the run"))
        if pin.broken.done():
            call.fail(pin.broken.result())
        else:
            self._send(call, pin.engine)

    def _send(self, call: TurnCall, index: int) -> None:
        engine, request = self._pool.engines[index], call.asked
        assert request is not None, "a turn is placed with its request"
        call.engine, call.step, call.episode.engine = engine, engine.version.step, index
        call.sent_at = asyncio.get_running_loop().time()
        self._sent[request.name] = call
        engine.generating += 1
        engine.calls.send([request], self._take, _on_tokens(call))

    def _has_left(self, call: TurnCall, engine: EngineState) -> None:
        call.engine = None
        engine.generating -= 1
        if not engine.generating:  # an update, or its end, may wait for it
            self._tasks.notify()

    # --- replies ----------------------------------------------------------------------------------
    def _take(self, name: str, reply: Reply) -> None:
        call = self._sent.pop(name)
        engine = call.engine
        assert isinstance(engine, EngineState), "it was sent to an engine"
        self._has_left(call, engine)
        if isinstance(reply, Segment):
            engine.errors.clear()
        elif _is_own_error(reply) and call.wanted.grammar is None:
            self._count_error(call, engine, reply)
        if call.done.done():  # its episode was ended in this tick
            self._came_late(call.episode, reply)
        elif isinstance(reply, EngineError):
            self._engine_failed(call, engine, reply)
        elif isinstance(reply, RecordError):
            call.fail(reply)
        else:
            self._count(call, reply)
            self._add(call, reply, is_new=True)

    def _add(self, call: TurnCall, reply: Segment, *, is_new: bool) -> None:
        episode, turn, request = call.episode, call.turn, call.asked
        assert request is not None
        try:
            self._check_versions(reply)  # else the turn would wait for an engine that has them
            episode.add(call, reply)
        except RecordError as error:
            call.fail(error)
            return
        if pin := episode.spec.pin:
            pin.check(*(piece.version for piece in reply.pieces if len(piece.output_ids)))
        elif is_new and reply.num_sampled and self._journal_tokens >= 0:
            self._log(episode, request, reply)
        version = call.wanted.version
        if version is not None and any(piece.version != version for piece in reply.pieces):
            self._version_gone(call, version)
        elif _has_lost(call):
            call.fail(EngineError("tokens that a client has heard are lost with their engine"))
        elif not turn.finished:
            episode.resumed += 1
            self.submit(call)
        elif call.wanted.ends is not None and turn.segments[-1].finish is Finish.STOP:
            self._tasks.spawn(self._ask_end(call))
        else:
            call.done.set_result(None)

    def _check_versions(self, reply: Segment) -> None:
        """Raises RecordError for weights that no trainer has published."""
        for piece in reply.pieces:
            if not self._lineage.knows(piece.version, self._buffer.next_step):
                detail = f"{reply.rollout_id}: tokens of {piece.version}, which was never published"
                raise RecordError("version", detail)

    def _log(self, episode: OpenEpisode, request: GenerateRequest, reply: Segment) -> None:
        episode.unlogged.append((request, reply))
        if episode.num_heard < self._journal_tokens:
            return
        if not self._to_log:
            asyncio.get_running_loop().call_soon(self._write_log)
        self._to_log += episode.unlogged
        episode.unlogged = []

    def _write_log(self) -> None:
        """Write the replies of this tick in one transaction."""
        asked, self._to_log = self._to_log, []
        self._turn_log.add(asked)

    async def _ask_end(self, call: TurnCall) -> None:
        """A stop token of the client ends the turn, or it is sampled on."""
        assert call.wanted.ends is not None
        try:
            is_end = await call.wanted.ends(call.turn.output_ids)
        except Exception as error:  # an error of one client does not end the run
            call.fail(error)
            return
        if call.done.done():
            return
        if not is_end:
            call.turn.continue_behind_stop()
        if call.turn.finished:
            call.done.set_result(None)
        else:
            self.submit(call)

    def _count_error(self, call: TurnCall, engine: EngineState, error: Exception) -> None:
        """Errors of an engine that lives, in a row, end the run.

        A server that dies may answer its last requests with errors, so only those count whose
        request was sent some time after the error before: then its death is known, and it has no
        requests.  A request that fails again and again is refused with its episode.
        """
        errors, name = engine.errors, without_life(call.episode.name)
        if errors and call.sent_at < errors[-1][1] + _APART_S:
            return
        if isinstance(error, RecordError) and name in dict(errors):
            return
        errors.append((name, asyncio.get_running_loop().time()))
        if len(errors) < _MOST_ERRORS:
            return
        index = next((i for i, one in self._pool.engines.items() if one is engine), -1)
        self._tasks.fail(
            EngineError(
                f"engine {index} answered {len(errors)} requests in a row with an error and none "
                f"with a reply; last: {error}; check engine.args and logs/engine{index}.log"
            )
        )

    def _engine_failed(self, call: TurnCall, engine: EngineState, error: EngineError) -> None:
        """A request has failed with its engine: its turn continues on any engine."""
        if pin := call.episode.spec.pin:
            pin.breaks(error)
            call.fail(error)
            return
        if self._ends_run:
            self._tasks.fail(error)
            call.fail(error)
            return
        for index, other in self._pool.engines.items():
            if other is engine and engine.phase == EnginePhase.UP:
                log.warning("engine %d failed, its turns continue elsewhere: %s", index, error)
                self._pool.rest(index)
        if _has_lost(call):
            call.fail(EngineError("tokens that a client has heard are lost with their engine"))
        else:
            call.episode.resumed += 1
            self.submit(call)

    def _count(self, call: TurnCall, reply: Segment) -> None:
        """Call before the reply is added: recomputed tokens depend on the earlier length."""
        metrics, request = self._step_metrics, call.asked
        assert request is not None
        if call.episode.spec.pin is not None:
            return
        metrics.add("prompt_tokens", request.num_tokens)
        metrics.add("cached_tokens", reply.cached_tokens)
        if call.wanted.fork_at >= 0 and not request.num_sampled:
            metrics.forked(continuations=1, fed=request.num_tokens, cached=reply.cached_tokens)
        if request.num_sampled and len(reply.output_ids):
            again = request.num_tokens - 1 - reply.cached_tokens
            metrics.add("async/recomputed_tokens", again)

    # --- replies that an earlier controller had ---------------------------------------------------
    async def _replay(self, call: TurnCall, reply: Segment | None) -> None:
        assert call.asked is not None
        while reply is not None:
            if self._is_of_history(reply) and await asyncio.to_thread(self._is_whole, reply):
                break
            log.warning("a turn of %s is sampled again: it cannot be used", reply.rollout_id)
            self._step_metrics.add("agent/lost_turns")
            reply = self._turn_log.take(call.asked)
        if call.done.done():
            return
        if reply is None:
            self._place(call)
            return
        self._turn_log.adopt(reply)
        self._step_metrics.add("agent/replayed_turns")
        self._step_metrics.add("agent/replayed_tokens", reply.num_sampled)
        call.episode.engine = reply.engine  # its prefix cache may have the turn
        self._add(call, _renamed(reply, call.asked), is_new=False)

    def _is_of_history(self, reply: Segment) -> bool:
        return all(
            self._lineage.holds(piece.version)
            and self._lineage.knows(piece.version, self._buffer.next_step)
            for piece in reply.pieces
        )

    def _is_whole(self, reply: Segment) -> bool:
        """Whether every byte of its records can be read.  Slow; thread-safe."""
        refs = list(blob_refs(reply))
        return not (self._blobs.find(sizes_of(refs)).gone or self._blobs.damaged(refs))


def _on_tokens(call: TurnCall) -> Callable[[Array], None] | None:
    """Passes the tokens of a request on, with the turn's tokens before them."""
    if (on_tokens := call.wanted.on_tokens) is None:
        return None
    before = call.turn.output_ids

    def extend(output_ids: Array) -> None:
        if not call.done.done():
            call.shown_ids = np.concatenate([before, output_ids])
            on_tokens(call.shown_ids)

    return extend


def _renamed(reply: Segment, request: GenerateRequest) -> Segment:
    """An earlier reply as the reply to this request."""
    first, *rest = (replace(p, rollout_id=request.rollout_id, rest=()) for p in reply.pieces)
    return replace(first, rest=tuple(rest))


def _is_own_error(reply: Reply) -> bool:
    """Whether an engine that lives failed a request that may be right."""
    failed = isinstance(reply, RecordError) and reply.reason == "engine"
    return failed or isinstance(reply, AnswerError)


def _has_lost(call: TurnCall) -> bool:
    """Whether a listener knows tokens that the turn has lost."""
    seen = call.shown_ids
    return bool(len(seen)) and not np.array_equal(call.turn.output_ids[: len(seen)], seen)
