"""How an engine gets new weights: publish sessions, and the broadcast update of SGLang's own.

By default an update aborts the running requests one by one through /abort_request and waits for
their partial output; with rollout.in_flight_mode in_place or retract they run through the commit of
a session (`moerl.engine.in_flight`).  Rejected: SGLang's engine-wide pause, which polls once a
second.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from moerl.engine.client import EngineClient
from moerl.engine.gate import Gate
from moerl.engine.receiver import UNCHANGED
from moerl.engine.server import EngineServer
from moerl.errors import EngineError
from moerl.protocols import (
    AbortUpdate,
    AskEngine,
    CloseUpdate,
    CommitUpdate,
    EngineHolds,
    JoinSync,
    Message,
    Ok,
    OpenUpdate,
    PrepareUpdate,
    Refused,
    RelayUpdate,
    SessionMessage,
    UpdateClosed,
    UpdatePrepared,
    UpdateVerified,
    VerifyUpdate,
)
from moerl.trace import Tracer
from moerl.types import PolicyVersion
from moerl.wire import decode, encode

_ABORT_S = 0.05  # between abort calls while requests are still in flight
_VERSIONS = 256  # a request that runs through more versions than these is refused

T = TypeVar("T")


class _Update:
    """One open broadcast update."""

    def __init__(self, message: OpenUpdate, aborted: int, start_s: float, idle_s: float) -> None:
        self.message, self.aborted, self.start_s = message, aborted, start_s
        self.idle_s = idle_s  # unix time when the last interrupted request had returned
        self.posts: asyncio.Task[None] | None = None  # receives the buckets


class Updates:
    """Walks one engine through weight updates; its version is what COMMIT or an update confirmed.

    Raises EngineError: refused, late, or the engine is broken.
    """

    def __init__(
        self, gate: Gate, tracer: Tracer, token: str, *, timeout_s: float, mode: str
    ) -> None:
        """timeout_s: of each step of a broadcast update; mode: of `moerl.engine.in_flight`."""
        self._gate, self._tracer, self._token = gate, tracer, token
        self._timeout_s, self._mode = timeout_s, mode
        self.version = PolicyVersion(0, 0)
        self.served = [self.version]  # versions that a request may meet, ascending
        self.aborted = 0  # requests that the update under way has interrupted
        self._server: EngineServer | None = None
        self._client: EngineClient | None = None
        self._join: asyncio.Task[None] | None = None
        self._update: _Update | None = None
        self._expiry: asyncio.TimerHandle | None = None

    def attach(self, server: EngineServer, client: EngineClient, version: PolicyVersion) -> None:
        """A new server, which serves `version`."""
        self._server, self._client = server, client
        self.version, self.served = version, [version]

    async def stop(self) -> None:
        """Forget the server and give up what is under way."""
        if self._expiry is not None:
            self._expiry.cancel()
        for task in (self._join, self._update.posts if self._update else None):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, EngineError):
                    await task
        self._join = self._update = self._server = self._client = None

    # --- SGLang's own update ---------------------------------------------------------------------
    async def join(self, message: JoinSync) -> None:
        """Start joining the trainer's group and return: its rank 0 waits for this engine."""
        self._join = asyncio.create_task(self._join_group(self._alive(), message))

    async def open(self, message: OpenUpdate) -> None:
        """Interrupt what runs, begin the session, and start receiving the buckets in order.

        Returns once the engine agreed: the sender must not broadcast before.
        """
        client = self._alive()
        if self._update is not None:
            raise EngineError(f"engine {self._gate.index}: an update is open already")
        if message.version < self.version:
            raise EngineError(
                f"engine {self._gate.index}: {message.version} is older than {self.version}, "
                "which it serves"
            )
        start_s = time.time()
        self._gate.admit.clear()
        self.aborted = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._join is not None:
                    await self._gate.guard(self._join)
                await self._drain(client)
                self._update = _Update(message, self.aborted, start_s, time.time())
                await self._gate.guard(client.begin_update())
        except (EngineError, TimeoutError) as error:
            raise self._dirty("the update could not begin", error) from error
        self._update.posts = asyncio.create_task(self._receive(client, message))
        self._expiry = asyncio.get_running_loop().call_later(
            self._timeout_s, self._gate.close, "an update was opened but never closed"
        )

    async def close(self, message: CloseUpdate) -> UpdateClosed:
        """Wait for the last bucket, end the session, verify the version, admit requests again."""
        client, update = self._alive(), self._update
        if update is None or not update.posts or update.message.version != message.version:
            raise EngineError(f"engine {self._gate.index}: no update to {message.version} is open")
        if self._expiry is not None:
            self._expiry.cancel()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._gate.guard(update.posts)
                await self._gate.guard(client.end_update())
                served = await self._gate.guard(client.weight_version())
            if served != str(message.version):
                raise EngineError(f"it serves {served} after an update to {message.version}")
        except (EngineError, TimeoutError) as error:
            raise self._dirty(f"the update to {message.version} failed", error) from error
        self.version, self._update = message.version, None
        self._gate.admit.set()
        end_s = time.time()
        self._tracer.add("update", update.start_s, end_s, version=str(message.version))
        return UpdateClosed(pause_s=end_s - update.idle_s, aborted=update.aborted)

    async def _drain(self, client: EngineClient, until: asyncio.Event | None = None) -> None:
        """Abort until nothing is in flight: a request may be on its way while the others go."""
        while not self._gate.idle.is_set():
            await self._gate.guard(client.abort_all(), until)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gate.idle.wait(), _ABORT_S)

    async def _join_group(self, client: EngineClient, message: JoinSync) -> None:
        """SGLang's scheduler does nothing else until the group is complete: bound the wait."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await client.join_group(
                    master_address=message.address,
                    master_port=message.port,
                    rank_offset=1,
                    world_size=message.world_size,
                    group_name=message.group,
                    backend=message.backend,
                )
        except (EngineError, TimeoutError) as error:
            raise self._dirty(f"joining sync group {message.group} failed", error) from error

    async def _receive(self, client: EngineClient, message: OpenUpdate) -> None:
        last = len(message.buckets) - 1
        try:
            for position, bucket in enumerate(message.buckets):
                await client.receive_bucket(
                    **msgspec.to_builtins(bucket),
                    group_name=message.group,
                    load_format="flattened_bucket",
                    flush_cache=position == last,
                    weight_version=str(message.version) if position == last else None,
                )
        except EngineError as error:
            raise self._dirty(f"the update to {message.version} failed", error) from error

    # --- publish sessions ------------------------------------------------------------------------
    async def session(self, message: SessionMessage) -> Message:
        """One step of a publish session (`moerl.engine.receiver`), on all ranks of the engine.

        Raises EngineError: refused, late, or the engine is broken.  Requests run on until COMMIT.
        """
        match message:
            case PrepareUpdate():
                prepared = await self._receivers(message, UpdatePrepared, message.timeout_s)
                return UpdatePrepared(
                    tuple(reply.endpoints[0] for reply in prepared),
                    tuple(reply.starts[0] for reply in prepared),
                    prepared[0].layout,
                    self.version,
                )
            case VerifyUpdate():
                verified = await self._receivers(message, UpdateVerified, message.timeout_s)
                return UpdateVerified(
                    tuple(reply.failed[0] for reply in verified),
                    "-".join(reply.digest for reply in verified),
                )
            case AbortUpdate() | RelayUpdate():
                await self._receivers(message, Ok, message.timeout_s)
                return Ok()
            case CommitUpdate():
                return await self._commit(message)
            case AskEngine():
                return EngineHolds(self.version, self._gate.cause or "")

    async def _receivers(
        self, message: SessionMessage, reply_type: type[T], timeout_s: float
    ) -> list[T]:
        """Ask the receivers of all ranks.  A rank that does not answer suspends the engine."""
        server = self._server
        if server is None or self._gate.ended.is_set():
            raise self._gate.failure()
        try:
            async with asyncio.timeout(timeout_s):
                asking = self._ask_all(server.doors, message)
                replies = await self._gate.guard(asking, self._gate.ended)
        except TimeoutError as error:
            what = f"a rank did not answer {type(message).__name__} in {timeout_s:g} s"
            raise self._gate.suspend(what) from error
        agreed: list[T] = []
        for rank, reply in enumerate(replies):
            if not isinstance(reply, reply_type):
                cause = reply.cause if isinstance(reply, Refused) else type(reply).__name__
                raise EngineError(f"engine {self._gate.index}, rank {rank}: {cause}")
            agreed.append(reply)
        return agreed

    async def _ask_all(self, doors: Sequence[Path], message: Message) -> list[Message]:
        asking = [asyncio.ensure_future(self._ask(door, message)) for door in doors]
        try:
            return await asyncio.gather(*asking)
        finally:  # where one fails the others may hang, each with its socket
            for one in asking:
                one.cancel()

    async def _ask(self, door: Path, message: Message) -> Message:
        """A socket of its own per question: a late reply never answers a later one."""
        if not door.exists():
            raise EngineError(
                f"engine {self._gate.index} has no receiver at {door}: SGLang did not load the "
                "plug-in of moerl"
            )
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"ipc://{door}")
            await socket.send_multipart([self._token.encode(), encode(message)])
            return decode((await socket.recv_multipart())[-1])

    async def _commit(self, message: CommitUpdate) -> UpdateClosed:
        """Interrupt what runs unless it may run on, let all ranks copy at once."""
        client = self._client
        if client is None or self._gate.ended.is_set():
            raise self._gate.failure()
        start_s, was_admitting = time.time(), self._gate.cause is None
        mode = self._mode if was_admitting else ""
        self.aborted = 0
        if not mode:
            self._gate.admit.clear()
        try:
            async with asyncio.timeout(message.timeout_s):
                if not mode:
                    await self._drain(client, self._gate.ended)
                idle_s = time.time()
                self.served = [*self.served[-_VERSIONS:], message.version]
                copying = client.commit(str(message.version), mode)
                done = await self._gate.guard(copying, self._gate.ended)
        except (EngineError, TimeoutError) as error:
            if UNCHANGED in str(error):
                self.served.pop()
                if was_admitting:
                    self._gate.admit.set()
                raise
            detail = str(error) or f"no answer within {message.timeout_s:g} s"
            raise self._gate.suspend(f"the commit of {message.version} failed: {detail}") from error
        except BaseException as error:  # cancelled, or a bug: nobody knows what the ranks did
            self._gate.suspend(f"the commit of {message.version} was given up: {error!r}")
            raise
        self._gate.reopen()
        self.version = message.version
        end_s = time.time()
        pause_s = done.seconds if mode else end_s - idle_s
        self._tracer.add(
            "update",
            start_s,
            end_s,
            version=str(message.version),
            drain_s=idle_s - start_s,  # aborting what runs
            reach_s=done.begun_s - idle_s,  # request, forward pass in flight, claims of all ranks
            commit_s=done.seconds,
            commit_cpu_s=done.cpu_s,
            pause_s=pause_s,
        )
        return UpdateClosed(
            pause_s, self.aborted, commit_s=done.seconds, recomputed=done.recomputed
        )

    # --- failure ---------------------------------------------------------------------------------
    def _dirty(self, what: str, error: BaseException) -> EngineError:
        detail = str(error) or f"no answer within {self._timeout_s:g} s"
        self._gate.close(f"{what}: {detail}")
        return self._gate.failure()

    def _alive(self) -> EngineClient:
        self._gate.usable()
        if self._client is None:
            raise self._gate.failure()
        return self._client
