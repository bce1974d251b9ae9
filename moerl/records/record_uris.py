"""The blobs to which rollouts, engine replies and groups refer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from moerl.core.errors import RecordError
from moerl.core.types import (
    BlobRef,
    EpisodeGroup,
    IndexerBlob,
    LogprobBlob,
    MaskBlob,
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
