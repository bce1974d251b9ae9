"""SGLang's parsers behind the gateway's interface: what is a call, and what stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moerl.agents.tool_calls import AnswerParser
from moerl.engine.answer_parser import SglangAnswers
from moerl.errors import ConfigError
from tests.helpers.chat_tokenizer import call_text

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "strict": None,
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def parser() -> AnswerParser:
    return SglangAnswers("qwen25", "qwen3")


def test_reasoning_text_and_calls_are_told_apart(parser: AnswerParser) -> None:
    text = f"<think>\nI add.\n</think>\n\nSo:\n{CALL}\n{call_text(5)}"
    reasoning, shown, calls = parser.parse(text, [ADD])
    assert (reasoning.strip(), shown.strip()) == ("I add.", "So:")
    assert calls == (("add", '{"a": 1}'), ("add", '{"a": 5, "b": 6}'))


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "",
        '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}',
        "<tool_call>\n[1, 2]\n</tool_call>",
        "<tool_call></tool_call>",
    ],
)
def test_what_cannot_be_parsed_stays_text(parser: AnswerParser, text: str) -> None:
    assert parser.parse(text, [ADD]) == ("", text, ())


def test_without_tools_a_call_is_text(parser: AnswerParser) -> None:
    assert parser.parse(CALL, []) == ("", CALL, ())
    assert SglangAnswers().parse(f"<think>x</think>{CALL}", [ADD])[2] == ()


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"call_format = 'qwen99'.*qwen25"):
        SglangAnswers("qwen99")
    with pytest.raises(ConfigError, match=r"reasoning_format = 'x'.*deepseek-r1"):
        SglangAnswers("qwen25", "x")


def test_calls_have_a_grammar_where_sglang_has_a_tag_of_their_format(parser: AnswerParser) -> None:
    strict: Any = {"type": "function", "function": ADD["function"] | {"strict": True}}
    for tool, schema in ((ADD, {}), (strict, ADD["function"]["parameters"])):
        grammar = parser.call_grammar([tool])
        assert grammar is not None
        assert grammar.kind == "structural_tag"
        tag = json.loads(grammar.text)
        (call,) = tag["structures"]
        assert call["begin"] == '<tool_call>\n{"name":"add", "arguments":'
        assert (call["schema"], tag["at_least_one"]) == (schema, True)
    for name in ("", "pythonic", "glm45"):  # SGLang would force JSON in place of the last two
        assert SglangAnswers(name).call_grammar([ADD]) is None
