"""The host of one SGLang server: implements `moerl.messages.Engine`, without Ray.

It starts the server, sends requests, and checks and seals every record before it returns it.
`health` decides whether requests may be sent; `weight_updates` changes the weights.  Used from one
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moerl.config.schema import EngineConfig, ReplayConfig
from moerl.distributed.store_server import StoreServer
from moerl.engine import in_flight, reply_parser
from moerl.engine.feature_table import PROVEN
from moerl.engine.health import WATCH_S, EngineHealth, Pulse
from moerl.engine.node_span import Follower, NodeSpan
from moerl.engine.reply_parser import InFlight, Reply
from moerl.engine.sglang_client import BadRequest, EngineClient
from moerl.engine.sglang_server import EngineServer, free_port
from moerl.engine.weight_updates import Updates
from moerl.errors import BlobError, EngineError, RecordError
from moerl.messages import EngineStatus
from moerl.records.blob_store import BlobStore
from moerl.run_dir import RunDir
from moerl.trace import Tracer
from moerl.types import (
    Array,
    BlobRef,
    Finish,
    GenerateRequest,
    IndexerBlob,
    LogprobBlob,
    MaskBlob,
    ModelShape,
    PolicyVersion,
    RoutingBlob,
    SamplingParams,
    Segment,
    VersionSpan,
    life_of,
)

log = logging.getLogger(__name__)

_INTERRUPT_S = 8.0  # shorter than the controller's wait for this host


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Objects that all engines of a run share."""

    model_path: Path
    shape: ModelShape
    replay: ReplayConfig
    run: RunDir
    token: str = field(repr=False)
    in_flight_mode: str = "abort_resume"
    # CUDA_VISIBLE_DEVICES of the servers; empty: they inherit it, as Ray sets it on a cluster
    devices: dict[str, str] = field(default_factory=dict)

    @property
    def routing(self) -> bool:
        """Whether the engine's routes are recorded."""
        return self.replay.routing == "R3" and bool(self.shape.moe_layers)


