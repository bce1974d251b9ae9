"""One engine reply -> checked arrays.  Pure functions; missing or malformed parts are refused.

Legend: T' tokens of the request, n sampled by this call, L MoE layers, K experts per token.  Read
docs/alignment.md first: routing rows belong to fed-in tokens (T' + n - 1 of them, the last sampled
token is never fed), log-probabilities and mask rows to produced tokens (n).

The behaviour log-probability of truncated sampling is the value that SGLang records with the mask
(renormalised over it); `output_token_logprobs` has the value before truncation.

A request whose weights changed while it ran (rollout.in_flight_mode in_place or retract) comes back
as one reply of several versions; `cut` splits it into one reply per version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from moerl.core.errors import RecordError
from moerl.core.types import (
    Array,
    Finish,
    GenerateRequest,
    ModelShape,
    PolicyVersion,
    RoutingBlob,
    VersionSpan,
)
from moerl.records.indexer import check_engine_rows, encode
from moerl.records.routing import decode_engine_rows
from moerl.records.sampling_mask import Csr, encode_rows, encode_top

Records = Mapping[str, Array]  # of one request, by name

_ROUNDING = 1e-6  # a log-probability above 0 by less than this is rounding


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A checked reply, not yet sealed."""

    output_ids: Array  # [n] i32
    logprobs: Array  # [n] f32, <= 0
    finish: Finish
    routing: Array | None  # [L, T' + n - 1 - rows_from, K] u8 or u16
    audit: Array | None  # [L, rows_from, K], the re-prefilled rows, when requested
    # The sampling mask; without truncation the likeliest entries, if the run records them
    mask: Csr | None
    cached_tokens: int
    indexer: Array | None = None  # [layers, bytes] u8: positions of the rows of `routing`
    audit_indexer: Array | None = None  # of the rows of `audit`
    spans: tuple[VersionSpan, ...] = ()  # empty only without any token
    # Rows of the whole prefix [L, rows, K] of each span after the first, when requested.
    recomputed: tuple[Array, ...] = ()


@dataclass(frozen=True, slots=True)
class InFlight:
    """Events that may have happened to requests while they ran."""

    versions: tuple[PolicyVersion, ...]  # served since the request was sent, ascending
    keeps_kv: bool = False  # weights are exchanged in place
    returns_prefix: bool = False  # the rows of each later version's prefix follow


class SharedPrompts:
    """Equal prompt rows of siblings: stored once, referenced by all.

    Rows are always compared: two prefills of one prompt may round differently, and a sibling must
    be trained on the rows of its own KV cache.  Only siblings share: a blob is deleted when its
    group is trained, and another group of the same prompt may still wait.  Rows are kept while a
    sibling is expected that may be equal.
    """

    def __init__(self) -> None:
        self._keys: dict[str, _PromptKey] = {}  # of expected requests, by name
        self._expected: Counter[_PromptKey] = Counter()
        self._several: set[_PromptKey] = set()  # prompts of two requests or more
        self._sealed: dict[_PromptKey, dict[PolicyVersion, tuple[Array, RoutingBlob]]] = {}

    def expect(self, request: GenerateRequest) -> None:
        """A request is sent."""
        key = self._keys[request.name] = _prompt_key(request)
        self._expected[key] += 1
        if self._expected[key] > 1:
            self._several.add(key)

    def leave(self, request: GenerateRequest) -> None:
        """A request ended; call after its rows are sealed."""
        key = self._keys.pop(request.name)
        self._expected[key] -= 1
        if not self._expected[key]:
            del self._expected[key]
            self._several.discard(key)
            self._sealed.pop(key, None)

    def split(self, request: GenerateRequest, rows: Array | None) -> int:
        """Number of leading rows to seal separately: the prompt's, if it has siblings here."""
        whole = rows is not None and request.num_sampled == 0 and request.rows_known == 0
        siblings = whole and self._keys[request.name] in self._several
        return request.num_tokens - 1 if siblings else 0

    def find(
        self, request: GenerateRequest, version: PolicyVersion, rows: Array
    ) -> RoutingBlob | None:
        """The sealed rows of a sibling's prompt, if they equal `rows` [L, rows, K]."""
        sealed = self._sealed.get(self._keys[request.name], {})
        held, blob = sealed.get(version, (None, None))
        return blob if held is not None and np.array_equal(held, rows) else None

    def keep(
        self, request: GenerateRequest, version: PolicyVersion, rows: Array, blob: RoutingBlob
    ) -> None:
        self._sealed.setdefault(self._keys[request.name], {}).setdefault(version, (rows, blob))


