"""Episodes of agents as the controller sees them: turns that a program asked for, and their rows.

The turns form a forest, because a program may begin a conversation again or continue one twice.
Each branch is a row of training.  A turn on several branches is trained in the first one and is
context in the others, as in slime and prime-rl.

A turn continues its parent when its prompt begins with all tokens of it.  Where the chat template
has replaced the last one, a stop token, the parent ends a branch of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from moerl.controller.rollout_builder import blob_uris
from moerl.controller.turn_rows import SampledTurn, TurnRows, rows_of
from moerl.core.errors import RecordError
from moerl.core.types import (
    Array,
    Finish,
    GenerateRequest,
    GraphTurn,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Segment,
    Turn,
)

# Failures of an episode: the controller ended it; what played it has died, through no fault of its
# own, and the group is played again.
ENDED, LOST = "ended", "lost"


class TurnEngine(Protocol):
    """A generator of turns: an engine host, or the controller's pool of hosts."""

    async def generate(
        self, requests: Sequence[GenerateRequest]
    ) -> Sequence[Segment | RecordError]:
        """Replies to all requests, in order.  Raises EngineError when one fails."""
        ...

    async def stream(
        self, request: GenerateRequest, heard: Callable[[Array], None]
    ) -> Segment | RecordError:
        """As `generate`, of one request that has `streams`.

        heard: receives its tokens so far, now and then.  Its reply begins with them, unless they
        were lost with their engine.
        """
        ...

    async def abort(self, names: Sequence[str]) -> None:
        """End these requests: `generate` returns their tokens so far."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlayedTurn:
    """continues: the earlier turn with whose tokens its prompt begins; origin: of its request."""

    sampled: SampledTurn
    continues: int | None = None
    origin: str = ""

    @property
    def output_ids(self) -> Array:
        return self.sampled.output_ids

    @property
    def finish(self) -> Finish:
        return self.sampled.segments[-1].finish

    def blob_uris(self) -> set[str]:
        return blob_uris(*self.sampled.segments)


@dataclass(frozen=True, slots=True, eq=False)
class PlayedEpisode:
    """An episode that has ended.

    turns: the trained ones; graph: all, with the reason of each that is left out.
    wasted: blobs to which no turn refers.  failure: why it cannot be trained, in one word; detail
    continues "the agent of EPISODE ...".  own_score: by the program.
    """

    episode_id: str
    prompt: Prompt
    turns: tuple[PlayedTurn, ...]
    wasted: frozenset[str] = frozenset()
    failure: str = ""
    detail: str = ""
    own_score: Score | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    graph: tuple[GraphTurn, ...] = ()

    @property
    def lacks_context(self) -> bool:
        """The program has asked for a turn that did not fit."""
        return bool(self.counts.get("context_ends"))

    @property
    def is_chain(self) -> bool:
        return len(self._branches()) == 1

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.output_ids) for turn in self.turns)

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
                origins = tuple(
                    self.turns[place].origin for place in new if self._is_in(place, row)
                )
                nodes.append(Turn(row, () if before is None else (before,), origins))
                before = len(nodes) - 1
        return tuple(nodes)

    def texts(self, decode: Callable[[Sequence[int]], str]) -> list[str]:
        """Text of the policy in each turn."""
        return [decode(turn.output_ids.tolist()) for turn in self.turns]

    def blob_uris(self) -> set[str]:
        """Every blob sealed for it."""
        return set(self.wasted).union(*(turn.blob_uris() for turn in self.turns))

    def _is_in(self, place: int, row: Rollout) -> bool:
        """Whether a row trains tokens of this turn."""
        turn = self.turns[place].sampled
        return bool(row.loss_mask[len(turn.prompt_ids) : turn.end].any())

    def _branches(self) -> list[list[int]]:
        """The turns from each root to each turn that none continues, oldest first."""
        continued = {turn.continues for turn in self.turns}
        return [
            list(self._before(place))[::-1]
            for place in range(len(self.turns))
            if place not in continued
        ]

    def _before(self, place: int | None) -> Iterator[int]:
        """A turn, the one that it continues, and so on."""
        while place is not None:
            yield place
            place = self.turns[place].continues


def _first_with(rows: Sequence[Rollout], end: int) -> int:
    return next(idx for idx, row in enumerate(rows) if row.num_tokens >= end)


class EpisodeRunner(Protocol):
    """What plays episodes (`moerl.agents.agent_loop`)."""

    async def start(self, engine: TurnEngine) -> None:
        """engine: samples the turns; used from the caller's event loop."""
        ...

    async def play(
        self, name: str, prompt: Prompt, held_out: SamplingParams | None = None
    ) -> PlayedEpisode:
        """One episode to its end.  What goes wrong in it is its `failure`.

        held_out: the distribution of an evaluation; None: the episode may be trained.
        """
        ...

    def end(self, name: str) -> None:
        """End an episode: `play` returns soon.  Unknown names are ignored."""
        ...

    async def close(self) -> None:
        """End everything."""
        ...
