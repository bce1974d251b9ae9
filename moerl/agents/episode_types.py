"""What an open episode is given, and what it gives: limits, the policy, ends, answers, its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moerl.agents.chat_messages import MessageCall
from moerl.agents.gateway.answer_stream import PartialAnswer
from moerl.agents.prompt_tokens import PromptTokens
from moerl.agents.stop_texts import StopFinder
from moerl.agents.tool_calls import AnswerParser
from moerl.agents.turn_forest import RecordedTurn
from moerl.controller.agent_episodes import TurnEngine
from moerl.core.types import Array, Grammar, GraphTurn, Rollout, SamplingParams

Tell = Callable[[int, PartialAnswer], None]  # place among siblings, and what of it is shown


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of one episode."""

    context_tokens: int  # of prompt and answer; at most the engine's context
    turns: int = 64
    sampled_tokens: int = 65536
    wall_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy as episodes see it: shared by all of them."""

    engine: TurnEngine
    tokens: PromptTokens
    finder: StopFinder
    parser: AnswerParser
    sampling: SamplingParams  # of the recipe; max_new_tokens: most tokens of a turn
    audit: bool = False  # see GenerateRequest
    logprobs: Callable[[Rollout], Array] | None = None  # of a finished rollout, from its records
    no_grammar: str = ""  # why grammars are refused; empty: they are taken
    held_out: bool = False  # turns belong to an evaluation, and are not trained

    def of(self, held_out: SamplingParams | None) -> Policy:
        """The policy of an episode.  held_out: the distribution of an evaluation, if it is one."""
        if held_out is None:
            return self
        return replace(self, sampling=held_out, audit=False, held_out=True)

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.sampling.stop_token_ids)


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a client wants a turn to end, and the texts that it may be."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    forces: str | None = None  # the function that must be called; empty: any


@dataclass(frozen=True, slots=True, eq=False)
class TurnAnswer:
    """A finished turn, as it is shown to the client."""

    turn: RecordedTurn
    text: str
    finish_reason: str  # stop | length | tool_calls
    reasoning: str = ""
    calls: tuple[MessageCall, ...] = ()
    stop_text: str | None = None  # the one of the client's that ended it

    @property
    def prompt_len(self) -> int:
        return len(self.turn.sampled.prompt_ids)

    @property
    def shown(self) -> PartialAnswer:
        return PartialAnswer(self.prompt_len, self.reasoning, self.text)

    @property
    def output_ids(self) -> list[int]:
        ids: list[int] = self.turn.sampled.output_ids.tolist()
        return ids


@dataclass(frozen=True, slots=True, eq=False)
class FinishedEpisode:
    """turns: in the order in which they ended; graph: all that were asked for, in that order.

    wasted: blobs to which no turn refers, for deletion.
    """

    name: str
    turns: tuple[RecordedTurn, ...]
    graph: tuple[GraphTurn, ...]
    counts: dict[str, int]
    wasted: frozenset[str]