_PromptKey = tuple[str, str, bytes]


def _prompt_key(request: GenerateRequest) -> _PromptKey:
    """Group, try and prompt; a rollout is named GROUP.SIBLING[.TRY]."""
    group, _, rest = request.rollout_id.partition(".")
    return group, rest.partition(".")[2], request.token_ids.tobytes()


def first_row(request: GenerateRequest) -> int:
    """First routing row to request from the engine."""
    return 0 if request.audit else request.rows_from


class Decoded(NamedTuple):
    """Arrays of one reply that were decoded and checked with others; None: they were not."""

    routes: Array | None = None  # [L, rows, K] u8 or u16
    mask: Csr | None = None


def decode_together(
    replies: Sequence[tuple[dict[str, Any], Records]],
    shape: ModelShape,
    *,
    support: bool = False,
) -> list[Decoded]:
    """Decode routes and masks of many short replies at once, as `parse` does for one.

    A check costs as much for one reply of some tokens as for hundreds.  When a reply is malformed
    none is decoded here: `parse` then refuses that reply alone.
    """
    routes = _routes_together(replies, shape)
    masks = _masks_together(replies, shape, support=support)
    return [Decoded(*pair) for pair in zip(routes, masks, strict=True)]


def _routes_together(
    replies: Sequence[tuple[dict[str, Any], Records]], shape: ModelShape
) -> Sequence[Array | None]:
    rows = [records.get("routes") for _, records in replies]
    want = (shape.num_layers, shape.top_k)
    if any(one is None or one.ndim != 3 or one.shape[1:] != want for one in rows):
        return [None] * len(rows)
    every = np.concatenate([one for one in rows if one is not None])
    try:
        ids = decode_engine_rows(
            every,
            num_rows=len(every),
            num_layers=shape.num_layers,
            moe_layers=shape.moe_layers,
            top_k=shape.top_k,
            num_experts=shape.num_experts,
        )
    except RecordError:
        return [None] * len(rows)
    return np.split(ids, np.cumsum([len(one) for one in rows if one is not None])[:-1], axis=1)


def _masks_together(
    replies: Sequence[tuple[dict[str, Any], Records]], shape: ModelShape, *, support: bool
) -> Sequence[Csr | None]:
    nothing: list[Csr | None] = [None] * len(replies)
    try:
        outputs = [np.asarray(reply["output_ids"], np.int32) for reply, _ in replies]
        lengths = [records["mask_lengths"] for _, records in replies]
        kept = [records["mask_ids"] for _, records in replies]
        sums = [one.sum() for one in lengths]
        fits = zip(outputs, lengths, sums, kept, strict=True)
        if not all(o.shape == n.shape and k.shape == (total,) for o, n, total, k in fits):
            return nothing
        values = [records["mask_logprobs"] for _, records in replies] if support else []
        if any(v.shape != k.shape for v, k in zip(values, kept, strict=False)):
            return nothing
        csr = encode_rows(
            np.concatenate(lengths),
            np.concatenate(kept),
            np.concatenate(outputs),
            vocab_size=shape.vocab_size,
            logprobs=np.concatenate(values) if support else None,
        )
    except (LookupError, TypeError, ValueError, OverflowError, RecordError):
        return nothing
    ends = np.cumsum([len(output) for output in outputs]).tolist()
    return [_cut_mask(csr, begin, end) for begin, end in pairwise([0, *ends])]


