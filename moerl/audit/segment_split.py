"""Splits an interrupted rollout into its segments, each with the routes it was sampled under.

A resumed call prefills the prefix again under other weights and with other routes: no single set of
rows fits two segments.  Training uses the rows behind each token's log-probability; with
`replay.audit` the engine host also keeps the re-prefilled rows, and then each segment can be scored
with its own version's weights as if it were a separate rollout.

When weights were updated in place nothing was prefilled again: the recorded rows are those of the
KV cache, and the score of a later segment differs by the cache entries of the older weights.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from moerl.errors import RecordError
from moerl.types import Rollout, RoutingBlob, VersionSpan


def split_segments(rollout: Rollout) -> list[Rollout]:
    """One rollout per engine call: earlier tokens are its prompt, its own tokens are sampled.

    Routing of segment i > 0 is audit rows 0 .. b_i (on a kept KV cache: the recorded ones) and then
    the segment's own rows from b_i on; the first segment has every part that begins inside the
    prompt.  Raises RecordError `audit_rows` when a resumed segment has no audit rows of the right
    length.
    """
    prompt_len = rollout.prompt_len
    # A part that ends before the row of the last prompt token holds prompt rows only.
    lead = sum(part.row_end <= prompt_len - 1 for part in rollout.routing)
    owns = (rollout.routing[: lead + 1], *((part,) for part in rollout.routing[lead + 1 :]))
    begins = [0, *(part.row_begin for part in rollout.routing[lead + 1 :])]
    # The row of a partial's last token is produced by the resumed call: first = begin + 1 - prompt.
    firsts = [0] + [begin + 1 - prompt_len for begin in begins[1:]]
    spans = [next(s for s in reversed(rollout.versions) if s.first <= first) for first in firsts]
    _check_audit_rows(rollout, begins, spans)
    audit, audit_positions = iter(rollout.audit_rows), iter(rollout.audit_indexer)
    result = []
    for idx, (first, end) in enumerate(pairwise([*firsts, rollout.num_sampled])):
        prefix: tuple[RoutingBlob, ...] = ()
        if idx:
            kept = tuple(part for part in rollout.routing if part.row_end <= begins[idx])
            prefix = kept if spans[idx].kept_kv else (next(audit),)
        stop = begins[idx + 1] if idx + 1 < len(begins) else rollout.num_tokens
        positions = [p for p in rollout.indexer if begins[idx] <= p.row_begin < stop]
        if idx and positions:  # the prefix was prefilled again: weights are not exchanged in place
            positions.insert(0, next(audit_positions))
        cut = _cut(rollout, first, end)
        result.append(
            replace(
                cut,
                rollout_id=f"{rollout.rollout_id}/{idx}",
                versions=(replace(spans[idx], first=0),),
                routing=(*prefix, *owns[idx]),
                indexer=tuple(positions),
            )
        )
    return result


def _check_audit_rows(rollout: Rollout, begins: list[int], spans: list[VersionSpan]) -> None:
    """Check that every re-prefilled prefix has audit rows up to its segment's begin."""
    pairs = zip(begins[1:], spans[1:], strict=True)
    audited = [begin for begin, span in pairs if not span.kept_kv]
    ends = [part.row_end for part in rollout.audit_rows]
    if ends != audited:
        raise RecordError(
            "audit_rows",
            f"{rollout.rollout_id}: audit rows end at {ends}, segments begin at {audited}",
        )


def _cut(rollout: Rollout, first: int, end: int) -> Rollout:
    """Sampled tokens first .. end, with earlier ones as part of the prompt; same routing."""
    prompt_len = rollout.prompt_len
    return replace(
        rollout,
        token_ids=rollout.token_ids[: prompt_len + end],
        loss_mask=np.arange(prompt_len + end) >= prompt_len + first,
        logprobs=rollout.logprobs[first:end],
        sealed_logprobs=tuple(
            replace(part, first=part.first - first)
            for part in rollout.sealed_logprobs
            if first <= part.first < end
        ),
        sampling_mask=tuple(
            replace(part, first=part.first - first)
            for part in rollout.sampling_mask
            if first <= part.first < end
        ),
        audit_rows=(),
        audit_indexer=(),
    )
