"""Weight updates of an engine, the host's part of a publish session; its sleep and wake.

By default a commit aborts the running requests one by one through /abort_request and waits for
their partial output; with rollout.in_flight_mode in_place or retract they run through it
(`moerl.engine.plugin.in_flight`).  With adapter slots a commit adds an adapter and running
requests end under theirs (`moerl.engine.host.adapter_slots`).  Rejected: SGLang's engine-wide
pause, which polls once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from moerl.core.errors import EngineError
from moerl.core.messages import (
    AbortUpdate,
    AskEngine,
    CommitUpdate,
    EngineVersion,
    MemoryState,
    Message,
    Ok,
    PrepareUpdate,
    Refused,
    RelayUpdate,
    SessionMessage,
    SleepEngine,
    UpdateDone,
    UpdatePrepared,
    UpdateVerified,
    VerifyUpdate,
    WakeEngine,
    WriteUpdate,
)
from moerl.core.rpc import Keys, ask
from moerl.core.types import PolicyVersion
from moerl.engine.host.adapter_slots import AdapterSlots
from moerl.engine.host.health import EngineHealth
from moerl.engine.host.sglang_client import EngineClient
from moerl.engine.host.sglang_server import EngineServer
from moerl.engine.node_span import Follower
from moerl.engine.protocol import ADAPTER, MEMORY_PARTS, SLEEP, WAKE
from moerl.runtime.trace import Tracer
from moerl.weight_sync.receiver_names import UNCHANGED, Committed

_ABORT_S = 0.05  # between abort calls while requests are still in flight
_ROOM = 0.5  # share of a commit's time in which a slot may become free
_VERSIONS = 256  # a request that runs through more versions is refused

T = TypeVar("T")


class WeightUpdater:
    """Runs the weight updates of one engine; its version is the last that COMMIT confirmed.

    Raises EngineError: refused, late, or the engine is broken.
    """

    def __init__(
        self,
        health: EngineHealth,
        tracer: Tracer,
        *,
        mode: str,
        slots: AdapterSlots | None = None,
        followers: Sequence[Follower] = (),
    ) -> None:
        """Start at version 0.  mode: as in `moerl.engine.protocol`; slots: versions are
        adapters; followers: the engine's other nodes.
        """
        self._health, self._tracer, self._followers = health, tracer, followers
        self.mode, self.slots = mode, slots
        self.version = PolicyVersion(0, 0)
        self.served = [self.version]  # versions that a request may meet, ascending
        self.aborted = 0  # requests that the current update has interrupted
        self._commits = 0  # requests to servers, answered or not
        # Number of the commit in progress: the scheduler copies weights and answers nothing.
        self.attempt: int | None = None
        self.answered = 0  # commits that the server answered, in any way
        self._committing = asyncio.Lock()
        # The cost of the last COMMIT, until the next PREPARE: a controller that dies before it gets
        # it is replaced by a controller that passes the same COMMIT on again.
        self._closed: UpdateDone | None = None
        self._asleep: frozenset[str] = frozenset()  # of MEMORY_PARTS
        self._is_dirty = False  # the weights slept or were written, and no commit came since
        self._server: EngineServer | None = None
        self._client: EngineClient | None = None

    def attach(self, server: EngineServer, client: EngineClient, version: PolicyVersion) -> None:
        """A new server that serves `version`."""
        self._server, self._client = server, client
        self.version, self.served = version, [version]
        self._closed = None
        self._asleep, self._is_dirty = frozenset(), False
        if self.slots is not None:
            self.slots.clear()

    def detach(self) -> None:
        """Forget the server, which is being stopped."""
        self._server = self._client = None

    async def session(self, message: SessionMessage) -> Message:
        """One step of a publish session (`moerl.weight_sync.receiver`), on all ranks of the engine.

        Raises EngineError: refused, late, or the engine is broken.  Requests run on until COMMIT.
        """
        match message:
            case PrepareUpdate():
                if message.writes_live:
                    self._expect_asleep()
                self._closed = None
                prepared = await self._receivers(message, UpdatePrepared, message.timeout_s)
                return UpdatePrepared(
                    tuple(reply.endpoints[0] for reply in prepared),
                    tuple(reply.starts[0] for reply in prepared),
                    prepared[0].layout,
                    self.version,
                    max(reply.rounds for reply in prepared),
                )
            case WriteUpdate():
                async with self._committing:  # no sleep takes the pages away meanwhile
                    self._expect_asleep()
                    self._is_dirty = True
                    await self._receivers(message, Ok, message.timeout_s)
                return Ok()
            case VerifyUpdate():
                async with self._committing:
                    if self._is_dirty:
                        self._expect_asleep()
                    verified = await self._receivers(message, UpdateVerified, message.timeout_s)
                return UpdateVerified(
                    tuple(reply.failed[0] for reply in verified),
                    "-".join(reply.digest for reply in verified),
                )
            case AbortUpdate() | RelayUpdate():
                await self._receivers(message, Ok, message.timeout_s)
                return Ok()
            case CommitUpdate():
                async with self._committing:
                    if self._closed is None or self.version != message.version:
                        self._closed = await self._commit(message)
                    return self._closed
            case AskEngine():
                cause = self._health.cause or ""
                return EngineVersion(self.version, cause, self._parts(), self._is_dirty)

    def _expect_asleep(self) -> None:
        """Live weights are touched.  Raises EngineError: they sleep, or requests may read them."""
        if "weights" in self._asleep or "kv_cache" not in self._asleep:
            raise EngineError(
                f"{UNCHANGED}: weights are written in place while the KV cache alone sleeps, here "
                f"{', '.join(self._parts()) or 'nothing'} does"
            )

    async def _receivers(
        self, message: SessionMessage, reply_type: type[T], timeout_s: float
    ) -> list[T]:
        """Send to the receivers of all ranks.  A rank that does not answer suspends the engine."""
        server = self._server
        if server is None or self._health.ended.is_set():
            raise self._health.failure()
        try:
            async with asyncio.timeout(timeout_s):
                asking = self._ask_all(server, message)
                replies = await self._health.guard(asking, self._health.ended)
        except TimeoutError as error:
            what = f"a rank did not answer {type(message).__name__} in {timeout_s:g} s"
            raise self._health.suspend(what) from error
        agreed: list[T] = []
        for rank, reply in enumerate(replies):
            if not isinstance(reply, reply_type):
                cause = reply.cause if isinstance(reply, Refused) else type(reply).__name__
                raise EngineError(f"engine {self._health.index}, rank {rank}: {cause}")
            agreed.append(reply)
        return agreed

    async def _ask_all(self, server: EngineServer, message: Message) -> list[Message]:
        nodes = await asyncio.gather(
            self.ask_receivers(server, message),
            *(follower.receive(message) for follower in self._followers),
        )
        return [answer for answers in nodes for answer in answers]

    @classmethod
    async def ask_receivers(cls, server: EngineServer, message: Message) -> list[Message]:
        """Answers of the receivers of one node, by rank."""
        asking = [
            asyncio.ensure_future(cls._ask(path, server.receiver_keys, message))
            for path in server.receiver_sockets
        ]
        try:
            return await asyncio.gather(*asking)
        finally:  # if one fails the others may hang with open sockets
            for one in asking:
                one.cancel()

    @staticmethod
    async def _ask(path: Path, keys: Keys, message: Message) -> Message:
        if not path.exists():
            raise EngineError(
                f"the engine has no receiver at {path}: SGLang did not load the plug-in of moerl"
            )
        return await ask(f"ipc://{path}", keys, message)

    async def _commit(self, update: CommitUpdate) -> UpdateDone:
        """Abort running requests unless the mode keeps them, then let all ranks copy at once."""
        client = self._client
        if client is None or self._health.ended.is_set():
            raise self._health.failure()
        if "weights" in self._asleep:
            raise EngineError(f"{UNCHANGED}: the engine's weights sleep")
        start_s, was_admitting = time.time(), self._health.cause is None
        mode = self.mode if was_admitting else ""
        if self.slots is not None:
            mode = ADAPTER
            await self._health.guard(self.slots.make_room(client, _ROOM * update.timeout_s))
        self.aborted = 0
        if not mode:
            self._health.admit.clear()
        try:
            async with asyncio.timeout(update.timeout_s):
                if not mode:
                    await self._drain(client)
                idle_s = time.time()
                self.served = [*self.served[-_VERSIONS:], update.version]
                self._commits += 1
                self.attempt = self._commits
                copying = client.commit(str(update.version), mode)
                done = await self._health.guard(copying, self._health.ended)
                self.answered += 1
        except (EngineError, TimeoutError) as error:
            self.answered += not isinstance(error, TimeoutError)
            if UNCHANGED in str(error):
                self.served.pop()
                self._health.let_in()
                raise
            detail = str(error) or f"no answer within {update.timeout_s:g} s"
            raise self._health.suspend(
                f"the commit of {update.version} failed: {detail}"
            ) from error
        except BaseException as error:  # cancelled, or a bug: what the ranks did is unknown
            self._health.suspend(f"the commit of {update.version} was given up: {error!r}")
            raise
        finally:
            self.attempt = None
        if self.slots is not None:
            self.slots.add(update.version)
        self._is_dirty = False
        self._health.reopen()
        self.version = update.version
        return self._cost(done, start_s, idle_s, through=bool(mode))

    def _cost(self, done: Committed, start_s: float, idle_s: float, *, through: bool) -> UpdateDone:
        """The cost of an update.  through: requests ran on."""
        end_s = time.time()
        pause_s = done.seconds if through else end_s - idle_s
        self._tracer.add(
            "update",
            start_s,
            end_s,
            version=str(self.version),
            drain_s=idle_s - start_s,  # aborting running requests
            reach_s=done.begun_s - idle_s,  # request, forward pass in flight, claims of all ranks
            commit_s=done.seconds,
            commit_cpu_s=done.cpu_s,
            pause_s=pause_s,
        )
        return UpdateDone(pause_s, self.aborted, commit_s=done.seconds, recomputed=done.recomputed)

    async def _drain(self, client: EngineClient) -> None:
        """Abort repeatedly until no request is in flight: one may arrive during an abort call."""
        while not self._health.idle.is_set():
            await self._health.guard(client.abort_all(), self._health.ended)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._health.idle.wait(), _ABORT_S)

    # --- memory -----------------------------------------------------------------------------------
    async def move_memory(self, message: SleepEngine | WakeEngine) -> MemoryState:
        """Sleep or wake; the present state is answered without the server.

        Raises EngineError: nothing was changed, or the server ends, since its memory is in an
        unknown state.
        """
        async with self._committing:
            sleeps, wanted = isinstance(message, SleepEngine), set(message.parts)
            if (
                not sleeps
                and "kv_cache" in wanted
                and (self._is_dirty or "weights" in self._asleep)
            ):
                raise EngineError(f"{UNCHANGED}: engine {message.engine} has no verified weights")
            parts = sorted(wanted - self._asleep if sleeps else wanted & self._asleep)
            if not parts:
                return self._memory()
            return await self._move(SLEEP if sleeps else WAKE, parts, message.timeout_s)

    async def _move(self, what: str, parts: Sequence[str], timeout_s: float) -> MemoryState:
        client, health = self._client, self._health
        if client is None or health.ended.is_set():
            raise health.failure()
        self.aborted, before = 0, health.is_asleep
        health.is_asleep = True
        health.admit.clear()
        try:
            async with asyncio.timeout(timeout_s):
                if not self.mode and not before:  # requests go back, to be continued when it wakes
                    await self._drain(client)
                moved = await health.guard(client.move_memory(what, parts), health.ended)
        except (EngineError, TimeoutError) as error:
            if UNCHANGED in str(error):
                health.is_asleep = before
                health.let_in()
                raise
            health.close(f"{what} of {', '.join(parts)} failed: {error or 'no answer in time'}")
            raise health.failure() from error
        except BaseException as error:  # cancelled, or a bug: what the ranks did is unknown
            health.close(f"{what} of {', '.join(parts)} was given up: {error!r}")
            raise
        if what == SLEEP:
            self._asleep |= set(parts)
            self._is_dirty |= "weights" in parts
        else:
            self._asleep -= set(parts)
        health.is_asleep = bool(self._asleep)
        health.let_in()
        return replace(
            self._memory(),
            seconds=moved.seconds,
            num_bytes=moved.num_bytes,
            recomputed=moved.recomputed,
            aborted=self.aborted,
        )

    def _memory(self) -> MemoryState:
        return MemoryState(self._parts(), self._is_dirty)

    def _parts(self) -> tuple[str, ...]:
        return tuple(part for part in MEMORY_PARTS if part in self._asleep)