def parse(
    reply: dict[str, Any],
    records: Records,
    request: GenerateRequest,
    *,
    version: PolicyVersion,
    shape: ModelShape,
    routing: bool,
    in_flight: InFlight | None = None,
    decoded: Decoded = Decoded(),
    support: bool = False,
) -> Reply:
    """Check one element of a `/generate` answer against its request.

    records: arrays of the file that the reply refers to; empty without a file.  decoded: the arrays
    that `decode_together` has checked.
    version: weights the engine must have used for every token, or, with in_flight, may have begun
    with; routing: the request wanted rows; support: it wanted the log-probabilities of all kept
    entries, or of the likeliest.
    Raises RecordError: `reply` (it is shaped like none), `engine` (the server failed it), `request`
    (it refused it), `finish`, `nan`, `length`, `token_range`, `version`, `logprob_*`, and the
    reasons of `moerl.records`.
    """
    try:
        return _parsed(
            reply, records, request, version, shape, routing, in_flight, decoded, support
        )
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RecordError("reply", f"{request.rollout_id}: {error!r}") from error


def _parsed(
    reply: dict[str, Any],
    records: Records,
    request: GenerateRequest,
    version: PolicyVersion,
    shape: ModelShape,
    routing: bool,
    in_flight: InFlight | None,
    decoded: Decoded,
    support: bool,
) -> Reply:
    """`parse` without the check of types: a value of an unexpected type raises any exception."""
    meta, output = reply["meta_info"], _output_ids(reply, request)
    finish, num_new = _finish(meta, output, request, shape), len(output)
    cached, truncates = int(meta.get("cached_tokens", 0)), request.sampling.truncates
    is_recorded = routing or truncates or support
    if num_new == 0 or (finish is Finish.ABORT and not records and is_recorded):
        # aborted in the waiting queue, never started or retracted: it is sent again
        return _nothing(request, finish, cached)
    _check_tokens(output, request, shape)
    spans = _spans(meta, in_flight or InFlight((version,)), num_new)
    output = output.astype(np.int32)
    rows: Array | None = None
    audit: Array | None = None
    recomputed: tuple[Array, ...] = ()
    if routing:
        later = spans[1:] if in_flight and in_flight.returns_prefix else ()
        firsts = [span.first for span in later]
        rows, audit, recomputed = _routing(records, request, num_new, shape, firsts, decoded)
    positions: tuple[Array | None, Array | None] = None, None
    if routing and shape.index_topk:
        positions = _indexer(records, request, num_new, shape)
    mask = None
    if truncates:
        mask = decoded.mask or _mask(records, output, shape, support=support)
    elif support:
        mask = _top(records, num_new, shape)
    return Reply(
        output_ids=output,
        logprobs=_logprobs(meta, records, output, truncates=truncates, support=support),
        finish=finish,
        routing=rows,
        audit=audit,
        mask=mask,
        cached_tokens=cached,
        indexer=positions[0],
        audit_indexer=positions[1],
        spans=spans,
        recomputed=recomputed,
    )


def _output_ids(reply: dict[str, Any], request: GenerateRequest) -> Array:
    """[n] i64."""
    output = np.asarray(reply["output_ids"])
    if len(output) and output.dtype.kind not in "iu":
        raise RecordError("reply", f"{request.rollout_id}: tokens of type {output.dtype}")
    return output.astype(np.int64).reshape(-1)


def _check_tokens(output: Array, request: GenerateRequest, shape: ModelShape) -> None:
    most = request.sampling.max_new_tokens
    if len(output) > most:
        raise RecordError("length", f"{len(output)} tokens, {most} allowed")
    if output.min() < 0 or output.max() >= shape.vocab_size:
        raise RecordError("token_range", f"token ids must lie in 0..{shape.vocab_size - 1}")


