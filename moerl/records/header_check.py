"""Check of a rollout's header, which admission sees without reading the blobs behind it.

The blobs to which rollouts, engine replies and groups refer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from moerl.core.errors import RecordError
from moerl.core.types import (
    Array,
    BlobRef,
    EpisodeGroup,
    IndexerBlob,
    LogprobBlob,
    MaskBlob,
    ModelShape,
    Rollout,
    RoutingBlob,
    Segment,
)


def blob_uris(*records: Rollout | Segment | RecordError) -> set[str]:
    """Blobs of rollouts, or of engine replies; a refused reply has none."""
    return {ref.uri for record in records for ref in blob_refs(record)}


def own_uris(reply: Segment | Exception) -> set[str]:
    """Blobs of one reply that no sibling's reply can refer to yet, if the reply is not taken.

    Rows of a prompt that are in a sibling's blob are the sibling's.
    """
    if not isinstance(reply, Segment):
        return set()
    pieces = [replace(piece, prompt_rows=None, rest=()) for piece in reply.pieces]
    return blob_uris(*pieces)


def group_uris(*groups: EpisodeGroup) -> set[str]:
    """Blobs of all rollouts of some groups."""
    return {ref.uri for ref in group_refs(*groups)}


def group_refs(*groups: EpisodeGroup) -> Iterator[BlobRef]:
    """References to all arrays of all rollouts of some groups."""
    return (ref for group in groups for rollout in group.rollouts() for ref in blob_refs(rollout))


def blob_refs(record: Rollout | Segment | RecordError) -> Iterator[BlobRef]:
    """References to all arrays; the arrays of one engine reply are in one blob."""
    routes: Sequence[RoutingBlob | None] = ()
    masks: Sequence[MaskBlob | None] = ()
    logprobs: Sequence[LogprobBlob | None] = ()
    positions: Sequence[IndexerBlob | None] = ()
    if isinstance(record, Rollout):
        routes = (*record.routing, *record.audit_rows)
        masks = (*record.sampling_mask, *record.top_logprobs)
        logprobs = record.sealed_logprobs
        positions = (*record.indexer, *record.audit_indexer)
    elif isinstance(record, Segment):
        pieces = record.pieces
        routes = [r for p in pieces for r in (p.routing, p.prompt_rows, p.audit_rows)]
        masks = [mask for p in pieces for mask in (p.sampling_mask, p.top_logprobs)]
        logprobs = [piece.sealed_logprobs for piece in pieces]
        positions = [i for p in pieces for i in (p.indexer, p.audit_indexer)]
    yield from (part.ids for part in routes if part is not None)
    for part in masks:
        if part is not None:
            yield from (part.offsets, part.ids)
            yield from () if part.logprobs is None else (part.logprobs,)
    yield from (part.values for part in logprobs if part is not None)
    yield from (part.packed for part in positions if part is not None)


def moved_to_node(value: Any, node: str) -> Any:
    """The value (a group, a URI) with all blobs on another node; names of blobs are unique."""
    if isinstance(value, str):
        scheme, _, rest = value.partition("://")
        return f"blob://{node}/{rest.partition('/')[2]}" if scheme == "blob" else value
    if isinstance(value, tuple):
        return tuple(moved_to_node(item, node) for item in value)
    if isinstance(value, BlobRef):
        return replace(value, uri=moved_to_node(value.uri, node))
    if is_dataclass(value) and not isinstance(value, type):
        changed = {
            one.name: moved_to_node(getattr(value, one.name), node)
            for one in fields(value)
            if isinstance(getattr(value, one.name), tuple) or is_dataclass(getattr(value, one.name))
        }
        return replace(value, **changed)
    return value


def check(rollout: Rollout, shape: ModelShape, *, routing: bool = True) -> None:
    """Check one record's header on admission.  Raises RecordError with a countable reason.

    routing: routes were recorded, unless the model is dense.

    Lengths, ranges and presence are checked here; `moerl.records` checks the bytes behind the blob
    references when they are sealed (they never change afterwards).
    """
    tokens, mask, logprobs = rollout.token_ids, rollout.loss_mask, rollout.logprobs
    num_tokens, num_sampled = len(tokens), int(mask.sum())

    def refuse(reason: str, detail: str) -> None:
        raise RecordError(reason, f"{rollout.rollout_id}: {detail}")

    if tokens.dtype != np.int32 or mask.dtype != np.bool_ or logprobs.dtype != np.float32:
        refuse("dtype", f"got {tokens.dtype}, {mask.dtype}, {logprobs.dtype}; want i32, bool, f32")
    if len(mask) != num_tokens or num_tokens < 2 or not num_sampled or mask[0]:
        refuse("length", f"{num_tokens} tokens, {len(mask)} mask entries, {num_sampled} sampled")
    if int(tokens.min()) < 0 or int(tokens.max()) >= shape.vocab_size:
        refuse("token_range", f"token ids must lie in 0..{shape.vocab_size - 1}")
    _check_logprobs(rollout, num_sampled)
    firsts = [span.first for span in rollout.versions]
    if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)) or firsts[-1] >= num_sampled:
        refuse("versions", f"version spans start at {firsts} for {num_sampled} sampled tokens")
    order = [span.version for span in rollout.versions]
    if order != sorted(order):
        refuse("versions", f"versions go backwards: {[str(v) for v in order]}")
    if routing and shape.moe_layers:
        _check_routing(rollout, len(shape.moe_layers), shape.top_k)
    if routing and shape.index_layers:
        _check_indexer(rollout, shape)
    _check_mask(rollout, num_sampled)


def check_logprobs(logprobs: Array, where: str) -> None:
    """Raises RecordError `logprob_finite` or `logprob_sign`; where: name of the record."""
    if not np.isfinite(logprobs).all():
        raise RecordError("logprob_finite", f"{where}: a log-probability is not finite")
    if len(logprobs) and float(logprobs.max()) > 0.0:
        highest = float(logprobs.max())
        raise RecordError("logprob_sign", f"{where}: a log-probability is {highest:.3g} > 0")


def count_logprobs(rollout: Rollout) -> int:
    """Number of log-probabilities of a header, inline or sealed.  Raises RecordError `length`."""
    at = 0
    for part in rollout.sealed_logprobs:
        ref = part.values
        if part.first != at or ref.shape != (part.num_tokens,) or ref.dtype != "float32":
            raise RecordError(
                "length",
                f"{rollout.rollout_id}: {ref.dtype} log-probabilities {ref.shape} from sampled "
                f"token {part.first}; want float32 [{part.num_tokens}] from {at}",
            )
        at += part.num_tokens
    return at + len(rollout.logprobs)


def _check_logprobs(rollout: Rollout, num_sampled: int) -> None:
    """Sealed values are checked when sealed, and again when read."""
    found = count_logprobs(rollout)
    if found != num_sampled:
        raise RecordError(
            "length", f"{rollout.rollout_id}: {found} logprobs for {num_sampled} sampled tokens"
        )
    check_logprobs(rollout.logprobs, rollout.rollout_id)


def _check_routing(rollout: Rollout, num_moe_layers: int, top_k: int) -> None:
    at = 0
    for part in rollout.routing:
        want = (num_moe_layers, part.row_end - part.row_begin, top_k)
        if part.row_begin != at or part.ids.shape != want or len(part.layers) != num_moe_layers:
            raise RecordError(
                "routing_rows",
                f"{rollout.rollout_id}: rows {part.row_begin}..{part.row_end} of shape "
                f"{part.ids.shape}; want rows from {at} of shape {want}",
            )
        at = part.row_end
    _check_num_rows("routing_rows", "routing rows", at, rollout)


def _check_indexer(rollout: Rollout, shape: ModelShape) -> None:
    at = 0
    for part in rollout.indexer:
        found = (part.row_begin, part.layers, part.top_k, part.packed.shape[:1])
        want = (at, shape.index_layers, shape.index_topk, (len(shape.index_layers),))
        if found != want or part.row_end <= at:
            raise RecordError(
                "indexer_rows",
                f"{rollout.rollout_id}: rows {part.row_begin}..{part.row_end} of {part.top_k} "
                f"positions in layers {list(part.layers)}; want rows from {at} of "
                f"{shape.index_topk} in {list(shape.index_layers)}",
            )
        at = part.row_end
    _check_num_rows("indexer_rows", "rows of positions", at, rollout)


def _check_num_rows(reason: str, what: str, num_rows: int, rollout: Rollout) -> None:
    """One row per fed-in token."""
    if num_rows != rollout.num_tokens - 1:
        raise RecordError(
            reason,
            f"{rollout.rollout_id}: {num_rows} {what} for {rollout.num_tokens} tokens; "
            f"want {rollout.num_tokens - 1}",
        )


def _check_mask(rollout: Rollout, num_sampled: int) -> None:
    if not rollout.sampling.truncates:
        if rollout.sampling_mask:
            raise RecordError("mask_presence", f"{rollout.rollout_id}: mask without truncation")
        if not rollout.top_logprobs:
            return
    elif rollout.top_logprobs:
        raise RecordError("mask_presence", f"{rollout.rollout_id}: likeliest entries beside a mask")
    at = 0
    for part in rollout.sampling_mask or rollout.top_logprobs:
        if part.first != at or part.offsets.shape != (part.num_tokens + 1,):
            raise RecordError("mask_rows", f"{rollout.rollout_id}: mask rows start at {part.first}")
        at += part.num_tokens
    if at != num_sampled:
        raise RecordError(
            "mask_rows", f"{rollout.rollout_id}: {at} mask rows for {num_sampled} sampled tokens"
        )
