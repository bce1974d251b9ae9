"""Builds rollouts and multi-turn episodes from the segments that engines return.

`PartialRollout` joins the segments of one turn.  A partial of T' tokens has routing rows
0..T'-2; the row of its last token is produced when that token is fed again, by the resumed call
under its weights.  So concatenation is complete, and the row count T-1 is checked on admission.

`PartialEpisode` joins turns with an environment's replies between them.  The prompt of a turn is
the whole conversation so far, so interruptions work the same in every turn.  A turn requests the
rows from the last token of the turn before on, under any weights: `turn_rows` makes rows of
training of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from moerl.config.schema import SamplingConfig
from moerl.controller.generated import Generated, Sealed
from moerl.controller.turn_rows import SampledTurn, SharedIds, TurnRows, join, rows_of
from moerl.core.errors import RecordError
from moerl.core.messages import Scorer
from moerl.core.types import (
    Array,
    BlobRef,
    EpisodeGroup,
    Finish,
    GenerateRequest,
    GraphTurn,
    IndexerBlob,
    LogprobBlob,
    MaskBlob,
    ModelShape,
    PolicyVersion,
    Prompt,
    Rollout,
    RoutingBlob,
    SamplingParams,
    Score,
    Segment,
    Turn,
)

Replies = Sequence[Segment | RecordError]
EngineCall = Callable[[Sequence[GenerateRequest]], Awaitable[Replies]]


class PartialRollout:
    """An unfinished rollout; one per sibling of a group."""

    def __init__(
        self,
        rollout_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        audit: bool,
        rows_known: int = 0,
        slice_tokens: int = 0,
        prompt_ids: Array | None = None,
    ) -> None:
        """prompt_ids: the prompt's tokens as an array that siblings share; None = make one.

        rows_known: leading rows that earlier turns have delivered.

        slice_tokens: most tokens that one call samples; 0 = only sampling's own limit.
        """
        self.rollout_id, self.prompt, self.sampling, self.audit = (
            rollout_id,
            prompt,
            sampling,
            audit,
        )
        if prompt_ids is None:
            prompt_ids = np.asarray(prompt.token_ids, np.int32)
        self.prompt_ids = prompt_ids
        self.rows_known, self._slice = rows_known, slice_tokens
        self._asked = 0  # max tokens of the last request
        self.segments: list[Segment] = []
        self._calls = 0

    @property
    def num_sampled(self) -> int:
        return sum(len(segment.output_ids) for segment in self.segments)

    @property
    def num_fed(self) -> int:
        """Number of prompt tokens of the next request."""
        return len(self.prompt_ids) + self.num_sampled

    @property
    def finish(self) -> Finish:
        return self.segments[-1].finish

    @property
    def newest(self) -> PolicyVersion:
        """Newest version of the tokens so far; a resume on older weights would break the order."""
        return self.segments[-1].version if self.segments else PolicyVersion(0, 0)

    @property
    def finished(self) -> bool:
        return bool(self.segments) and self.segments[-1].finish != Finish.ABORT

    def request(self) -> GenerateRequest:
        """The next request: feeds all tokens so far, samples the rest (of a slice)."""
        left = self.sampling.max_new_tokens - self.num_sampled
        self._asked = min(left, self._slice or left)
        request = GenerateRequest(
            rollout_id=self.rollout_id,
            segment=self._calls,
            tail_ids=self.output_ids,
            num_sampled=self.num_sampled,
            sampling=replace(self.sampling, max_new_tokens=self._asked),
            audit=self.audit,
            rows_known=self.rows_known,
            prompt_ids=self.prompt_ids,
        )
        self._calls += 1
        return request

    def recomputed(self, segment: Segment) -> int:
        """Tokens of this rollout that the call behind `segment` computed again.

        All but the newest token had been computed before; cached ones are not computed again.  A
        call that sampled nothing counts 0, because the engine does not report its prefill.  Call
        before `add`.
        """
        if not self.segments or not len(segment.output_ids):
            return 0
        return self.num_fed - 1 - segment.cached_tokens

    def add(self, segment: Segment) -> None:
        """Add one reply: one segment per weight version that sampled it.

        A segment aborted before its first token adds nothing.  Raises RecordError.
        """
        for piece in segment.pieces:
            self._add(piece)
        if segment.pieces[-1].finish == Finish.LENGTH:
            self._end_slice()

    def _end_slice(self) -> None:
        """The call ended at its slice's limit, not at the rollout's: the rollout is not finished.

        The engine checks the limit first, so the last token may still be a stop token.
        """
        if self._asked == self.sampling.max_new_tokens or not self._slice:
            return
        last, stops = int(self.segments[-1].output_ids[-1]), self.sampling.stop_token_ids
        if last in stops and not self.sampling.ignore_eos:
            self.segments[-1] = replace(self.segments[-1], finish=Finish.STOP)
        elif self.num_sampled < self.sampling.max_new_tokens:
            self.segments[-1] = replace(self.segments[-1], finish=Finish.ABORT)

    def _add(self, segment: Segment) -> None:
        if segment.rollout_id != self.rollout_id:
            raise RecordError("rollout_id", f"{segment.rollout_id} for {self.rollout_id}")
        if self.segments and segment.version < self.segments[-1].version:
            raise RecordError(
                "versions",
                f"{self.rollout_id}: {segment.version} after {self.segments[-1].version}",
            )
        if len(segment.output_ids) or segment.finish != Finish.ABORT:
            self.segments.append(segment)
        if self.num_sampled == self.sampling.max_new_tokens and not self.finished:
            # The limit was reached at the moment of the abort: the rollout is finished.
            self.segments[-1] = replace(self.segments[-1], finish=Finish.LENGTH)

    def blob_uris(self) -> set[str]:
        """Every blob sealed so far, for deletion when the rollout is dropped."""
        return blob_uris(*self.segments)

    @property
    def output_ids(self) -> Array:
        """Tokens sampled so far."""
        parts = [np.zeros(0, np.int32), *(s.output_ids for s in self.segments)]
        return np.concatenate(parts).astype(np.int32, copy=False)

    def turn(self) -> SampledTurn:
        """Sampled turns, for `turn_rows`."""
        return SampledTurn(self.prompt_ids, tuple(self.segments), self.sampling)

    def rollout(self) -> Rollout:
        """The finished record of a first turn."""
        return join(self.rollout_id, [self.turn()])


class PartialEpisode:
    """An unfinished episode; one per sibling of a group."""

    own_score: Score | None = None
    is_chain = True

    def __init__(
        self,
        episode_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        audit: bool,
        max_turns: int = 1,
        slice_tokens: int = 0,
        prompt_ids: Array | None = None,
    ) -> None:
        """prompt_ids: the prompt's tokens as an array that siblings share.

        slice_tokens: most tokens of a turn that one engine call samples; 0 = no limit.
        """
        self._slice = slice_tokens
        self.episode_id, self.prompt, self.max_turns = episode_id, prompt, max_turns
        self.turns = [
            PartialRollout(
                episode_id,
                prompt,
                sampling,
                audit=audit,
                slice_tokens=slice_tokens,
                prompt_ids=prompt_ids,
            )
        ]
        self._ids = SharedIds(self.turns[0].prompt_ids)  # of the conversation
        self.lacks_context = False  # the last reply of the environment was too long
        self._wasted: set[str] = set()  # blobs of a refused try
        self._ended = max_turns == 1

    @property
    def finished(self) -> bool:
        """True if sampling is done and the environment has no reply to add."""
        return self.turns[-1].finished and self._ended

    @property
    def listens(self) -> bool:
        """True if a turn ended and `reply` must be called."""
        return self.turns[-1].finished and not self._ended

    @property
    def newest(self) -> PolicyVersion:
        return max(turn.newest for turn in self.turns)

    @property
    def oldest(self) -> PolicyVersion:
        """Version of the first token."""
        return next(turn.segments[0].version for turn in self.turns if turn.segments)

    @property
    def num_sampled(self) -> int:
        return sum(turn.num_sampled for turn in self.turns)

    def request(self) -> GenerateRequest:
        return self.turns[-1].request()

    def add(self, segment: Segment) -> None:
        """Add a reply of the engine.  Raises RecordError."""
        if segment.version < self.newest:
            raise RecordError(
                "versions", f"{self.episode_id}: {segment.version} after {self.newest}"
            )
        self.turns[-1].add(segment)

    def recomputed(self, segment: Segment) -> int:
        """`PartialRollout.recomputed` of the current turn."""
        return self.turns[-1].recomputed(segment)

    def reply(self, token_ids: Sequence[int]) -> None:
        """Add the environment's reply to the ended turn; an empty one ends the episode."""
        if not token_ids:
            self._ended = True
            return
        before, number = self.turns[-1], len(self.turns)
        self._ids.append(before.output_ids)
        said = self._ids.used
        self._ids.append(np.asarray(token_ids, np.int32))
        self.turns.append(
            PartialRollout(
                f"{self.episode_id}.t{number}",
                self.prompt,
                before.sampling,
                audit=before.audit,
                rows_known=said - 1,  # the last token is fed only now
                slice_tokens=self._slice,
                prompt_ids=self._ids.first(self._ids.used),
            )
        )
        self._ended = number + 1 == self.max_turns

    def end_for_context(self) -> None:
        """The context has no room for the environment's reply and a further turn."""
        self.lacks_context = self._ended = True

    def rows(self, turn_rows: TurnRows) -> list[Rollout]:
        """The rows that train the finished episode.  Raises RecordError."""
        return rows_of(self.episode_id, [turn.turn() for turn in self.turns], turn_rows)

    def nodes(self, turn_rows: TurnRows) -> tuple[Turn, ...]:
        """The rows, each of which continues the one before.  Raises RecordError."""
        rows = self.rows(turn_rows)
        return tuple(Turn(row, (i - 1,) if i else ()) for i, row in enumerate(rows))

    @property
    def graph(self) -> tuple[GraphTurn, ...]:
        names = ["", *(turn.rollout_id for turn in self.turns)]
        turns = (turn.turn() for turn in self.turns)
        return tuple(
            turn.in_graph(name, parent)
            for turn, (parent, name) in zip(turns, pairwise(names), strict=True)
        )

    def texts(self, decode: Callable[[Sequence[int]], str]) -> list[str]:
        """Text of the policy in each turn."""
        return [decode(turn.output_ids.tolist()) for turn in self.turns]

    def again(self, episode_id: str) -> PartialEpisode:
        """The episode from its beginning, under another name, after a record was refused.

        Siblings may refer to rows of the prompt in a blob of this one, so it inherits the blobs.
        """
        first = self.turns[0]
        other = PartialEpisode(
            episode_id,
            self.prompt,
            first.sampling,
            audit=first.audit,
            max_turns=self.max_turns,
            slice_tokens=self._slice,
            prompt_ids=first.prompt_ids,
        )
        other._wasted = self.blob_uris()
        return other

    def blob_uris(self) -> set[str]:
        """Every blob sealed so far, for deletion when the episode is dropped."""
        return self._wasted | used_uris([self])


