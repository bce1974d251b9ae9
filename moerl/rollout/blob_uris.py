"""Which blobs records name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moerl.errors import RecordError
from moerl.types import BlobRef, EpisodeGroup, LogprobBlob, MaskBlob, Rollout, RoutingBlob, Segment


def blob_uris(*records: Rollout | Segment | RecordError) -> set[str]:
    """Blobs of rollouts, or of the replies to an engine call; a refused reply has none."""
    return {ref.uri for record in records for ref in _refs(record)}


def group_uris(*groups: EpisodeGroup) -> set[str]:
    """Blobs of all rollouts of some groups."""
    return blob_uris(*(rollout for group in groups for rollout in group.rollouts()))


def _refs(record: Rollout | Segment | RecordError) -> Iterator[BlobRef]:
    """Into every blob; the arrays of one engine reply are in one blob."""
    routes: Sequence[RoutingBlob | None] = ()
    masks: Sequence[MaskBlob | None] = ()
    logprobs: Sequence[LogprobBlob | None] = ()
    if isinstance(record, Rollout):
        routes, masks = (*record.routing, *record.audit_rows), record.sampling_mask
        logprobs = record.sealed_logprobs
    elif isinstance(record, Segment):
        pieces = record.pieces
        routes = [r for p in pieces for r in (p.routing, p.prompt_rows, p.audit_rows)]
        masks = [piece.sampling_mask for piece in pieces]
        logprobs = [piece.sealed_logprobs for piece in pieces]
    yield from (part.ids for part in routes if part is not None)
    yield from (part.offsets for part in masks if part is not None)
    yield from (part.values for part in logprobs if part is not None)
