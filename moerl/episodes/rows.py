"""Rows of training from the turns of an episode (`rollout.turn_rows`).

A chain of turns is one row: tokens prompt, turn, reply, turn, ..., loss on the sampled tokens of
every turn.  Each token is forwarded once, where a row per turn forwards the first tokens once per
turn.  Rows of a turn's first call begin at the last token of the turn before, which is fed only
then, so the parts of all calls tile the row; nothing is shifted and no row is invented.

    join      one row, whatever the weights did between the calls: each token keeps the rows of the
              pass that produced it
    split     a new row where the weights change, with the rows that the call under the new weights
              prefilled: each row is exact under one version
    separate  a row per turn, as long as the conversation at its end

In all three a row has one distribution and one role: a turn sampled at another temperature or
truncation, or in another role of the policy, begins a new one.  A turn on several branches is
trained in one of them and is context in the others (`trained`), as in slime and prime-rl.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

import numpy as np

from moerl.core.errors import RecordError
from moerl.core.types import (
    Array,
    LogprobBlob,
    MaskBlob,
    Rollout,
    Segment,
    TurnEnd,
)
from moerl.episodes.turn import SampledTurn, versions_of
from moerl.records.segment_split import split_segments

TurnRows = Literal["join", "split", "separate"]
Blob = TypeVar("Blob", MaskBlob, LogprobBlob)


def rows_of(episode_id: str, turns: Sequence[SampledTurn], turn_rows: TurnRows) -> list[Rollout]:
    """The rows that train a chain of turns, in order.

    Raises RecordError `turns` when a turn does not continue its predecessor, `audit_rows` when
    `split` lacks the rows of a prefix.
    """
    found: list[Rollout] = []
    for first, last in _runs(turns, separate=turn_rows == "separate"):
        chain = [
            turn if idx >= first else replace(turn, trained=False)
            for idx, turn in enumerate(turns[: last + 1])
        ]
        row = join(f"{episode_id}.t{first}" if first else episode_id, chain)
        splits = turn_rows == "split" and row.joined_from < row.num_sampled
        found += split_segments(row) if splits else [row]
    return found


def join(rollout_id: str, turns: Sequence[SampledTurn]) -> Rollout:
    """One row of a chain of turns, validated on admission.  Raises RecordError `turns`."""
    last = turns[-1]
    tokens = np.concatenate([last.prompt_ids, last.output_ids]).astype(np.int32, copy=False)
    mask = np.zeros(len(tokens), np.bool_)
    for turn, after in zip(turns, [*turns[1:], None], strict=True):
        begin = len(turn.prompt_ids)
        if after is not None and not _continues(after, turn):
            raise RecordError("turns", f"{rollout_id}: the turn at {begin} is not in the next one")
        mask[begin : turn.end] = turn.trained
    calls = [segment for turn in turns for segment in turn.segments]
    own = [segment for turn in turns if turn.trained for segment in turn.segments]
    return Rollout(
        rollout_id=rollout_id,
        token_ids=tokens,
        loss_mask=mask,
        logprobs=np.concatenate([s.logprobs for s in own]).astype(np.float32),
        versions=versions_of(own),
        routing=tuple(
            rows for s in calls for rows in (s.prompt_rows, s.routing) if rows is not None
        ),
        sampling_mask=_placed(own, lambda s: s.sampling_mask),
        finish=own[-1].finish,
        sampling=last.sampling,
        engine=own[-1].engine,
        audit_rows=tuple(s.audit_rows for s in calls if s.audit_rows is not None),
        sealed_logprobs=_placed(own, lambda s: s.sealed_logprobs),
        indexer=tuple(s.indexer for s in calls if s.indexer is not None),
        audit_indexer=tuple(s.audit_indexer for s in calls if s.audit_indexer is not None),
        turn_ends=_ends(turns),
        top_logprobs=_placed(own, lambda s: s.top_logprobs),
    )


def _continues(turn: SampledTurn, before: SampledTurn) -> bool:
    begin = len(before.prompt_ids)
    said = turn.prompt_ids[begin : before.end]
    return _begins(turn.prompt_ids, before.prompt_ids) and np.array_equal(said, before.output_ids)


def _begins(whole: Array, part: Array) -> bool:
    """Whether `whole` begins with `part`; memory that both share is not compared."""
    begin = whole[: len(part)]
    if len(begin) == len(part) and begin.ctypes.data == part.ctypes.data:
        return begin.dtype == part.dtype
    return np.array_equal(begin, part)


def _runs(turns: Sequence[SampledTurn], *, separate: bool) -> Iterator[tuple[int, int]]:
    """First and last trained turn of each row."""
    trained = [idx for idx, turn in enumerate(turns) if turn.trained]
    first = 0
    for place, idx in enumerate(trained):
        after = trained[place + 1 : place + 2]
        if separate or not after or _differ(turns[idx], turns[after[0]]):
            yield trained[first], idx
            first = place + 1


def _differ(turn: SampledTurn, after: SampledTurn) -> bool:
    """A row has one role and temperature, and masks for all of its sampled tokens or for none."""
    a, b = turn.sampling, after.sampling
    return turn.role != after.role or (a.temperature, a.top_p, a.top_k, a.min_p) != (
        b.temperature,
        b.top_p,
        b.top_k,
        b.min_p,
    )


def _ends(turns: Sequence[SampledTurn]) -> tuple[TurnEnd, ...]:
    trained = [turn for turn in turns if turn.trained]
    ends = np.cumsum([len(turn.output_ids) for turn in trained]).tolist()
    found = [TurnEnd(e, t.segments[-1].finish) for e, t in zip(ends, trained, strict=True)]
    return tuple(found) if len(found) > 1 else ()


def _placed(
    segments: Sequence[Segment], blob_of: Callable[[Segment], Blob | None]
) -> tuple[Blob, ...]:
    """Blobs of the segments that have one, with the index of their first sampled token."""
    at, parts = 0, []
    for segment in segments:
        if (blob := blob_of(segment)) is not None:
            parts.append(replace(blob, first=at))
        at += len(segment.output_ids)
    return tuple(parts)