def used_uris(episodes: Iterable[Generated]) -> set[str]:
    """Blobs to which a turn of these episodes refers."""
    return {uri for episode in episodes for turn in episode.turns for uri in turn.blob_uris()}


def sealed_uris(episodes: Iterable[Sealed]) -> set[str]:
    """Every blob sealed for these episodes so far."""
    return {uri for episode in episodes for uri in episode.blob_uris()}


def wasted_uris(episodes: Sequence[Generated]) -> set[str]:
    """Blobs of a finished group to which no turn of it refers."""
    return sealed_uris(episodes) - used_uris(episodes)


def prompt_uris(episodes: Iterable[PartialEpisode]) -> set[str]:
    """Blobs with rows of a prompt that siblings may share."""
    segments = [s for episode in episodes for s in episode.turns[0].segments[:1]]
    return {s.prompt_rows.ids.uri for s in segments if s.prompt_rows is not None}


class Environment:
    """Replies to the policy between turns, from the task's code in the scorer's processes."""

    def __init__(
        self,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        encode: Callable[[str], list[int]],
        context_tokens: int = 0,
    ) -> None:
        """context_tokens: longest sequence that the engines take; 0 = not known."""
        self._scorer, self._decode, self._encode = scorer, decode, encode
        self._context = context_tokens

    async def answer(self, episode: PartialEpisode) -> None:
        """Add the reply or end the episode.  Raises ScoreError when it raises or times out."""
        text = await self._scorer.reply(episode.prompt, episode.texts(self._decode))
        token_ids = self._encode(text) if text else []
        turn = episode.turns[-1]
        needed = turn.num_fed + len(token_ids) + turn.sampling.max_new_tokens
        if token_ids and self._context and needed > self._context:
            episode.end_for_context()
        else:
            episode.reply(token_ids)


