"""An episode as its scorers see it: text and tokens of each turn, and the graph."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from moerl.core.types import Array, GraphTurn, Prompt, base_role


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn of the policy.

    read: text behind the parent's end that the policy read before it wrote: the prompt, replies of
    tools and of the environment, in the form of the chat template, without control tokens.
    """

    name: str  # as in the graph
    parent: str  # name of the turn that it continues; "": it begins a conversation
    read: str
    response: str
    token_ids: tuple[int, ...]  # of the response
    finish: str  # stop | length
    role: str = ""  # of the policy, such as solver or solver.2


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """A finished episode.

    turns: recorded turns in the order of their ends.  graph: every requested turn, also of other
    models, with the reason of each that is not trained.
    """

    name: str
    turns: tuple[TurnView, ...]
    graph: tuple[GraphTurn, ...] = ()

    def only(self, needs: Collection[str], roles: Collection[str] = ()) -> EpisodeView:
        """With the parts that a scorer needs (`RewardTerm.needs`), and without the others.

        roles: whose turns it sees; empty: all.
        """
        turns = tuple(one for one in self.turns if not roles or base_role(one.role) in roles)
        if "messages" not in needs:
            turns = tuple(replace(turn, read="") for turn in turns)
        if "tokens" not in needs:
            turns = tuple(replace(turn, token_ids=()) for turn in turns)
        return replace(self, turns=turns, graph=self.graph if "graph" in needs else ())

    @property
    def responses(self) -> list[str]:
        """Texts of the policy, turn by turn."""
        return [turn.response for turn in self.turns]

    @property
    def branches(self) -> list[list[TurnView]]:
        """The turns from the start of a conversation to each turn that no other one continues."""
        by_name = {turn.name: turn for turn in self.turns}
        continued = {turn.parent for turn in self.turns}
        return [_path(turn, by_name) for turn in self.turns if turn.name not in continued]


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A question to a scorer about an episode, a turn or a step.

    key: the name of the question; a repeat has the same key, another text never has it.
    episode: up to the end of the turn or step, which belongs to its last turn.
    step_begin: characters of the last turn before the step; -1: it is not about a step.
    group: the questions about one closed group have this name and travel together; "": none.
    token_ids: [T] i32, for a reward model: the conversation from its start.  Questions about one
    conversation share the array, of which each reads the first `end` tokens.
    """

    key: str
    prompt: Prompt
    episode: EpisodeView
    step_begin: int = -1
    group: str = ""
    token_ids: Array | None = field(default=None, compare=False)
    end: int = 0


def _path(turn: TurnView, by_name: dict[str, TurnView]) -> list[TurnView]:
    found = [turn]
    while (parent := by_name.get(found[-1].parent)) is not None:
        found.append(parent)
    return found[::-1]
