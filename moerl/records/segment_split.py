"""Splits a row where the weights change, each part with the routes it was sampled under.

A call under new weights, of a resumed turn or of a later one, prefills the prefix again and with
other routes: no single set of rows fits the tokens on both sides.  Training joins them as a rule
and uses the rows behind each token's log-probability.  With `replay.audit` the engine host also
keeps the re-prefilled rows, and then each part can be scored, or trained
(`rollout.turn_rows: split`), with its own version's weights as if it were a separate rollout.

When weights were updated in place nothing was prefilled again: the recorded rows belong to the KV
cache, and the score of a later part differs by the cache entries of the older weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from moerl.core.errors import RecordError
from moerl.core.types import (
    Array,
    Finish,
    IndexerBlob,
    LogprobBlob,
    MaskBlob,
    Rollout,
    RoutingBlob,
    TurnEnd,
    VersionSpan,
)

Rows = TypeVar("Rows", RoutingBlob, IndexerBlob)
OfSampled = TypeVar("OfSampled", MaskBlob, LogprobBlob)


def split_segments(rollout: Rollout) -> list[Rollout]:
    """One row per version span: earlier tokens are its context, its own tokens are sampled.

    Rows of a part: the audit rows, which its first call re-prefilled, then the rows that its calls
    recorded.  Where nothing was prefilled again (the first span of one version, a kept KV cache)
    the recorded rows cover the prefix, too.
    Raises RecordError `audit_rows` when a re-prefilled prefix has none.
    """
    positions = np.flatnonzero(rollout.loss_mask)
    spans = rollout.versions
    begins = [_call_begin(rollout, int(positions[span.first])) for span in spans]
    bounds = [span.first for span in spans] + [rollout.num_sampled]
    result = []
    for idx, ((first, end), begin) in enumerate(zip(pairwise(bounds), begins, strict=True)):
        stop = begins[idx + 1] if idx + 1 < len(begins) else rollout.num_tokens
        own = _tokens(rollout, positions, first, end)
        if spans[idx].kept_kv or (idx == 0 and rollout.joined_from):
            routing = _recorded(rollout.routing, stop)
            indexer = _recorded(rollout.indexer, stop)
        else:
            _check_audit(rollout, begin, spans[idx])
            routing = _prefilled(rollout.routing, rollout.audit_rows, begin, stop)
            indexer = _prefilled(rollout.indexer, rollout.audit_indexer, begin, stop)
        result.append(
            replace(
                own,
                rollout_id=f"{rollout.rollout_id}/{idx}",
                versions=(replace(spans[idx], first=0),),
                routing=routing,
                indexer=indexer,
            )
        )
    return result


def _call_begin(rollout: Rollout, position: int) -> int:
    """First row of the call that sampled the token at `position`."""
    begins = [part.row_begin for part in rollout.routing if part.row_begin < position]
    return begins[-1] if begins else 0


def _recorded(recorded: Sequence[Rows], stop: int) -> tuple[Rows, ...]:
    return tuple(part for part in recorded if part.row_begin < stop)


def _prefilled(
    recorded: Sequence[Rows], audit: Sequence[Rows], begin: int, stop: int
) -> tuple[Rows, ...]:
    prefix = [part for part in audit if part.row_end == begin][-1:]
    own = [part for part in recorded if begin <= part.row_begin < stop]
    return tuple(prefix + own)


def _check_audit(rollout: Rollout, begin: int, span: VersionSpan) -> None:
    found = [(part.row_end, part.version) for part in rollout.audit_rows]
    if rollout.routing and (begin, span.version) not in found:
        told = [f"{end} of {version}" for end, version in found]
        raise RecordError(
            "audit_rows",
            f"{rollout.rollout_id}: audit rows end at {told}; want {begin} of {span.version}",
        )


def _tokens(rollout: Rollout, positions: Array, first: int, end: int) -> Rollout:
    """Sampled tokens first .. end, with everything before them as context; same routing."""
    num_tokens = int(positions[end - 1]) + 1
    mask = rollout.loss_mask[:num_tokens].copy()
    mask[: positions[first]] = False
    ends = [TurnEnd(e.end - first, e.finish) for e in rollout.ends if first < e.end <= end]
    if not ends or ends[-1].end != end - first:
        ends.append(TurnEnd(end - first, Finish.ABORT))
    return replace(
        rollout,
        token_ids=rollout.token_ids[:num_tokens],
        loss_mask=mask,
        logprobs=rollout.logprobs[first:end],
        sealed_logprobs=_sampled_in(rollout.sealed_logprobs, first, end),
        sampling_mask=_sampled_in(rollout.sampling_mask, first, end),
        top_logprobs=_sampled_in(rollout.top_logprobs, first, end),
        finish=ends[-1].finish,
        turn_ends=tuple(ends) if len(ends) > 1 else (),
        audit_rows=(),
        audit_indexer=(),
    )


def _sampled_in(blobs: Sequence[OfSampled], first: int, end: int) -> tuple[OfSampled, ...]:
    return tuple(replace(p, first=p.first - first) for p in blobs if first <= p.first < end)