class Partial(Protocol):
    """A rollout or an episode that is being sampled."""

    def request(self) -> GenerateRequest: ...

    def add(self, segment: Segment) -> None:
        """Raises RecordError when the segment does not continue the rollout."""
        ...


async def generate(
    partials: Sequence[Partial], call: EngineCall
) -> tuple[Replies, dict[int, RecordError]]:
    """Send the next request of each rollout and add its reply, when all have been answered.

    Returns the replies, and the errors of refused records by index.
    """
    replies = await call([partial.request() for partial in partials])
    refused: dict[int, RecordError] = {}
    for index, (partial, reply) in enumerate(zip(partials, replies, strict=True)):
        try:
            if isinstance(reply, RecordError):
                raise reply
            partial.add(reply)
        except RecordError as error:
            refused[index] = error
    return replies, refused


def sampling_params(config: SamplingConfig, model: ModelShape) -> SamplingParams:
    """Every parameter of a request, from the settings and the model's stop tokens."""
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop_token_ids=model.eos_token_ids,
        ignore_eos=config.ignore_eos,
    )


def blob_uris(*records: Rollout | Segment | RecordError) -> set[str]:
    """Blobs of rollouts, or of engine replies; a refused reply has none."""
    return {ref.uri for record in records for ref in blob_refs(record)}