class EngineHost:
    """One engine.  Raises EngineError with cause and log tail once its server is dead."""

    features = PROVEN  # deployment features proven with replay; any other is refused

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        context: EngineContext,
        store: BlobStore,
        followers: Sequence[Follower] = (),
    ) -> None:
        """followers: the engine's other nodes, by node rank from 1."""
        replay, run = context.replay, context.run
        self.index, self.config, self._context, self._store = index, config, context, store
        self._routing = context.routing
        self._indexer = self._routing and bool(context.shape.index_topk)
        self._tracer = Tracer(run.trace, f"engine{index}")
        retract = in_flight.RETRACT_AUDIT if replay.audit else in_flight.RETRACT
        modes = {"in_place": in_flight.IN_PLACE, "retract": retract}
        self._mode = modes.get(context.in_flight_mode, "")
        self._health = EngineHealth(index)
        self._followers = followers
        self._ranks_meet: StoreServer | None = None  # of an engine on several nodes
        self._updates = Updates(
            self._health, self._tracer, mode=self._mode, followers=self._followers
        )
        self.session = self._updates.session  # of a publish
        self._layout = ""
        self._server: EngineServer | None = None
        self._client: EngineClient | None = None
        self._watch: asyncio.Task[None] | None = None
        self._far: list[asyncio.Task[None]] = []  # watches of the other nodes
        self._serial = count()
        self._generated = 0
        self._refused: Counter[str] = Counter()
        self._askers = 0  # number of controllers that were replaced
        self._life = -1  # of the newest controller that took over

    # --- life ------------------------------------------------------------------------------------
    async def start(self, version: PolicyVersion) -> EngineStatus:
        """Start a server that serves the model folder as `version`; also restarts a dead one."""
        await self.stop()
        with self._tracer.span("start"):
            span = self._span()
            server = EngineServer(
                self.config,
                self._context.model_path,
                routing=self._routing,
                version=str(version),
                token=self._context.token,
                log=self._context.run.logs / f"engine{self.index}.log",
                span=span,
            )
            client = EngineClient(server.url)
            try:
                await self._start_all_nodes(server.start(client), version, span)
            except BaseException:
                await client.close()
                raise
        assert server.layout is not None, "a started server has a layout"
        self._layout = server.layout.fingerprint()
        log.info("engine %d: weight layout %s: %s", self.index, self._layout, server.layout)
        self._server, self._client = server, client
        self._updates.attach(server, client, version)
        self._health.open()
        self._far = [asyncio.ensure_future(node.watch()) for node in self._followers]
        self._watch = asyncio.create_task(self._watch_server(server, client))
        return await self.status()

    async def stop(self) -> None:
        """End the server and its processes; without a server it does nothing."""
        self._health.close("it was stopped")
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError):
                await self._watch
        for watch in self._far:
            watch.cancel()
        await asyncio.gather(*self._far, return_exceptions=True)
        self._watch, self._far = None, []
        self._updates.detach()
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.stop()
            await self._stop_other_nodes()
        if self._ranks_meet is not None:
            self._ranks_meet.close()
        self._client = self._server = self._ranks_meet = None

    def _span(self) -> NodeSpan:
        """This node's part of the engine; on several nodes with a new store for its ranks."""
        if not self._followers:
            return NodeSpan(devices=self._context.devices)
        host = self.config.host
        self._ranks_meet = StoreServer(host)
        head = f"{host}:{free_port(host)}"
        return NodeSpan(0, 1 + len(self._followers), head, self._ranks_meet.server_address)

    async def _start_all_nodes(
        self, start: Coroutine[Any, Any, None], version: PolicyVersion, span: NodeSpan
    ) -> None:
        """start: of this node's server.  Raises EngineError with the first cause; then no node has
        a server.
        """
        spans = [replace(span, node=node) for node in range(1, span.nodes)]
        starts = [asyncio.ensure_future(start)]
        starts += [
            asyncio.ensure_future(node.start(version, span))
            for node, span in zip(self._followers, spans, strict=True)
        ]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for one in starts:
                one.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self._stop_other_nodes()
            raise

    async def _stop_other_nodes(self) -> None:
        stops = (node.stop() for node in self._followers)
        for end in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(end, BaseException):  # the node is gone, and its server with it
                log.warning("engine %d: a node was not told to stop: %s", self.index, end)

    @property
    def node(self) -> str:
        """Node from which the sealed records are read."""
        return self._store.node

    async def status(self) -> EngineStatus:
        return EngineStatus(
            engine=self.index,
            version=self._updates.version,
            pid=self._server.pid if self._server else 0,
            running=self._health.running,
            generated_tokens=self._generated,
            busy_s=self._health.busy_s,
            refused=dict(self._refused),
            layout=self._layout,
        )

    async def watch(self) -> None:
        """Never returns; raises EngineError when the engine breaks for good."""
        await self._health.ended.wait()
        raise self._health.failure()

    async def checksum(self) -> dict[str, Any]:
        """Per-tensor checksums of the live weights."""
        return await self._health.guard(self._alive().checksum())

    # --- generation ------------------------------------------------------------------------------
    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Segment | RecordError]:
        """Run all requests as one engine call; each record is checked and sealed on return.

        A record that breaks the contract is returned as its RecordError, without effect on the
        others.  During a weight update the call waits and is then sent to the new version.
        """
        # One /generate call has one routed_experts_start_len, so requests that need rows from
        # different positions (resumed ones) go out side by side in calls of their own.
        calls: dict[int, list[int]] = {}
        for position, request in enumerate(requests):
            calls.setdefault(reply_parser.first_row(request), []).append(position)
        asker = self._askers
        tasks = [
            asyncio.create_task(self._call([requests[i] for i in group], asker))
            for group in calls.values()
        ]
        try:
            results = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:  # their blobs would never be read
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        ordered: dict[int, Segment | RecordError] = {}
        for group, segments in zip(calls.values(), results, strict=True):
            ordered.update(zip(group, segments, strict=True))
        return [ordered[position] for position in range(len(requests))]

    async def _call(
        self, requests: list[GenerateRequest], asker: int
    ) -> list[Segment | RecordError]:
        while not self._health.admit.is_set():  # loop: an update may start before this task runs
            await self._health.guard(self._health.admit.wait())
        self._expect(asker)
        start_s, version = time.time(), self._updates.version
        self._health.enter(len(requests))
        try:
            replies = await self._health.guard(self._alive().generate(self._body(requests)))
            self._updates.aborted += sum(_was_aborted(reply) for reply in replies)
        except BadRequest as error:
            # SGLang refuses a batch as a whole; find the bad requests.
            replies = None
            if len(requests) == 1:
                return [self._refuse(RecordError("request", f"{requests[0].rollout_id}: {error}"))]
        finally:
            self._health.leave(len(requests))
        self._expect(asker)
        if replies is None:
            alone = await asyncio.gather(*(self._call([one], asker) for one in requests))
            return [segment for segments in alone for segment in segments]
        end_s = time.time()
        shared = reply_parser.SharedPrompts(requests)
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
            prompt_tokens=sum(request.num_tokens for request in requests),
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
            "return_indexer_topk": self._indexer,
            "routed_experts_start_len": reply_parser.first_row(requests[0]) if self._routing else 0,
            "stream": False,
        }

    def _segment(
        self,
        reply: dict[str, Any],
        request: GenerateRequest,
        version: PolicyVersion,
        start_s: float,
        end_s: float,
        shared: reply_parser.SharedPrompts,
    ) -> Segment | RecordError:
        later = tuple(sorted({v for v in self._updates.served if v >= version}))
        try:
            parsed = reply_parser.parse(
                reply,
                request,
                version=version,
                shape=self._context.shape,
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
                for asked, part in reply_parser.cut(parsed, request)
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
        shared: reply_parser.SharedPrompts,
    ) -> Segment:
        """Seal the tokens that one version of the weights sampled."""
        span = parsed.spans[0] if parsed.spans else VersionSpan(0, version)
        version = span.version
        sealed = self._seal(parsed, request, version, shared)
        return Segment(
            rollout_id=request.rollout_id,
            output_ids=parsed.output_ids,
            logprobs=np.zeros(0, np.float32),
            version=version,
            finish=parsed.finish,
            routing=sealed.routing,
            sampling_mask=sealed.mask,
            audit_rows=sealed.audit,
            engine=self.index,
            cached_tokens=parsed.cached_tokens,
            start_s=start_s,
            end_s=end_s,
            prompt_rows=sealed.prompt,
            kept_kv=span.kept_kv,
            sealed_logprobs=sealed.logprobs,
            indexer=sealed.indexer,
            audit_indexer=sealed.audit_indexer,
        )

    def _seal(
        self,
        parsed: Reply,
        request: GenerateRequest,
        version: PolicyVersion,
        shared: reply_parser.SharedPrompts,
    ) -> _Sealed:
        """Write all arrays of one segment as one blob.

        Prompt rows equal to a sibling's of the same call are referenced, not written again.
        """
        if not len(parsed.output_ids):
            return _Sealed()
        own, prompt_rows, prompt = parsed.routing, None, None
        split = shared.split(request, own)
        if own is not None and split:
            prompt_rows, own = np.ascontiguousarray(own[:, :split]), own[:, split:]
            prompt = shared.find(request, prompt_rows)
            own = np.ascontiguousarray(own)
        new_prompt = prompt_rows if prompt is None else None
        arrays: list[Array] = [rows for rows in (new_prompt, own, parsed.audit) if rows is not None]
        arrays += [*(parsed.mask or ()), parsed.logprobs]
        arrays += [a for a in (parsed.indexer, parsed.audit_indexer) if a is not None]
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
        logprobs = LogprobBlob(next(refs), request.num_sampled, len(parsed.logprobs))
        begin, end = request.rows_from, request.num_tokens + len(parsed.output_ids) - 1
        indexer = audit_indexer = None
        if parsed.indexer is not None:
            indexer = self._positions(next(refs), begin, end, version)
        if parsed.audit_indexer is not None:
            audit_indexer = self._positions(next(refs), 0, begin, version)
        return _Sealed(prompt, routing, audit, mask, logprobs, indexer, audit_indexer)

    def _positions(self, ref: BlobRef, begin: int, end: int, version: PolicyVersion) -> IndexerBlob:
        shape = self._context.shape
        return IndexerBlob(ref, begin, end, version, shape.index_layers, shape.index_topk)

    def _rows(self, ref: BlobRef, begin: int, version: PolicyVersion) -> RoutingBlob:
        return RoutingBlob(
            ids=ref,
            row_begin=begin,
            row_end=begin + ref.shape[1],
            version=version,
            layers=self._context.shape.moe_layers,
            num_experts=self._context.shape.num_experts,
        )

    def _refuse(self, error: RecordError) -> RecordError:
        self._refused[error.reason] += 1
        return error

    def _expect(self, asker: int) -> None:
        if asker != self._askers:
            raise EngineError(f"engine {self.index}: a call is cancelled, its controller is gone")

    async def forget(self, kept: Sequence[str] | None, life: int) -> None:
        """A new controller takes over: end the calls of the previous one and seal none of them.

        kept: blobs that it knows, on any node; others that earlier controllers asked for are
        deleted from this store.  None: none is deleted.
        life: number of controllers before it; the message of an earlier one is ignored.  0: their
        journal is lost.

        The controller does not wait long for this.  Engines of one machine share a store, so
        meanwhile others may seal for it there: only blobs that are there now, under names of
        earlier lives, are deleted.
        """
        if 0 < life < self._life:
            log.warning("engine %d: controller %d takes over too late", self.index, life)
            return
        self._life = life
        self._askers += 1
        left = [] if kept is None else self._left_behind(set(kept), life)
        with contextlib.suppress(EngineError):  # an unusable server has no calls to end
            await self.interrupt()
        await asyncio.to_thread(self._store.delete_all, left)

    def _left_behind(self, kept: set[str], life: int) -> list[str]:
        """Blobs that earlier controllers asked for and that are not kept."""
        others = [uri for uri in self._store.uris() if uri not in kept]
        return [uri for uri in others if life_of(uri) < life or not life]

    async def interrupt(self) -> None:
        """End the running requests: each returns its tokens so far, to be continued elsewhere.

        Raises EngineError also when the server does not answer in time.
        """
        try:
            async with asyncio.timeout(_INTERRUPT_S):
                await self._health.guard(self._alive().abort_all())
        except TimeoutError as error:
            raise EngineError(f"engine {self.index}: no interrupt in {_INTERRUPT_S:g} s") from error

    # --- failure ---------------------------------------------------------------------------------
    async def _watch_server(self, server: EngineServer, client: EngineClient) -> None:
        pulse, updates = Pulse(client.pulse, self.config.answer_timeout_s), self._updates
        cause: str | None = None
        try:
            while cause is None:
                await asyncio.sleep(WATCH_S)
                hangs = pulse.look(attempt=updates.attempt, answers=updates.answered)
                cause = server.death() or self._far_death() or hangs
        finally:
            pulse.close()
        self._health.close(f"{cause}\n{server.log_tail()}")

    def _far_death(self) -> str | None:
        """Why the part of another node is dead."""
        ended = next((watch for watch in self._far if watch.done()), None)
        return None if ended is None else str(ended.exception())

    def _alive(self) -> EngineClient:
        self._health.usable()
        if self._client is None:
            raise self._health.failure()
        return self._client


class _Sealed(NamedTuple):
    """The references of one segment; empty for a segment without tokens."""

    prompt: RoutingBlob | None = None
    routing: RoutingBlob | None = None
    audit: RoutingBlob | None = None
    mask: MaskBlob | None = None
    logprobs: LogprobBlob | None = None
    indexer: IndexerBlob | None = None
    audit_indexer: IndexerBlob | None = None


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """All parameters that shape the distribution, so that no engine default is used."""
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
    try:
        return bool(reply["meta_info"]["finish_reason"]["type"] == Finish.ABORT)
    except (LookupError, TypeError):  # it is refused when it is read
        return False
