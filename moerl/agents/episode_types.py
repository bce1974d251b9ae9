"""Limits of an episode, the policy, and ends and answers of its turns.

Parsing of answers: an interface that `moerl.engine` implements with SGLang's parsers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moerl.agents.chat_messages import Json, MessageCall
from moerl.agents.gateway.answer_stream import Kind, PartialAnswer
from moerl.agents.prompt_tokens import PromptTokens
from moerl.agents.stop_texts import StopFinder
from moerl.config.schema import TaskConfig
from moerl.core.types import Array, Grammar, Rollout
from moerl.data.chat_template import ChatTemplate
from moerl.episodes.finished_episode import RecordedTurn

Tell = Callable[[int, PartialAnswer], None]  # place among siblings, and its shown part


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of one episode."""

    context_tokens: int  # of prompt and answer; at most the engine's context
    turns: int = 64
    sampled_tokens: int = 65536
    wall_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy as episodes of a task see it, besides its engines."""

    tokens: PromptTokens
    finder: StopFinder
    parser: AnswerParser
    context_tokens: int  # the longest sequence
    logprobs: Callable[[Rollout], Array] | None = None  # of a turn, for clients that want them
    no_grammar: str = ""  # why grammars are refused; empty: they are taken

    def limits(self, task: TaskConfig) -> EpisodeLimits:
        return EpisodeLimits(
            context_tokens=self.context_tokens,
            turns=task.turn_limit,
            sampled_tokens=task.sampled_limit,
            wall_s=task.wall_limit_s,
        )


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a client wants a turn to end, and the texts that it may be."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    forces: str | None = None  # the function that must be called; empty: any


@dataclass(frozen=True, slots=True)
class Switches:
    """A client's wishes about the chat template.  given: its variables, by their own names."""

    given: Json = field(default_factory=dict)
    effort: str = ""  # of reasoning
    thinking: bool | None = None  # None: as the template has it

    def named(self, template: ChatTemplate) -> tuple[Json, list[str]]:
        """(variables of the template, names of wishes that it has none for).

        Raises TemplateError for a variable that it does not read.
        """
        reads, found, unknown = template.reads or frozenset(), dict[str, object](), list[str]()
        switch = next((name for name in _THINKING if name in reads), "")
        thinking = self.thinking
        if self.effort and _EFFORT in reads:
            found[_EFFORT] = self.effort
        elif self.effort == "none" and switch:
            thinking = False
        elif self.effort:
            unknown.append(_EFFORT)
        if thinking is not None and switch:
            found[switch] = thinking
        elif thinking is not None:
            unknown.append("thinking")
        return found | template.checked(self.given), unknown


_EFFORT, _THINKING = "reasoning_effort", ("enable_thinking", "thinking")  # names that templates use


@dataclass(frozen=True, slots=True, eq=False)
class TurnAnswer:
    """A finished turn, as it is shown to the client."""

    turn: RecordedTurn
    text: str
    finish_reason: str  # stop | length | tool_calls
    reasoning: str = ""
    calls: tuple[MessageCall, ...] = ()
    stop_text: str | None = None  # the client's stop text that ended it

    @property
    def prompt_len(self) -> int:
        return len(self.turn.sampled.prompt_ids)

    @property
    def shown(self) -> PartialAnswer:
        return PartialAnswer(self.prompt_len, self.reasoning, self.text)

    @property
    def is_empty(self) -> bool:
        """Neither text nor calls: forms of blocks have a block of empty text."""
        return not (self.text or self.calls)

    @property
    def blocks(self) -> list[tuple[Kind, str]]:
        """Blocks in front of the calls."""
        found: list[tuple[Kind, str]] = [("reasoning", self.reasoning)] if self.reasoning else []
        return found + ([("text", self.text)] if self.text or self.is_empty else [])

    @property
    def output_ids(self) -> list[int]:
        ids: list[int] = self.turn.sampled.output_ids.tolist()
        return ids


class AnswerParser(Protocol):
    def parse(
        self, text: str, tools: Sequence[Json]
    ) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """Reasoning, text and calls of an answer; a call is a name and its arguments as text.

        Text that looks like a call and cannot be parsed stays text, as it was sampled.
        """
        ...

    def begun(self, text: str, tools: Sequence[Json]) -> tuple[str, str]:
        """Reasoning and text of which `parse` gives a continuation, however this text continues."""
        ...

    def call_grammar(self, tools: Sequence[Json]) -> Grammar | None:
        """Grammar of an answer that calls at least one tool; None: the format has none."""
        ...


class PlainAnswers:
    """For models without a format of calls: an answer is text."""

    def parse(
        self, text: str, tools: Sequence[Json]
    ) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        return "", text, ()

    def begun(self, text: str, tools: Sequence[Json]) -> tuple[str, str]:
        return "", text

    def call_grammar(self, tools: Sequence[Json]) -> Grammar | None:
        return None