def own_uris(reply: Segment | Exception) -> set[str]:
    """Blobs of one reply that no sibling's reply can refer to yet, if this one is not taken.

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
    """References to all arrays; those of one engine reply are in one blob."""
    routes: Sequence[RoutingBlob | None] = ()
    masks: Sequence[MaskBlob | None] = ()
    logprobs: Sequence[LogprobBlob | None] = ()
    positions: Sequence[IndexerBlob | None] = ()
    if isinstance(record, Rollout):
        routes, masks = (*record.routing, *record.audit_rows), record.sampling_mask
        logprobs = record.sealed_logprobs
        positions = (*record.indexer, *record.audit_indexer)
    elif isinstance(record, Segment):
        pieces = record.pieces
        routes = [r for p in pieces for r in (p.routing, p.prompt_rows, p.audit_rows)]
        masks = [piece.sampling_mask for piece in pieces]
        logprobs = [piece.sealed_logprobs for piece in pieces]
        positions = [i for p in pieces for i in (p.indexer, p.audit_indexer)]
    yield from (part.ids for part in routes if part is not None)
    yield from (ref for part in masks if part is not None for ref in (part.offsets, part.ids))
    yield from (part.values for part in logprobs if part is not None)
    yield from (part.packed for part in positions if part is not None)