def cut(reply: Reply, request: GenerateRequest) -> list[tuple[GenerateRequest, Reply]]:
    """One reply per version, each with the request that would have brought it alone."""
    if len(reply.spans) < 2:
        return [(request, reply)]
    ends = [span.first for span in reply.spans[1:]] + [len(reply.output_ids)]
    begin = request.rows_from
    parts = []
    for idx, (span, end) in enumerate(zip(reply.spans, ends, strict=True)):
        first = span.first
        own_request = replace(
            request,
            tail_ids=np.concatenate([request.tail_ids, reply.output_ids[:first]]),
            num_sampled=request.num_sampled + first,
        )
        rows = reply.routing
        if rows is not None:
            stop = request.num_tokens + end - 1 - begin
            rows = np.ascontiguousarray(rows[:, own_request.rows_from - begin : stop])
        part = Reply(
            output_ids=reply.output_ids[first:end],
            logprobs=reply.logprobs[first:end],
            finish=reply.finish if end == len(reply.output_ids) else Finish.ABORT,
            routing=rows,
            audit=(reply.audit, *reply.recomputed)[idx] if idx <= len(reply.recomputed) else None,
            mask=_cut_mask(reply.mask, first, end),
            cached_tokens=0 if idx else reply.cached_tokens,
            spans=(span,),
        )
        parts.append((own_request, part))
    return parts


def _cut_mask(mask: Csr | None, first: int, end: int) -> Csr | None:
    if mask is None:
        return None
    offsets, *entries = mask
    begin, stop = offsets[first], offsets[end]
    return offsets[first : end + 1] - begin, *(one[begin:stop] for one in entries)


def _nothing(request: GenerateRequest, finish: Finish, cached: int) -> Reply:
    if finish is not Finish.ABORT:
        raise RecordError("length", f"{request.rollout_id}: no token, yet finish is {finish}")
    empty = np.zeros(0, np.int32)
    return Reply(empty, np.zeros(0, np.float32), finish, None, None, None, cached)


def _finish(
    meta: dict[str, Any], output: Array, request: GenerateRequest, shape: ModelShape
) -> Finish:
    """Why the request ended.  An abort in the step of a natural end counts as that end.

    SGLang sets the abort before it checks for stop tokens, so a sequence whose last token is a
    stop token may be reported as aborted; resuming it would sample beyond its end.
    """
    reason = meta["finish_reason"]
    if reason.get("matched") == "NaN happened":  # SGLang replaced the token it could not sample
        raise RecordError("nan", f"{request.rollout_id}: the engine sampled from NaN logits")
    if (status := reason.get("status_code")) and reason["type"] == Finish.ABORT:
        kind = "request" if status == HTTPStatus.BAD_REQUEST else "engine"
        raise RecordError(kind, f"{request.rollout_id}: HTTP {status}: {reason.get('message')}")
    try:
        finish = Finish(reason["type"])
    except ValueError as error:
        raise RecordError("finish", f"{request.rollout_id}: finish {reason}") from error
    if finish is not Finish.ABORT or not len(output):
        return finish
    stops = (*request.sampling.stop_token_ids, *shape.eos_token_ids)
    if not request.sampling.ignore_eos and int(output[-1]) in stops:
        return Finish.STOP
    return Finish.LENGTH if len(output) >= request.sampling.max_new_tokens else finish


def _spans(meta: dict[str, Any], in_flight: InFlight, num_new: int) -> tuple[VersionSpan, ...]:
    """Spans that tile the output with versions that were served, in their order.

    An empty first span says that older weights filled a part of the prompt's KV cache.
    """
    reported = meta.get("weight_versions") or []
    allowed = {str(version): version for version in in_flight.versions}
    names = [str(span.get("version")) for span in reported]
    ends = [0, *(span.get("end") for span in reported)]
    tiled = [span.get("start") for span in reported] == ends[:-1] and ends[-1] == num_new
    tiled = tiled and all(isinstance(end, int) for end in ends)
    is_empty_first = len(reported) > 1 and ends[1] == 0
    grows = tiled and all(a < b for a, b in pairwise(ends[is_empty_first:]))
    if not grows or names != [name for name in allowed if name in names]:
        raise RecordError("version", f"spans {reported}; want {num_new} tokens of {[*allowed]}")
    spans = [
        VersionSpan(start, allowed[name], in_flight.keeps_kv and idx > 0)
        for idx, (start, name) in enumerate(zip(ends, names, strict=False))
    ]
    return tuple(spans[is_empty_first:])


