"""Episodes that have ended: their turns, and the rows that train them.

Turns form a forest, because a program may begin a conversation again or continue one twice.  Each
branch is a row of training.  A turn on several branches is trained in the first one and is context
in the others, as in slime and prime-rl.

A turn continues its parent when its prompt begins with all tokens of it.  Where the chat template
has replaced the last one, a stop token, the parent ends a branch of its own.

Rows of training from the turns of an episode (`rollout.turn_rows`).

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

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np

from moerl.core.episode_view import EpisodeView, TurnView
from moerl.core.errors import RecordError
from moerl.core.types import (
    Array,
    Finish,
    GraphTurn,
    LogprobBlob,
    MaskBlob,
    PolicyVersion,
    Prompt,
    Rollout,
    Score,
    Segment,
    Turn,
    TurnEnd,
)
from moerl.episodes.turn import SampledTurn, SharedIds, versions_of
from moerl.records.header_check import blob_uris
from moerl.records.segment_split import split_segments

Decode = Callable[[Sequence[int]], str]
# Result of an episode that its player has handed over
Retired = Literal["admitted", "dropped", "played_again"]

# Failures of an episode: the controller ended it; its program or worker has died, through no fault
# of its own, and the group is played again; another episode has blocked its worker, and the group
# is played again, however often; the engine's record of a turn was refused, and the episode is
# played again.
ENDED, LOST, BLOCKED, REFUSED = "ended", "lost", "blocked", "refused"


class RecordedTurn:
    """A turn that has ended.  Its prompt begins with `inherited` tokens of its parent.

    These are all tokens of the parent, or all but a last stop token that the template replaces.
    sampled: the replies to its own calls.  origin: how its request relates to earlier ones.
    """

    __slots__ = (
        "_ids",
        "before",
        "fork_at",
        "inherited",
        "name",
        "num_tokens",
        "origin",
        "sampled",
    )

    def __init__(
        self,
        before: RecordedTurn | None,
        inherited: int,
        origin: str,
        name: str,
        sampled: SampledTurn,
        fork_at: int = -1,
    ) -> None:
        """Raises RecordError when the turn does not continue its parent.

        fork_at: number of its parent's sampled tokens that it keeps; -1: all.
        """
        self.before, self.inherited, self.origin, self.name = before, inherited, origin, name
        self.fork_at = fork_at
        self.sampled, self.num_tokens = sampled, sampled.end
        self._ids: SharedIds | None = None  # of the conversation, made for the first continuation
        if before is not None:
            self._continue(before)

    @property
    def continues(self) -> bool:
        """Whether its prompt begins with all tokens of its parent."""
        return self.before is not None and self.inherited == self.before.num_tokens

    @property
    def newest(self) -> PolicyVersion:
        """Version of its last token."""
        return self.sampled.segments[-1].version

    @property
    def token_ids(self) -> Array:
        """[T] i32, the conversation at its end."""
        return self._shared().first(self.num_tokens)

    @property
    def output_ids(self) -> Array:
        return self.sampled.output_ids

    @property
    def num_sampled(self) -> int:
        return self.num_tokens - len(self.sampled.prompt_ids)

    @property
    def finish(self) -> Finish:
        return self.sampled.segments[-1].finish

    @property
    def rollout(self) -> Rollout:
        """Its row, with the rows of the turns whose tokens it begins with.

        It is as long as the conversation and made at each call.
        """
        return join(self.name, [*self._chain(), self.sampled])

    def blob_uris(self) -> set[str]:
        return blob_uris(*self.sampled.segments)

    def _chain(self) -> list[SampledTurn]:
        """The turns whose routing rows it need not deliver again, oldest first, untrained."""
        found: list[SampledTurn] = []
        turn = self
        while turn.continues:
            assert turn.before is not None
            turn = turn.before
            found.append(replace(turn.sampled, trained=False))
        return found[::-1]

    def _continue(self, before: RecordedTurn) -> None:
        prompt = self.sampled.prompt_ids
        if not _begins(prompt, before.token_ids[: self.inherited]):
            raise RecordError("turns", f"the turn at {len(prompt)} does not continue its parent")
        ids = before._shared()
        if ids.used != self.inherited:  # another turn continues it, or its last token is replaced
            ids = SharedIds(prompt[: self.inherited])
        ids.append(np.concatenate([prompt[self.inherited :], self.sampled.output_ids]))
        self._hold(ids)

    def _shared(self) -> SharedIds:
        if self._ids is None:
            ids = SharedIds(np.concatenate([self.sampled.prompt_ids, self.sampled.output_ids]))
            self._hold(ids)
        assert self._ids is not None
        return self._ids

    def _hold(self, ids: SharedIds) -> None:
        """Keep the tokens once, in the array that the turns of a conversation share."""
        self._ids = ids
        prompt_ids = ids.first(len(self.sampled.prompt_ids))
        self.sampled = replace(self.sampled, prompt_ids=prompt_ids)


def _begins(ids: Array, prefix: Array) -> bool:
    return len(prefix) <= len(ids) and bool(np.array_equal(ids[: len(prefix)], prefix))


@dataclass(frozen=True, slots=True, eq=False)
class FinishedEpisode:
    """An episode that has ended.

    turns: recorded turns in the order of their ends; graph: all requested turns, with the reason of
    each that is left out.  uris: every blob that was sealed for it.  failure: why it cannot be
    trained, in one word; detail: the same in a sentence.  own_score: by its own program or
    environment, if any.  on_retired: receives its result.
    """

    episode_id: str
    prompt: Prompt
    turns: tuple[RecordedTurn, ...]
    uris: frozenset[str] = frozenset()
    failure: str = ""
    detail: str = ""
    refused: RecordError | None = None  # of a record, for which it is played again
    own_score: Score | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    graph: tuple[GraphTurn, ...] = ()
    on_retired: Callable[[Retired], None] = lambda how: None

    @property
    def lacks_context(self) -> bool:
        """The context had no room for a further turn."""
        return bool(self.counts.get("context_ends"))

    @property
    def rows_in_order(self) -> bool:
        """Whether the rows train its turns in the order in which they ended."""
        order = [place for branch in self._branches() for place in branch]
        return list(dict.fromkeys(order)) == list(range(len(self.turns)))

    @property
    def num_sampled(self) -> int:
        return sum(turn.num_sampled for turn in self.turns)

    def nodes(self, turn_rows: TurnRows) -> tuple[Turn, ...]:
        """The rows that train every turn once.  Raises RecordError."""
        nodes: list[Turn] = []
        row_of: dict[int, int] = {}  # turn -> the row that trains it
        for branch in self._branches():
            new = [place for place in branch if place not in row_of]
            chain = [replace(self.turns[place].sampled, trained=place in new) for place in branch]
            name = f"{self.episode_id}.b{len(nodes)}" if nodes else self.episode_id
            before = next((row_of[place] for place in branch[::-1] if place in row_of), None)
            rows = rows_of(name, chain, turn_rows)
            for place in new:
                end = self.turns[place].sampled.end
                row_of[place] = len(nodes) + _first_with(rows, end)
            for row in rows:
                trained = [self.turns[place] for place in new if self._is_in(place, row)]
                origins = tuple(turn.origin for turn in trained if turn.origin)
                parents = () if before is None else (before,)
                role, fork_at = trained[0].sampled.role, trained[0].fork_at
                nodes.append(Turn(row, parents, origins, role, fork_at))
                before = len(nodes) - 1
        return tuple(nodes)

    @property
    def answers(self) -> list[FinishedEpisode]:
        """The scored episodes: the episode without its forks, then each fork as an episode."""
        forks = [turn for turn in self.turns if turn.fork_at >= 0]
        if not forks:
            return [self]
        plain = replace(self, turns=tuple(turn for turn in self.turns if turn.fork_at < 0))
        return [plain, *(replace(self, episode_id=one.name, turns=(one,)) for one in forks)]

    def view(self, decode: Decode) -> EpisodeView:
        """The episode for its reward."""
        turns = tuple(view_of_turn(self.prompt, turn, decode) for turn in self.turns)
        return EpisodeView(self.episode_id, turns, self.graph)

    def blob_uris(self) -> frozenset[str]:
        """Every blob that was sealed for it."""
        return self.uris

    def _is_in(self, place: int, row: Rollout) -> bool:
        """Whether a row trains tokens of this turn."""
        turn = self.turns[place].sampled
        return bool(row.loss_mask[len(turn.prompt_ids) : turn.end].any())

    def _branches(self) -> list[list[int]]:
        """The turns from each root to each turn that none continues, oldest first."""
        places = {turn.name: place for place, turn in enumerate(self.turns)}
        parents = [
            places.get(turn.before.name) if turn.before is not None and turn.continues else None
            for turn in self.turns
        ]
        continued = set(parents)
        return [
            list(_ancestors(place, parents))[::-1]
            for place in range(len(self.turns))
            if place not in continued
        ]


def view_of_turn(prompt: Prompt, turn: RecordedTurn, decode: Decode) -> TurnView:
    """A turn for its reward, a fork as the whole answer.  prompt: of the episode."""
    begun = turn if turn.fork_at < 0 or turn.before is None else turn.before
    end = len(begun.sampled.prompt_ids)
    new, output = begun.sampled.prompt_ids[begun.inherited :], turn.token_ids[end:].tolist()
    is_prompt = not begun.inherited and tuple(new.tolist()) == prompt.token_ids
    return TurnView(
        name=turn.name,
        parent="" if begun.before is None else begun.before.name,
        read=prompt.text if is_prompt else decode(new.tolist()),
        response=decode(output),
        role=turn.sampled.role,
        token_ids=tuple(output),
        finish=turn.finish.value,
    )


def _ancestors(place: int | None, parents: Sequence[int | None]) -> Iterator[int]:
    """A turn, its parent, and so on."""
    while place is not None:
        yield place
        place = parents[place]


def _first_with(rows: Sequence[Rollout], end: int) -> int:
    return next(idx for idx, row in enumerate(rows) if row.num_tokens >= end)


def checked_graph(episode: FinishedEpisode, nodes: Sequence[Turn]) -> tuple[GraphTurn, ...]:
    """The graph of an episode, of which the rows train the trained turns and nothing else.

    Age, admission, advantages and sums of the loss read rows, and so count no other turn.
    Raises RecordError `graph`.
    """
    _check_forks(episode)
    trained = [turn for turn in episode.graph if turn.trained]
    rows = [node.rollout for node in nodes]
    said = sum(turn.num_sampled for turn in trained), {v for one in trained for v in one.versions}
    found = sum(row.num_sampled for row in rows), {s.version for row in rows for s in row.versions}
    if said != found:
        detail = f"{said[0]} tokens of {_shown(said[1])}, its rows {found[0]} of {_shown(found[1])}"
        raise RecordError("graph", f"{episode.episode_id}: the graph trains {detail}")
    return episode.graph


def _check_forks(episode: FinishedEpisode) -> None:
    """All continuations of one pivot have one version.  Raises RecordError `versions`."""
    found: dict[tuple[str, int], set[PolicyVersion]] = {}
    for turn in episode.graph:
        if turn.trained and turn.fork_at >= 0:
            found.setdefault((turn.parent, turn.fork_at), set()).update(turn.versions)
    for (parent, at), versions in found.items():
        if len(versions) > 1:
            detail = f"continuations of {parent} behind token {at} are of {_shown(versions)}"
            raise RecordError("versions", f"{episode.episode_id}: {detail}")


def _shown(versions: Collection[PolicyVersion]) -> str:
    return ", ".join(map(str, sorted(versions))) or "no version"


def used_uris(episodes: Iterable[FinishedEpisode]) -> set[str]:
    """Blobs to which a turn of these episodes refers."""
    return {uri for episode in episodes for turn in episode.turns for uri in turn.blob_uris()}


def sealed_uris(episodes: Iterable[FinishedEpisode]) -> set[str]:
    """Every blob that was sealed for these episodes."""
    return {uri for episode in episodes for uri in episode.uris}


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
    return _extends(turn.prompt_ids, before.prompt_ids) and np.array_equal(said, before.output_ids)


def _extends(whole: Array, part: Array) -> bool:
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
