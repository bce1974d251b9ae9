"""Runs requests on one SGLang server; checks, seals and hands back each record when it is done.

The requests of a message go out as one streamed batch per first routing row (a batch has one
`routed_experts_start_len`).  The server sends each reply when its request ends, so a request waits
for no other, and a refused record or a request that the server fails costs no other.  Rejected: an
HTTP request per rollout (it costs as much as decoding some tokens).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from moerl.core.errors import BlobError, EngineError, RecordError
from moerl.core.types import (
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
)
from moerl.engine.host import reply_parser
from moerl.engine.host.health import EngineHealth
from moerl.engine.host.reply_parser import Decoded, InFlight, Records, Reply, SharedPrompts
from moerl.engine.host.sglang_client import BadRequest, EngineClient, FailedRequest, is_part
from moerl.engine.host.weight_updates import WeightUpdater
from moerl.engine.protocol import IN_PLACE, RETRACT_AUDIT, SAMPLED
from moerl.engine.record_files import FIELD, RecordReader
from moerl.records.blob_store import BlobStore
from moerl.records.token_entropy import token_entropies
from moerl.runtime.trace import Tracer

_FEW_ROWS = 256  # of a record: at 48 layers a millisecond
_TOGETHER = 32  # short replies that are decoded at once
# Each part of a stream has all tokens so far, so long answers come in parts of more tokens: at most
# _PARTS of them, and the bytes of all are at most _PARTS / 2 times the answer's bytes.
_PARTS, _PART = 256, 8

# places of the requests, and their replies
OnReplies = Callable[[Sequence[tuple[int, dict[str, Any]]]], Coroutine[Any, Any, None]]
OnReply = Callable[[GenerateRequest, Segment | RecordError | EngineError], None]
OnTokens = Callable[[GenerateRequest, Array], None]


class RawReply(NamedTuple):
    """A reply of the server, not yet checked."""

    server_id: str  # of its request
    request: GenerateRequest
    reply: dict[str, Any]


class Generation:
    """The requests of one engine.  Used from one event loop."""

    def __init__(
        self,
        shape: ModelShape,
        store: BlobStore,
        health: EngineHealth,
        updates: WeightUpdater,
        tracer: Tracer,
        *,
        routing: bool,
        support: int = 0,
        entropies: bool = False,
    ) -> None:
        """Start without a server.

        routing: the engine's routes are recorded.  support: record the log-probabilities of all
        kept entries, or without truncation of so many likeliest entries; 0 = neither.  entropies:
        replies have them.
        """
        self._index, self._shape, self._store = health.index, shape, store
        self._health, self._updates, self._tracer = health, updates, tracer
        self._routing, self._support = routing, min(support, shape.vocab_size)
        self._entropies = entropies
        self._indexer = routing and bool(shape.index_topk)
        self._shared = SharedPrompts()
        # Requests that the server has, and its ids of them.  It aborts every id that begins with
        # the given one, so each ends with a point.
        self._sent: dict[str, str] = {}
        self._serial = count()
        self._unsent: set[str] = set()  # names of requests that wait for an update
        self._late_aborts: set[asyncio.Task[None]] = set()  # they wait for a wake
        self._askers = 0  # number of controllers that were replaced
        self.client: EngineClient | None = None
        self.records: RecordReader | None = None  # of the same server
        self._decoding = asyncio.Lock()  # one reply at a time is decoded, in a thread
        self.tokens = 0  # sampled since start
        self.refused: Counter[str] = Counter()

    def forget(self) -> None:
        """A new controller takes over: requests of the earlier one end with an error."""
        self._askers += 1

    async def run(self, requests: Sequence[GenerateRequest], done: OnReply, tell: OnTokens) -> None:
        """Run requests until all have ended.

        done: receives each reply once, as soon as it is ready.
        tell: receives the tokens so far of requests that stream, now and then before their reply.
        """
        calls: dict[int, list[GenerateRequest]] = {}
        for request in requests:
            self._shared.expect(request)
            calls.setdefault(reply_parser.first_row(request), []).append(request)
        asker = self._askers
        work = (self._call(call, asker, done, tell) for call in calls.values())
        tasks = list(map(asyncio.create_task, work))
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:  # their blobs would never be read
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def abort(self, names: Sequence[str]) -> None:
        """End these requests; each returns its tokens so far."""
        wanted = set(names)
        self._unsent -= wanted
        if self._health.is_asleep and wanted & self._sent.keys():
            # a retracted request has no record until it runs again
            late = asyncio.create_task(self._abort_awake(names))
            self._late_aborts.add(late)
            late.add_done_callback(self._late_aborts.discard)
        elif self._sent.keys() <= wanted:
            await self._alive().abort_all()
        else:
            ids = [self._sent[name] for name in wanted & self._sent.keys()]
            await asyncio.gather(*map(self._alive().abort, ids))

    async def _abort_awake(self, names: Sequence[str]) -> None:
        with contextlib.suppress(EngineError):  # a broken engine fails the requests themselves
            await self._health.guard(self._health.admit.wait())
            await self.abort(names)

    async def _call(
        self, requests: list[GenerateRequest], asker: int, done: OnReply, tell: OnTokens
    ) -> None:
        """Run one batch; a batch that the server refuses as a whole is sent one by one."""
        left = {request.name: request for request in requests}

        def finish(request: GenerateRequest, reply: Segment | RecordError | EngineError) -> None:
            del left[request.name]
            self._shared.leave(request)
            done(request, reply)

        try:
            await self._admitted(left, finish)
            await self._send(list(left.values()), asker, finish, tell)
        except BadRequest as error:
            if len(left) > 1:
                alone = list(left.values())
                left.clear()
                await asyncio.gather(*(self._call([one], asker, done, tell) for one in alone))
            for request in list(left.values()):
                reason = "engine" if isinstance(error, FailedRequest) else "request"
                refusal = RecordError(reason, f"{request.rollout_id}: {error}")
                finish(request, self._refuse(refusal))
        except EngineError as error:
            for request in list(left.values()):
                finish(request, error)
        finally:
            for request in left.values():  # cancelled
                self._shared.leave(request)

    async def _admitted(self, left: dict[str, GenerateRequest], finish: OnReply) -> None:
        """Wait while an update runs; requests that are aborted meanwhile return without a token."""
        self._unsent |= left.keys()
        try:
            while not self._health.admit.is_set():  # loop: an update may start before this runs on
                await self._health.guard(self._health.admit.wait())
            for name in left.keys() - self._unsent:
                finish(left[name], self._nothing(left[name]))
        finally:
            self._unsent -= left.keys()

    def _nothing(self, request: GenerateRequest) -> Segment:
        now = time.time()
        reply = Reply(
            np.zeros(0, np.int32), np.zeros(0, np.float32), Finish.ABORT, None, None, None, 0
        )
        return self._piece(reply, request, self._updates.version, now, now)

    async def _send(
        self, requests: list[GenerateRequest], asker: int, finish: OnReply, tell: OnTokens
    ) -> None:
        if not requests:
            return
        self._expect(asker)
        start_s, version, begin = time.time(), self._updates.version, self.tokens
        ids = {request.name: f"{request.name}.{next(self._serial)}." for request in requests}
        records, slots = self._readable(), self._updates.slots
        body = self._body(requests, list(ids.values()))

        async def seal(replies: Sequence[tuple[int, dict[str, Any]]]) -> None:
            self._expect(asker)
            end_s, asked = time.time(), [requests[place] for place, _ in replies]
            raw = [
                RawReply(ids[request.name], request, reply)
                for request, (_, reply) in zip(asked, replies, strict=True)
            ]
            for one in raw:
                self._sent.pop(one.request.name, None)
                self._updates.aborted += _was_aborted(one.reply)
            parse = partial(self._parse, records, raw, version, self._in_flight(version))
            parsed = await self._run_parse(parse, asked)
            self._expect(asker)
            for request, result in zip(asked, parsed, strict=True):
                finish(request, self._segment(result, request, version, start_s, end_s))

        if slots is not None:
            body["lora_path"] = [slots.enter(version, len(requests))] * len(requests)
        self._sent |= ids
        records.expect(ids.values())
        self._health.enter(len(requests))
        try:
            await self._exchange(requests, body, seal, tell)
        finally:
            for name in ids:
                self._sent.pop(name, None)
            records.leave(ids.values())
            if slots is not None:
                slots.leave(version, len(requests))
            self._health.leave(len(requests))
        self._tracer.add(
            "generate",
            start_s,
            time.time(),
            requests=len(requests),
            prompt_tokens=sum(request.num_tokens for request in requests),
            tokens=self.tokens - begin,
            version=str(version),
        )

    async def _exchange(
        self,
        requests: Sequence[GenerateRequest],
        body: dict[str, Any],
        seal: OnReplies,
        tell: OnTokens,
    ) -> None:
        """Run one batch on the server; each reply is sealed while the others run."""
        failure: EngineError | None = None
        short: list[tuple[int, dict[str, Any]]] = []  # that came together, and wait to be sealed

        async def seal_short() -> None:
            while short:
                some = short[:_TOGETHER]
                del short[:_TOGETHER]
                await seal(some)
                await asyncio.sleep(0)  # others of this event loop have a turn

        try:
            async with asyncio.TaskGroup() as replies:

                def took(place: int, reply: dict[str, Any]) -> None:
                    request = requests[place]
                    if request.streams and is_part(reply):
                        tell(request, np.asarray(reply.get("output_ids", ()), np.int32))
                    elif not _are_short([request]):
                        replies.create_task(seal([(place, reply)]))
                    else:
                        short.append((place, reply))
                        if len(short) == 1:
                            replies.create_task(seal_short())

                try:
                    await self._health.guard(self._alive().generate(body, took))
                except EngineError as error:  # replies that came before it are sealed
                    failure = error
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if failure is not None:
            raise failure

    def _body(self, requests: Sequence[GenerateRequest], ids: Sequence[str]) -> dict[str, Any]:
        truncates = [request.sampling.truncates for request in requests]
        mode = "support" if self._support else "selected"
        return {
            "rid": list(ids),
            "input_ids": [request.token_ids.tolist() for request in requests],
            "sampling_params": [
                _sampling(request.sampling) | _grammar(request) | _parts(request)
                for request in requests
            ],
            "return_logprob": [not truncated for truncated in truncates],
            "logprob_start_len": -1,
            "return_sampling_mask": truncates,
            "sampling_logprobs_mode": [mode if cut else None for cut in truncates],
            "top_logprobs_num": [0 if cut else self._support for cut in truncates],
            "return_routed_experts": self._routing,
            "return_indexer_topk": self._indexer,
            "routed_experts_start_len": reply_parser.first_row(requests[0]) if self._routing else 0,
        }

    def _in_flight(self, version: PolicyVersion) -> InFlight | None:
        """Updates that may have met a request of this version until now."""
        later = tuple(sorted({v for v in self._updates.served if v >= version}))
        mode = self._updates.mode
        return InFlight(later, mode == IN_PLACE, mode == RETRACT_AUDIT) if mode else None

    async def _run_parse(
        self,
        parse: Callable[[], list[Reply | RecordError]],
        requests: Sequence[GenerateRequest],
    ) -> list[Reply | RecordError]:
        """Short replies here, as a thread would cost more; others in one thread at a time."""
        if _are_short(requests):
            return parse()
        async with self._decoding:
            return await asyncio.to_thread(parse)

    def _parse(
        self,
        files: RecordReader,
        raw: Sequence[RawReply],
        version: PolicyVersion,
        updates: InFlight | None,
    ) -> list[Reply | RecordError]:
        """Read and check the records of replies, perhaps in a thread."""
        taken = [_take(files, one) for one in raw]
        whole = [
            (one.reply, records)
            for one, records in zip(raw, taken, strict=True)
            if not isinstance(records, RecordError)
        ]
        support = self._support > 0
        together = partial(reply_parser.decode_together, support=support)
        decoded = iter(together(whole, self._shape) if len(whole) > 1 else ())
        parsed: list[Reply | RecordError] = []
        for one, records in zip(raw, taken, strict=True):
            if isinstance(records, RecordError):
                parsed.append(records)
                continue
            try:
                reply = reply_parser.parse(
                    one.reply,
                    records,
                    one.request,
                    version=version,
                    shape=self._shape,
                    routing=self._routing,
                    in_flight=updates,
                    decoded=next(decoded, Decoded()),
                    support=support,
                )
            except RecordError as error:
                parsed.append(error)
            else:
                parsed.append(reply)
        return parsed

    def _segment(
        self,
        parsed: Reply | RecordError,
        request: GenerateRequest,
        version: PolicyVersion,
        start_s: float,
        end_s: float,
    ) -> Segment | RecordError:
        if isinstance(parsed, RecordError):
            return self._refuse(parsed)
        try:
            first, *rest = [
                self._piece(part, asked, version, start_s, end_s)
                for asked, part in reply_parser.cut(parsed, request)
            ]
        except BlobError as error:  # the disk is full
            return self._refuse(RecordError("blob", f"{request.rollout_id}: {error}"))
        segment = replace(first, rest=tuple(rest)) if rest else first
        self.tokens += sum(len(piece.output_ids) for piece in segment.pieces)
        return segment

    def _piece(
        self,
        parsed: Reply,
        request: GenerateRequest,
        version: PolicyVersion,
        start_s: float,
        end_s: float,
    ) -> Segment:
        """Seal the tokens of one version of the weights."""
        span = parsed.spans[0] if parsed.spans else VersionSpan(0, version)
        version = span.version
        sealed, truncates = self._seal(parsed, request, version), request.sampling.truncates
        entropies = None
        if self._entropies:
            entropies = token_entropies(parsed.logprobs, parsed.mask or (), is_whole=truncates)
        return Segment(
            rollout_id=request.rollout_id,
            output_ids=parsed.output_ids,
            logprobs=np.zeros(0, np.float32),
            version=version,
            finish=parsed.finish,
            routing=sealed.routing,
            sampling_mask=sealed.mask if truncates else None,
            top_logprobs=None if truncates else sealed.mask,
            entropies=entropies,
            audit_rows=sealed.audit,
            engine=self._index,
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
    ) -> _SegmentBlobs:
        """Write a segment's arrays as one blob, except prompt rows equal to a sibling's."""
        if not len(parsed.output_ids):
            return _SegmentBlobs()
        own, prompt_rows, prompt = parsed.routing, None, None
        split = self._shared.split(request, own)
        if own is not None and split:
            prompt_rows, own = np.ascontiguousarray(own[:, :split]), own[:, split:]
            prompt = self._shared.find(request, version, prompt_rows)
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
            self._shared.keep(request, version, new_prompt, prompt)
        if own is not None:
            routing = self._rows(next(refs), request.rows_from + split, version)
        if parsed.audit is not None:
            audit = self._rows(next(refs), 0, version)
        if parsed.mask is not None:
            mask = MaskBlob(next(refs), next(refs), request.num_sampled, len(parsed.output_ids))
            if len(parsed.mask) > 2:
                mask = replace(mask, logprobs=next(refs))
        logprobs = LogprobBlob(next(refs), request.num_sampled, len(parsed.logprobs))
        begin, end = request.rows_from, request.num_tokens + len(parsed.output_ids) - 1
        indexer = audit_indexer = None
        if parsed.indexer is not None:
            indexer = self._positions(next(refs), begin, end, version)
        if parsed.audit_indexer is not None:
            audit_indexer = self._positions(next(refs), 0, begin, version)
        return _SegmentBlobs(prompt, routing, audit, mask, logprobs, indexer, audit_indexer)

    def _positions(self, ref: BlobRef, begin: int, end: int, version: PolicyVersion) -> IndexerBlob:
        shape = self._shape
        return IndexerBlob(ref, begin, end, version, shape.index_layers, shape.index_topk)

    def _rows(self, ref: BlobRef, begin: int, version: PolicyVersion) -> RoutingBlob:
        return RoutingBlob(
            ids=ref,
            row_begin=begin,
            row_end=begin + ref.shape[1],
            version=version,
            layers=self._shape.moe_layers,
            num_experts=self._shape.num_experts,
        )

    def _refuse(self, error: RecordError) -> RecordError:
        self.refused[error.reason] += 1
        return error

    def _expect(self, asker: int) -> None:
        if asker != self._askers:
            raise EngineError(f"engine {self._index}: a call is cancelled, its controller is gone")

    def _readable(self) -> RecordReader:
        if self.records is None:
            raise self._health.failure()
        return self.records

    def _alive(self) -> EngineClient:
        self._health.usable()
        if self.client is None:
            raise self._health.failure()
        return self.client


class _SegmentBlobs(NamedTuple):
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


def _grammar(request: GenerateRequest) -> dict[str, Any]:
    """The grammar of a request, and how many tokens it has allowed in earlier calls."""
    grammar = request.sampling.grammar
    if grammar is None:
        return {}
    return {grammar.kind: grammar.text, "custom_params": {SAMPLED: request.num_sampled}}


def _parts(request: GenerateRequest) -> dict[str, Any]:
    """The number of tokens after which a request that streams sends a part."""
    if not request.streams:
        return {}
    return {"stream_interval": max(_PART, request.sampling.max_new_tokens // _PARTS)}


def _are_short(requests: Iterable[GenerateRequest]) -> bool:
    return all(r.num_tokens + r.sampling.max_new_tokens <= _FEW_ROWS for r in requests)


def _take(files: RecordReader, raw: RawReply) -> Records | RecordError:
    try:
        return files.take(raw.server_id, _reason(raw.reply).get(FIELD))
    except RecordError as error:
        return error


def _was_aborted(reply: dict[str, Any]) -> bool:
    return bool(_reason(reply).get("type") == Finish.ABORT)


def _reason(reply: dict[str, Any]) -> dict[str, Any]:
    """Why the request ended; a reply without it is refused when it is read."""
    try:
        reason = reply["meta_info"]["finish_reason"]
    except (LookupError, TypeError):
        reason = None
    return reason if isinstance(reason, dict) else {}
