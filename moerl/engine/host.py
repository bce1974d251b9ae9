"""The host of one SGLang server: the `Engine` seam of `moerl.protocols`, as a plain class.

It starts the server, sends requests, checks and seals every record before anybody sees it, and
walks the server through weight updates.  One event loop owns it.

State: `_admit` is set while requests may be sent (cleared during an update); `_idle` is set while
none is in flight; `_cause` says why the engine is unusable.  An engine that is *broken* (its server
died, or a broadcast update failed half-way) stays so until it is started again.  One that is
*suspended* (it did not answer in time, or a commit failed) serves nothing until a whole publish
session succeeded, which writes every byte of its weights.

By default an update aborts the running requests one by one through /abort_request and waits for
their partial output; with rollout.in_flight_mode in_place or retract they run through the commit of
a session (`moerl.engine.in_flight`).  Rejected: SGLang's engine-wide pause, which polls once a
second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from moerl.blob.store import BlobStore
from moerl.config.schema import EngineConfig, ReplayConfig
from moerl.engine import in_flight, records
from moerl.engine.client import BadRequest, EngineClient
from moerl.engine.receiver import UNCHANGED
from moerl.engine.records import InFlight, ModelFacts, Reply
from moerl.engine.server import EngineServer
from moerl.engine.support import PROVEN
from moerl.errors import BlobError, EngineError, RecordError
from moerl.protocols import (
    AbortUpdate,
    AskEngine,
    CloseUpdate,
    CommitUpdate,
    EngineHolds,
    EngineStatus,
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
    decode,
    encode,
)
from moerl.rundir import RunDir
from moerl.trace import Tracer
from moerl.types import (
    Array,
    BlobRef,
    Finish,
    GenerateRequest,
    MaskBlob,
    PolicyVersion,
    RoutingBlob,
    SamplingParams,
    Segment,
    VersionSpan,
)

log = logging.getLogger(__name__)

_WATCH_S = 0.5  # between looks at the server process
_ABORT_S = 0.05  # between abort calls while requests are still in flight
_VERSIONS = 256  # a request that runs through more versions than these is refused

T = TypeVar("T")


class _Update:
    """One open update session."""

    def __init__(self, message: OpenUpdate, aborted: int, start_s: float, idle_s: float) -> None:
        self.message, self.aborted, self.start_s = message, aborted, start_s
        self.idle_s = idle_s  # unix time when the last interrupted request had returned
        self.posts: asyncio.Task[None] | None = None  # receives the buckets


class EngineHost:
    """One engine.  Raises EngineError with cause and log tail once its server is dead."""

    features = PROVEN  # deployment features proven with replay; any other is refused

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        model_path: Path,
        facts: ModelFacts,
        replay: ReplayConfig,
        store: BlobStore,
        run: RunDir,
        token: str,
        *,
        update_timeout_s: float = 120.0,
        in_flight_mode: str = "abort_resume",
    ) -> None:
        self.index, self.config, self.model_path, self.facts = index, config, model_path, facts
        self._store, self._run, self._token = store, run, token
        self._update_timeout_s = update_timeout_s
        self._routing = replay.routing == "R3" and bool(facts.moe_layers)
        self._tracer = Tracer(run.trace, f"engine{index}")
        retract = in_flight.RETRACT_AUDIT if replay.audit else in_flight.RETRACT
        self._mode = {"in_place": in_flight.IN_PLACE, "retract": retract}.get(in_flight_mode, "")
        self._version, self._layout = PolicyVersion(0, 0), ""
        self._served = [self._version]  # versions that a request may meet, ascending
        self._server: EngineServer | None = None
        self._client: EngineClient | None = None
        self._watch: asyncio.Task[None] | None = None
        self._join: asyncio.Task[None] | None = None
        self._update: _Update | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._cause: str | None = "it was not started"
        self._broken = asyncio.Event()  # calls fail; also while suspended
        self._ended = asyncio.Event()  # broken for good
        self._admit = asyncio.Event()
        self._idle = asyncio.Event()
        self._in_flight = self._running = 0
        self._serial = count()
        self._generated, self._busy_s, self._busy_since = 0, 0.0, 0.0
        self._aborted = 0
        self._refused: Counter[str] = Counter()

    # --- life ------------------------------------------------------------------------------------
    async def start(self, version: PolicyVersion) -> EngineStatus:
        """Start a server that serves the model folder as `version`; also restarts a dead one."""
        await self.stop()
        with self._tracer.span("start"):
            server = EngineServer(
                self.config,
                self.model_path,
                routing=self._routing,
                version=str(version),
                token=self._token,
                log=self._run.logs / f"engine{self.index}.log",
            )
            client = EngineClient(server.url, self._token)
            try:
                await server.start(client)
            except BaseException:
                await client.close()
                raise
        assert server.layout is not None, "a server that started knows its layout"
        self._layout = server.layout.fingerprint()
        log.info("engine %d: weight layout %s: %s", self.index, self._layout, server.layout)
        self._server, self._client, self._version = server, client, version
        self._served = [version]
        self._cause, self._broken, self._ended = None, asyncio.Event(), asyncio.Event()
        self._admit.set()
        self._idle.set()
        self._watch = asyncio.create_task(self._watch_server(server))
        return await self.status()

    async def stop(self) -> None:
        """End the server and everything it started; a host that is not running stays so."""
        self._break("it was stopped")
        if self._expiry is not None:
            self._expiry.cancel()
        for task in (self._watch, self._join, self._update.posts if self._update else None):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, EngineError):
                    await task
        self._watch = self._join = self._update = None
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.stop()
        self._client = self._server = None

    async def status(self) -> EngineStatus:
        busy = time.monotonic() - self._busy_since if self._in_flight else 0.0
        return EngineStatus(
            engine=self.index,
            version=self._version,
            pid=self._server.pid if self._server else 0,
            running=self._running,
            generated_tokens=self._generated,
            busy_s=self._busy_s + busy,
            refused=dict(self._refused),
            layout=self._layout,
        )

    async def watch(self) -> None:
        """Returns never; raises EngineError when the engine breaks for good."""
        await self._ended.wait()
        raise self._failure()

    async def checksum(self) -> dict[str, Any]:
        """Per-tensor checksums of the weights as served."""
        return await self._guard(self._alive().checksum())

    # --- generation ------------------------------------------------------------------------------
    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Segment | RecordError]:
        """Run all requests as one engine call; each record is checked and sealed on return.

        A record that breaks the contract comes back as its RecordError, the others are unaffected.
        During a weight update the call waits and is then sent to the new version.
        """
        # One /generate call has one routed_experts_start_len, so requests that need rows from
        # different positions (resumed ones) go out side by side in calls of their own.
        calls: dict[int, list[int]] = {}
        for position, request in enumerate(requests):
            calls.setdefault(records.first_row(request), []).append(position)
        results = await asyncio.gather(
            *(self._call([requests[i] for i in group]) for group in calls.values())
        )
        ordered: dict[int, Segment | RecordError] = {}
        for group, segments in zip(calls.values(), results, strict=True):
            ordered.update(zip(group, segments, strict=True))
        return [ordered[position] for position in range(len(requests))]

    async def _call(self, requests: list[GenerateRequest]) -> list[Segment | RecordError]:
        while not self._admit.is_set():  # again: an update may open before this task gets to run
            await self._guard(self._admit.wait())
        start_s, version = time.time(), self._version
        self._enter(len(requests))
        try:
            replies = await self._guard(self._alive().generate(self._body(requests)))
            self._aborted += sum(_was_aborted(reply) for reply in replies)
        except BadRequest as error:
            # SGLang refuses a batch as a whole; find the requests it means.
            replies = None
            if len(requests) == 1:
                return [self._refuse(RecordError("request", f"{requests[0].rollout_id}: {error}"))]
        finally:
            self._leave(len(requests))
        if replies is None:
            return [segment for request in requests for segment in await self._call([request])]
        end_s = time.time()
        shared = records.SharedPrompts(requests)
        segments = [
            self._segment(reply, request, version, start_s, end_s, shared)
            for reply, request in zip(replies, requests, strict=True)
        ]
        tokens = sum(
            len(piece.output_ids) for s in segments if isinstance(s, Segment) for piece in s.pieces
        )
        self._generated += tokens
        self._tracer.add(
            "generate",
            start_s,
            end_s,
            requests=len(requests),
            prompt_tokens=sum(len(request.token_ids) for request in requests),
            tokens=tokens,
            version=str(version),
        )
        return segments

    def _body(self, requests: Sequence[GenerateRequest]) -> dict[str, Any]:
        truncates = [request.sampling.truncates for request in requests]
        return {
            "rid": [f"{r.rollout_id}-s{r.segment}-{next(self._serial)}" for r in requests],
            "input_ids": [request.token_ids.tolist() for request in requests],
            "sampling_params": [_sampling(request.sampling) for request in requests],
            "return_logprob": [not truncated for truncated in truncates],
            "logprob_start_len": -1,
            "return_sampling_mask": truncates,
            "sampling_logprobs_mode": ["selected" if cut else None for cut in truncates],
            "return_routed_experts": self._routing,
            "routed_experts_start_len": records.first_row(requests[0]) if self._routing else 0,
            "stream": False,
        }

    def _segment(
        self,
        reply: dict[str, Any],
        request: GenerateRequest,
        version: PolicyVersion,
        start_s: float,
        end_s: float,
        shared: records.SharedPrompts,
    ) -> Segment | RecordError:
        later = tuple(sorted({v for v in self._served if v >= version}))
        try:
            parsed = records.parse(
                reply,
                request,
                version=version,
                facts=self.facts,
                routing=self._routing,
                in_flight=InFlight(
                    later, self._mode == in_flight.IN_PLACE, self._mode == in_flight.RETRACT_AUDIT
                )
                if self._mode
                else None,
            )
        except RecordError as error:
            return self._refuse(error)
        try:
            first, *rest = [
                self._piece(part, asked, version, start_s, end_s, shared)
                for asked, part in records.cut(parsed, request)
            ]
        except BlobError as error:  # the disk is full
            return self._refuse(RecordError("blob", f"{request.rollout_id}: {error}"))
        return replace(first, rest=tuple(rest))

    def _piece(
        self,
        parsed: Reply,
        request: GenerateRequest,
        version: PolicyVersion,
        start_s: float,
        end_s: float,
        shared: records.SharedPrompts,
    ) -> Segment:
        """Seal what one version of the weights sampled."""
        span = parsed.spans[0] if parsed.spans else VersionSpan(0, version)
        version = span.version
        prompt, routing, audit, mask = self._seal(parsed, request, version, shared)
        return Segment(
            rollout_id=request.rollout_id,
            output_ids=parsed.output_ids,
            logprobs=parsed.logprobs,
            version=version,
            finish=parsed.finish,
            routing=routing,
            sampling_mask=mask,
            audit_rows=audit,
            engine=self.index,
            cached_tokens=parsed.cached_tokens,
            start_s=start_s,
            end_s=end_s,
            prompt_rows=prompt,
            kept_kv=span.kept_kv,
        )

    def _seal(
        self,
        parsed: Reply,
        request: GenerateRequest,
        version: PolicyVersion,
        shared: records.SharedPrompts,
    ) -> tuple[RoutingBlob | None, RoutingBlob | None, RoutingBlob | None, MaskBlob | None]:
        """Write all arrays of one segment as one blob: (prompt rows, routing, audit, mask).

        Prompt rows that a sibling of the same call recorded alike are named, not written again.
        """
        own, prompt_rows, prompt = parsed.routing, None, None
        split = shared.split(request, own)
        if own is not None and split:
            prompt_rows, own = np.ascontiguousarray(own[:, :split]), own[:, split:]
            prompt = shared.find(request, prompt_rows)
            own = np.ascontiguousarray(own)
        new_prompt = prompt_rows if prompt is None else None
        arrays: list[Array] = [rows for rows in (new_prompt, own, parsed.audit) if rows is not None]
        arrays += list(parsed.mask or ())
        if not arrays:
            return None, None, None, None
        name = f"{request.rollout_id}-s{request.segment}.{request.num_sampled}"
        refs = iter(self._store.seal(name, arrays))
        routing = audit = mask = None
        if new_prompt is not None:
            prompt = self._rows(next(refs), 0, version)
            shared.keep(request, new_prompt, prompt)
        if own is not None:
            routing = self._rows(next(refs), request.rows_from + split, version)
        if parsed.audit is not None:
            audit = self._rows(next(refs), 0, version)
        if parsed.mask is not None:
            mask = MaskBlob(next(refs), next(refs), request.num_sampled, len(parsed.output_ids))
        return prompt, routing, audit, mask

    def _rows(self, ref: BlobRef, begin: int, version: PolicyVersion) -> RoutingBlob:
        return RoutingBlob(
            ids=ref,
            row_begin=begin,
            row_end=begin + ref.shape[1],
            version=version,
            layers=self.facts.moe_layers,
            num_experts=self.facts.num_experts,
        )

    def _refuse(self, error: RecordError) -> RecordError:
        self._refused[error.reason] += 1
        return error

    # --- weight updates --------------------------------------------------------------------------
    async def join_sync(self, message: JoinSync) -> None:
        """Start joining the trainer's group and return: its rank 0 waits for this engine."""
        self._join = asyncio.create_task(self._join_group(self._alive(), message))

    async def open_update(self, message: OpenUpdate) -> None:
        """Interrupt what runs, begin the session, and start receiving the buckets in order.

        Returns once the engine agreed: the sender must not broadcast before.
        """
        client = self._alive()
        if self._update is not None:
            raise EngineError(f"engine {self.index}: an update is open already")
        start_s = time.time()
        self._admit.clear()
        self._aborted = 0
        try:
            async with asyncio.timeout(self._update_timeout_s):
                if self._join is not None:
                    await self._guard(self._join)
                await self._drain(client)
                self._update = _Update(message, self._aborted, start_s, time.time())
                await self._guard(client.begin_update())
        except (EngineError, TimeoutError) as error:
            raise self._dirty("the update could not begin", error) from error
        self._update.posts = asyncio.create_task(self._receive(client, message))
        self._expiry = asyncio.get_running_loop().call_later(
            self._update_timeout_s, self._break, "an update was opened but never closed"
        )

    async def close_update(self, message: CloseUpdate) -> UpdateClosed:
        """Wait for the last bucket, end the session, verify the version, admit requests again."""
        client, update = self._alive(), self._update
        if update is None or not update.posts or update.message.version != message.version:
            raise EngineError(f"engine {self.index}: no update to {message.version} is open")
        if self._expiry is not None:
            self._expiry.cancel()
        try:
            async with asyncio.timeout(self._update_timeout_s):
                await self._guard(update.posts)
                await self._guard(client.end_update())
                served = await self._guard(client.weight_version())
            if served != str(message.version):
                raise EngineError(f"it serves {served} after an update to {message.version}")
        except (EngineError, TimeoutError) as error:
            raise self._dirty(f"the update to {message.version} failed", error) from error
        self._version, self._update = message.version, None
        self._admit.set()
        end_s = time.time()
        self._tracer.add("update", update.start_s, end_s, version=str(message.version))
        return UpdateClosed(pause_s=end_s - update.idle_s, aborted=update.aborted)

    async def _drain(self, client: EngineClient, until: asyncio.Event | None = None) -> None:
        """Abort until nothing is in flight: a request may be on its way while the others go."""
        while not self._idle.is_set():
            await self._guard(client.abort_all(), until)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), _ABORT_S)

    async def _join_group(self, client: EngineClient, message: JoinSync) -> None:
        """SGLang's scheduler does nothing else until the group is complete: bound the wait."""
        try:
            async with asyncio.timeout(self._update_timeout_s):
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
                    self._version,
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
                return EngineHolds(self._version, self._cause or "")

    async def _receivers(
        self, message: SessionMessage, reply_type: type[T], timeout_s: float
    ) -> list[T]:
        """Ask the receivers of all ranks.  A rank that does not answer suspends the engine."""
        server = self._server
        if server is None or self._ended.is_set():
            raise self._failure()
        try:
            async with asyncio.timeout(timeout_s):
                replies = await self._guard(self._ask_all(server.doors, message), self._ended)
        except TimeoutError as error:
            what = f"a rank did not answer {type(message).__name__} in {timeout_s:g} s"
            raise self._suspend(what) from error
        agreed: list[T] = []
        for rank, reply in enumerate(replies):
            if not isinstance(reply, reply_type):
                cause = reply.cause if isinstance(reply, Refused) else type(reply).__name__
                raise EngineError(f"engine {self.index}, rank {rank}: {cause}")
            agreed.append(reply)
        return agreed

    async def _ask_all(self, doors: Sequence[Path], message: Message) -> list[Message]:
        return await asyncio.gather(*(self._ask(door, message) for door in doors))

    async def _ask(self, door: Path, message: Message) -> Message:
        """A socket of its own per question: a late reply never answers a later one."""
        if not door.exists():
            raise EngineError(
                f"engine {self.index} has no receiver at {door}: SGLang did not load the plug-in "
                "of moerl"
            )
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"ipc://{door}")
            await socket.send_multipart([self._token.encode(), encode(message)])
            return decode((await socket.recv_multipart())[-1])

    async def _commit(self, message: CommitUpdate) -> UpdateClosed:
        """Interrupt what runs unless it may run on, let all ranks copy at once."""
        client = self._client
        if client is None or self._ended.is_set():
            raise self._failure()
        start_s, was_admitting = time.time(), self._cause is None
        mode = self._mode if was_admitting else ""
        self._aborted = 0
        if not mode:
            self._admit.clear()
        try:
            async with asyncio.timeout(message.timeout_s):
                if not mode:
                    await self._drain(client, self._ended)
                idle_s = time.time()
                self._served = [*self._served[-_VERSIONS:], message.version]
                done = await self._guard(client.commit(str(message.version), mode), self._ended)
        except (EngineError, TimeoutError) as error:
            if UNCHANGED in str(error):
                self._served.pop()
                if was_admitting:
                    self._admit.set()
                raise
            detail = str(error) or f"no answer within {message.timeout_s:g} s"
            raise self._suspend(f"the commit of {message.version} failed: {detail}") from error
        self._version = message.version
        if self._cause is not None:
            self._cause, self._broken = None, asyncio.Event()
        self._admit.set()
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
            pause_s=pause_s,
        )
        return UpdateClosed(
            pause_s, self._aborted, commit_s=done.seconds, recomputed=done.recomputed
        )

    # --- failure ---------------------------------------------------------------------------------
    async def _watch_server(self, server: EngineServer) -> None:
        while (cause := server.death()) is None:
            await asyncio.sleep(_WATCH_S)
        self._break(f"{cause}\n{server.log_tail()}")

    def _break(self, cause: str) -> None:
        """Make every pending and later call fail; the first cause of a break stays."""
        if self._cause is None or not self._ended.is_set():
            self._cause = cause
        self._admit.clear()
        self._broken.set()
        self._ended.set()

    def _suspend(self, cause: str) -> EngineError:
        """Fail what is in flight and admit nothing until a publish session succeeds."""
        self._cause = self._cause or cause
        self._admit.clear()
        self._broken.set()
        return self._failure()

    def _dirty(self, what: str, error: BaseException) -> EngineError:
        detail = str(error) or f"no answer within {self._update_timeout_s:g} s"
        self._break(f"{what}: {detail}")
        return self._failure()

    def _failure(self) -> EngineError:
        return EngineError(f"engine {self.index} is not usable: {self._cause}")

    def _alive(self) -> EngineClient:
        if self._cause is not None or self._client is None:
            raise self._failure()
        return self._client

    async def _guard(self, work: Awaitable[T], until: asyncio.Event | None = None) -> T:
        """Await work, or raise as soon as the engine breaks (`until`: as soon as that is set)."""
        event = until or self._broken
        task, broken = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((task, broken), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._failure()
            return await task
        except BadRequest:
            raise
        except EngineError as error:
            # The connection to a dying server breaks before the watch has seen the cause.
            await asyncio.wait((broken,), timeout=2 * _WATCH_S)
            raise (self._failure() if event.is_set() else error) from error
        finally:
            broken.cancel()
            task.cancel()

    # --- accounting ------------------------------------------------------------------------------
    def _enter(self, requests: int) -> None:
        if self._in_flight == 0:
            self._busy_since = time.monotonic()
        self._in_flight += 1
        self._running += requests
        self._idle.clear()

    def _leave(self, requests: int) -> None:
        self._in_flight -= 1
        self._running -= requests
        if self._in_flight == 0:
            self._busy_s += time.monotonic() - self._busy_since
            self._idle.set()


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Every parameter that shapes the distribution, so that no engine default is relied on."""
    return {
        "n": 1,
        "max_new_tokens": params.max_new_tokens,
        "min_new_tokens": 0,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,
    }


def _was_aborted(reply: dict[str, Any]) -> bool:
    reason = reply.get("meta_info", {}).get("finish_reason") or {}
    return bool(reason.get("type") == Finish.ABORT)
