"""Reasoning and tool calls in the text of an answer, by SGLang's parsers.

Implements `moerl.agents.episode_types.AnswerParser`.  Make the parser before the event loop starts:
the import takes seconds.  It runs in our process and not in SGLang's server, which has no tokenizer
and never sees the text of the recorded tokens.

In SGLang's parsers the text of a part can depend on the rest of the answer.  Here it cannot:
reasoning counts only at the beginning of an answer, and text in front of a call keeps its leading
white space.  So text can be shown while the rest is sampled.

Read at 0.5.23: srt/function_call/function_call_parser.py, srt/parser/reasoning_parser.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from moerl.core.errors import ConfigError
from moerl.core.types import Grammar
from moerl.engine import torchvision_fix

if TYPE_CHECKING:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import BaseReasoningFormatDetector

log = logging.getLogger(__name__)

Calls = tuple[tuple[str, str], ...]
# Formats in which all text in front of a mark is text; of others no text is shown early.
_MARKED_CALLS = frozenset(
    ("qwen", "qwen25", "qwen3_coder", "hermes", "glm", "glm45", "glm47", "mimo")
    + ("deepseekv3", "deepseekv31", "kimi_k2")
)
# Attributes of SGLang's detectors in `_begun_reasoning`; other detectors are not shown early.
_METHODS = ("detect_and_parse", "_detect_and_parse_impl", "_find_tool_start")


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
        self._call_mark = ""  # behind which no text is shown early; empty: there is no such mark
        if call_format in _MARKED_CALLS:
            detector: Any = FunctionCallParser.ToolCallParserEnum[call_format]()
            self._call_mark = getattr(detector, "bot_token", "") or detector.tool_call_start_token

    def parse(self, text: str, tools: Sequence[dict[str, object]]) -> tuple[str, str, Calls]:
        """Text in which no call can be read stays text, whatever it looks like."""
        reasoning, rest = self._split(text)
        if not tools or not self._call_format:
            return reasoning, rest, ()
        try:
            left, calls = self._calls(rest, tools)
            "".join((left, *chain.from_iterable(calls))).encode()  # JSON escapes half a character
        except Exception as error:  # each format has its own errors, and the policy wrote the text
            log.debug("an answer has a call that SGLang cannot parse: %r", error)
            return reasoning, rest, ()
        if not calls:
            return reasoning, rest, ()
        is_stripped = left and not left[0].isspace()
        blank = rest[: len(rest) - len(rest.lstrip())] if is_stripped else ""
        return reasoning, blank + left, calls

    def begun(self, text: str, tools: Sequence[dict[str, object]]) -> tuple[str, str]:
        """Implements `AnswerParser.begun`."""
        reasoning, rest = self._begun_reasoning(text)
        if not tools or not self._call_format:
            return reasoning, rest
        if not self._call_mark:
            return reasoning, ""
        before = rest.partition(self._call_mark)[0]
        return reasoning, _without_part(before, self._call_mark).rstrip()

    def call_grammar(self, tools: Sequence[dict[str, object]]) -> Grammar | None:
        """Grammar of calls in this format; None where SGLang would force another format.

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
        if _is_known(parser.detector) and not _thinks(parser.detector, text):
            return "", text
        reasoning, rest = parser.parse_non_stream(text)
        return reasoning or "", rest or ""

    def _begun_reasoning(self, text: str) -> tuple[str, str]:
        """Split the text so far into reasoning and the text behind it."""
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        if not self._reasoning_format:
            return "", text
        detector = ReasoningParser(self._reasoning_format, stream_reasoning=False).detector
        if not _is_known(detector):
            return "", ""
        start = detector.think_start_token + detector.think_start_self_label
        if not (_thinks(detector, text) or start.startswith(text.lstrip())):
            return "", text
        while text.startswith(start):
            text = text[len(start) :]
        if start.startswith(text.lstrip()):
            return "", ""
        reasoning, end, rest = text.partition(detector.think_end_token)
        if end:
            return reasoning, rest
        return _without_calls(detector, reasoning), ""

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


def _is_known(detector: BaseReasoningFormatDetector) -> bool:
    """Whether a detector finds reasoning by the method that most of SGLang's detectors share."""
    from sglang.srt.parser.reasoning_parser import BaseReasoningFormatDetector

    own = (getattr(type(detector), name, None) for name in _METHODS)
    base = (getattr(BaseReasoningFormatDetector, name) for name in _METHODS)
    return list(own) == list(base) and not detector._force_nonempty_content


def _thinks(detector: BaseReasoningFormatDetector, text: str) -> bool:
    is_forced = bool(detector.force_reasoning)
    return is_forced or text.lstrip().startswith(detector.think_start_token)


def _without_calls(detector: BaseReasoningFormatDetector, reasoning: str) -> str:
    """Cut reasoning that has no end yet at a call, or before the beginning of an end mark."""
    call = detector._find_tool_start(reasoning)
    if call >= 0:
        return reasoning[:call]
    marks = (detector.think_end_token, detector.tool_start_token or "")
    return min((_without_part(reasoning, mark) for mark in marks), key=len)


def _without_part(text: str, mark: str) -> str:
    """Cut the end of the text where it may be the beginning of the mark."""
    from sglang.srt.parser.reasoning_parser import BaseReasoningFormatDetector

    return text[: len(text) - BaseReasoningFormatDetector._ends_with_partial_token(text, mark)]


def _without_nulls(tool: dict[str, object]) -> dict[str, object]:
    """Drop nulls: clients send them for absent fields, and SGLang refuses them."""
    function = tool["function"]
    assert isinstance(function, dict), "checked when the request is read"
    return {"function": {name: value for name, value in function.items() if value is not None}}


def _check(field: str, name: str, allowed: Iterable[str]) -> None:
    if name and name not in allowed:
        raise ConfigError(field, name, f"SGLang's parsers are {', '.join(sorted(allowed))}")
