"""Reasoning and tool calls in the text of an answer, by SGLang's parsers.

Implements `moerl.agents.tool_calls.AnswerParser`.  Make one before the event loop starts: the
import takes seconds.  SGLang's server is not asked: it has no tokenizer, and the text that counts
is that of the recorded tokens.

Read at 0.5.23: srt/function_call/function_call_parser.py, srt/parser/reasoning_parser.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from moerl.engine import torchvision_fix
from moerl.errors import ConfigError
from moerl.grammar import Grammar

if TYPE_CHECKING:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

log = logging.getLogger(__name__)

Calls = tuple[tuple[str, str], ...]


class SglangAnswers:
    """call_format, reasoning_format: SGLang's names of parsers; empty: none is parsed."""

    def __init__(self, call_format: str = "", reasoning_format: str = "") -> None:
        """Raises ConfigError for names that SGLang does not have."""
        torchvision_fix.arm()  # the parsers import torchvision
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        _check("call_format", call_format, FunctionCallParser.ToolCallParserEnum)
        _check("reasoning_format", reasoning_format, ReasoningParser.DetectorMap)
        self._call_format, self._reasoning_format = call_format, reasoning_format

    def parse(self, text: str, tools: Sequence[dict[str, object]]) -> tuple[str, str, Calls]:
        """Text in which no call can be read stays text, whatever it looks like."""
        reasoning, rest = self._split(text)
        if not tools or not self._call_format:
            return reasoning, rest, ()
        try:
            left, calls = self._calls(rest, tools)
        except Exception as error:  # each format has its own errors, and the policy wrote the text
            log.debug("an answer has a call that SGLang cannot parse: %r", error)
            return reasoning, rest, ()
        return (reasoning, left, calls) if calls else (reasoning, rest, ())

    def call_grammar(self, tools: Sequence[dict[str, object]]) -> Grammar | None:
        """Of calls as this format writes them; where SGLang would force another one there is none.

        Arguments follow the tool's schema if it is `strict`, else they are any object.
        """
        if not self._call_format:
            return None
        parser = self._parser(tools)
        if not parser.owns_tool_format():
            return None
        kind, tag = parser.get_structure_constraint("required") or ("", None)
        if kind != "structural_tag" or tag is None:
            return None
        return Grammar("structural_tag", tag.model_dump_json(by_alias=True))

    def _split(self, text: str) -> tuple[str, str]:
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        if not self._reasoning_format:
            return "", text
        parser = ReasoningParser(self._reasoning_format, stream_reasoning=False)
        reasoning, rest = parser.parse_non_stream(text)
        return reasoning or "", rest or ""

    def _calls(self, text: str, tools: Sequence[dict[str, object]]) -> tuple[str, Calls]:
        parser = self._parser(tools)
        if not parser.has_tool_call(text):
            return text, ()
        left, found = parser.parse_non_stream(text)
        return left, tuple((call.name, call.parameters) for call in found if call.name)

    def _parser(self, tools: Sequence[dict[str, object]]) -> FunctionCallParser:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        offered = [Tool.model_validate(_without_nulls(tool)) for tool in tools]
        return FunctionCallParser(offered, self._call_format)


def _without_nulls(tool: dict[str, object]) -> dict[str, object]:
    """Clients send null for what they leave out, where SGLang wants nothing."""
    function = tool["function"]
    assert isinstance(function, dict), "checked when the request is read"
    return {"function": {name: value for name, value in function.items() if value is not None}}


def _check(field: str, name: str, known: Iterable[str]) -> None:
    if name and name not in known:
        raise ConfigError(field, name, f"SGLang's parsers are {', '.join(sorted(known))}")
