"""Parsing of answers: an interface that `moerl.engine` implements with SGLang's parsers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moerl.agents.chat_messages import Json
from moerl.core.types import Grammar


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
