"""The requests to one engine host, and their replies.

A rollout is the unit of completion: each reply goes to who sent its request as soon as it is there.
Messages hold many: requests that are sent while a message is under way travel in the next one, and
one question brings all replies that are there.

No limit holds for a whole request, since an answer may take hours.  When the engine neither
prefills nor samples for `progress_timeout_s`, all its requests are aborted, and what they have
sampled comes back; what does not come back then fails.  A host that does not answer a message in
time fails all requests; what it sends later is dropped, with its blobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from moerl.controller.task_group import TaskGroup
from moerl.core.errors import EngineError, RecordError
from moerl.core.messages import Answers, Engine
from moerl.core.types import Array, GenerateRequest, Segment
from moerl.records.header_check import own_uris

log = logging.getLogger(__name__)

ANSWER_S = 10.0  # seconds for calls without engine work, and beyond the deadline of others
_COLLECT_S = 5.0  # a host answers an empty `collect` after this time
_PARTIALS_S = 60.0  # seconds in which aborted requests must come back
_AT_ONCE = 16  # replies handled before other tasks run: an update interrupts thousands

Reply = Segment | RecordError | EngineError
Take = Callable[[str, Reply], None]
T = TypeVar("T")


async def host_answer(work: Awaitable[T], what: str, limit_s: float = 0.0) -> T:
    """The answer of a host; limit_s: time limit of the host itself.

    Raises EngineError when the host fails or hangs.
    """
    limit_s += ANSWER_S
    try:
        async with asyncio.timeout(limit_s):
            return await work
    except TimeoutError as error:
        raise EngineError(f"no answer to {what} within {limit_s:g} s") from error


class EngineCalls:
    """All requests that one engine host has.  Used by one event loop."""

    def __init__(
        self,
        index: int,
        engine: Engine,
        tasks: TaskGroup,
        progress_timeout_s: float,
        drop: Callable[[Iterable[str]], None],
        stalled: Callable[[int], None],
    ) -> None:
        """drop: receives the blobs of replies that no one waits for any more.

        stalled: receives the number of requests aborted because the engine made no progress.
        """
        self._index, self._engine, self._tasks = index, engine, tasks
        self._limit_s, self._drop, self._stalled = progress_timeout_s, drop, stalled
        self._waiting: dict[str, Take] = {}
        self._listeners: dict[str, Callable[[Array], None]] = {}  # of requests that stream
        self._cancelled: dict[str, Callable[[Reply], None]] = {}
        self._outbox: list[GenerateRequest] = []
        self._wake_sender, self._wake_receiver = asyncio.Event(), asyncio.Event()
        self._started, self._closed = False, False
        self._progress, self._progress_at = -1, 0.0
        self._seen = 0.0  # last progress that the host has reported

    # --- for those who ask ------------------------------------------------------------------------
    def send(
        self,
        requests: Sequence[GenerateRequest],
        take: Take,
        heard: Callable[[Array], None] | None = None,
    ) -> None:
        """take: receives each reply once, by the name of its request.

        heard: receives the tokens so far of a request that streams, with each message that has
        some.
        """
        if self._closed:
            raise EngineError(f"engine {self._index} was replaced")
        if not self._waiting:
            self._progress_at = asyncio.get_running_loop().time()
        self._waiting |= dict.fromkeys((request.name for request in requests), take)
        if heard is not None:
            self._listeners |= dict.fromkeys((request.name for request in requests), heard)
        self._outbox += requests
        self._wake_sender.set()
        self._wake_receiver.set()
        if not self._started:
            self._started = True
            self._tasks.spawn(self._send_all())
            self._tasks.spawn(self._receive_all())

    async def ask(self, requests: Sequence[GenerateRequest]) -> list[Segment | RecordError]:
        """Replies to all requests, in order.  Raises EngineError when one fails.

        When it is cancelled the engine stops too.
        """
        replies: dict[str, Segment | RecordError] = {}
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(name: str, reply: Reply) -> None:
            if isinstance(reply, EngineError):
                if not done.done():
                    done.set_exception(reply)
                return
            replies[name] = reply
            if len(replies) == len(requests) and not done.done():
                done.set_result(None)

        self.send(requests, take)
        try:
            await done
        except BaseException:
            self._drop(uri for reply in replies.values() for uri in own_uris(reply))
            self.cancel([request.name for request in requests])
            raise
        return [replies[request.name] for request in requests]

    def cancel(self, names: Sequence[str], late: Callable[[Reply], None] | None = None) -> None:
        """Abort requests whose replies are not wanted.

        late: receives what the engine had sampled, with its blobs; None: they are dropped.
        """
        gone = [name for name in names if self._take_of(name)]
        if gone:
            self._cancelled |= dict.fromkeys(gone, late or self._drop_reply)
            self._tasks.spawn(self._abort(gone))

    def close(self, cause: str) -> None:
        """Another host takes its place: fail what it had, and ask it nothing further."""
        self._closed = True
        self._fail(list(self._waiting), EngineError(f"engine {self._index}: {cause}"))
        self._wake_sender.set()
        self._wake_receiver.set()

    # --- messages ---------------------------------------------------------------------------------
    async def _send_all(self) -> None:
        while not self._closed:
            await self._wake_sender.wait()
            self._wake_sender.clear()
            batch, self._outbox = self._outbox, []
            batch = [request for request in batch if request.name in self._waiting]
            if not batch:
                continue
            try:
                await host_answer(self._engine.submit(batch), f"requests of engine {self._index}")
            except EngineError as error:
                names = [request.name for request in batch]
                self._fail(names, error)
                await self._abort(names)  # it may have them

    async def _receive_all(self) -> None:
        while not self._closed:
            await self._wake_receiver.wait()
            while (self._waiting or self._cancelled) and not self._closed:
                await self._receive()
            if not self._closed:
                self._wake_receiver.clear()

    async def _receive(self) -> None:
        """Ask once, and hand out the replies."""
        asked = asyncio.ensure_future(self._engine.collect())
        try:
            while not asked.done():  # it gives each reply once, so its answer is never thrown away
                await asyncio.wait({asked}, timeout=_COLLECT_S + ANSWER_S)
                if not asked.done():
                    cause = f"engine {self._index}: no answer within {_COLLECT_S + ANSWER_S:g} s"
                    self._fail(list(self._waiting), EngineError(cause))
            answers = asked.result()
        except EngineError as error:
            self._fail(list(self._waiting), error)
            self._cancelled.clear()
            await asyncio.sleep(1.0)  # until it is replaced
            return
        finally:
            asked.cancel()
        await self._hand_out(answers)
        self._check_progress(answers.progress)

    async def _hand_out(self, answers: Answers) -> None:
        for name, output_ids in answers.partial:
            if heard := self._listeners.get(name):
                heard(output_ids)
        for place, (name, reply) in enumerate(answers.replies, 1):
            if take := self._take_of(name):
                take(name, reply)
            else:
                self._cancelled.pop(name, self._drop_reply)(reply)
            if place % _AT_ONCE == 0:
                await asyncio.sleep(0)

    def _drop_reply(self, reply: Reply) -> None:
        self._drop(own_uris(reply))

    def _fail(self, names: Iterable[str], error: EngineError) -> None:
        for name in names:
            if take := self._take_of(name):
                take(name, error)

    def _take_of(self, name: str) -> Take | None:
        """The receiver of a reply, which gets it once."""
        self._listeners.pop(name, None)
        return self._waiting.pop(name, None)

    async def _abort(self, names: Sequence[str]) -> None:
        with contextlib.suppress(EngineError):  # then it fails them too, or drops their replies
            await host_answer(self._engine.abort(names), f"abort of engine {self._index}")

    # --- progress ---------------------------------------------------------------------------------
    @property
    def idle_s(self) -> float:
        """Seconds since it made progress, as far as a host says; infinite without requests."""
        if not self._waiting or not self._seen:
            return math.inf
        return asyncio.get_running_loop().time() - self._seen

    def _check_progress(self, progress: int) -> None:
        now = asyncio.get_running_loop().time()
        if progress != self._progress and self._progress >= 0:  # the first number says nothing
            self._progress_at = self._seen = now
        self._progress = progress
        if not self._waiting:
            self._progress_at = now
        elif now - self._progress_at > self._limit_s:
            self._progress_at = now + _PARTIALS_S  # not again before these are back
            self._tasks.spawn(self._give_up(list(self._waiting)))

    async def _give_up(self, names: Sequence[str]) -> None:
        """Get back what they have sampled; the rest is lost."""
        log.warning(
            "engine %d made no progress for %g s: %d requests are aborted",
            self._index,
            self._limit_s,
            len(names),
        )
        self._stalled(len(names))
        await self._abort(names)
        await asyncio.sleep(_PARTIALS_S)
        cause = f"engine {self._index} made no progress for {self._limit_s:g} s"
        self._fail(names, EngineError(cause))