def _logprobs(
    meta: dict[str, Any], records: Records, output: Array, *, truncates: bool, support: bool
) -> Array:
    values: Any
    if truncates:
        values = records.get("mask_logprobs")
        if support and values is not None:
            values = values[records["mask_ids"] == np.repeat(output, records["mask_lengths"])]
    else:
        entries = meta.get("output_token_logprobs")
        values = None if entries is None else [entry[0] for entry in entries]
        if entries is not None and [entry[1] for entry in entries] != output.tolist():
            raise RecordError("logprob_tokens", "log-probabilities of other tokens than sampled")
    if values is None or len(values) != len(output):
        have = "none" if values is None else len(values)
        raise RecordError("length", f"{have} log-probabilities for {len(output)} tokens")
    if not isinstance(values, np.ndarray):
        values = [np.nan if value is None else value for value in values]
    logprobs = np.asarray(values, np.float32)
    if not np.isfinite(logprobs).all():
        raise RecordError("logprob_finite", "a log-probability is not finite")
    if float(logprobs.max()) > _ROUNDING:
        raise RecordError("logprob_sign", f"a log-probability is {float(logprobs.max()):.3g} > 0")
    return np.minimum(logprobs, np.float32(0.0))


def _routing(
    records: Records,
    request: GenerateRequest,
    num_new: int,
    shape: ModelShape,
    firsts: Sequence[int],
    decoded: Decoded,
) -> tuple[Array, Array | None, tuple[Array, ...]]:
    """Rows of the call, of its prefix with audit, and of the prefix of each later span."""
    begin, split = first_row(request), request.rows_from
    own = request.num_tokens + num_new - 1 - begin
    prefixes = [request.num_tokens + first - 1 for first in firsts]
    rows = records.get("routes")
    if rows is None:
        raise RecordError("routing_rows", f"{request.rollout_id}: the reply has no routing rows")
    ids, num_rows = decoded.routes, own + sum(prefixes)
    if ids is None or ids.shape[1] != num_rows:
        ids = decode_engine_rows(
            rows,
            num_rows=num_rows,
            num_layers=shape.num_layers,
            moe_layers=shape.moe_layers,
            top_k=shape.top_k,
            num_experts=shape.num_experts,
        )
    recomputed: list[Array] = []
    if prefixes:
        ids, *recomputed = np.split(ids, np.cumsum([own, *prefixes])[:-1], axis=1)
        recomputed = [np.ascontiguousarray(part) for part in recomputed]
    ids = np.ascontiguousarray(ids)
    if begin == split:
        return ids, None, tuple(recomputed)
    audit = np.ascontiguousarray(ids[:, :split])
    return np.ascontiguousarray(ids[:, split:]), audit, tuple(recomputed)


def _indexer(
    records: Records, request: GenerateRequest, num_new: int, shape: ModelShape
) -> tuple[Array, Array | None]:
    """Positions of the call's rows and, with audit, of its prefix, in the stored form.

    The engine records them from the first token on.
    """
    rows = records.get("positions")
    if rows is None:
        raise RecordError("indexer_rows", f"{request.rollout_id}: the reply has no positions")
    check_engine_rows(
        rows,
        num_rows=request.num_tokens + num_new - 1,
        num_layers=len(shape.index_layers),
        top_k=shape.index_topk,
    )
    split = request.rows_from
    own = encode(rows[split:], split)
    return own, encode(rows[:split], 0) if request.audit and split else None


def _top(records: Records, num_new: int, shape: ModelShape) -> Csr:
    ids, logprobs = records.get("top_ids"), records.get("top_logprobs")
    if ids is None or logprobs is None or ids.shape != logprobs.shape:
        raise RecordError("mask_rows", "the reply does not have the engine's likeliest entries")
    return encode_top(ids, logprobs, num_tokens=num_new, vocab_size=shape.vocab_size)


def _mask(records: Records, output: Array, shape: ModelShape, *, support: bool) -> Csr:
    lengths, token_ids = records.get("mask_lengths"), records.get("mask_ids")
    if lengths is None or token_ids is None:
        raise RecordError("mask_rows", "the reply has no sampling mask")
    logprobs = records.get("mask_logprobs") if support else None
    return encode_rows(lengths, token_ids, output, vocab_size=shape.vocab_size, logprobs=logprobs)
