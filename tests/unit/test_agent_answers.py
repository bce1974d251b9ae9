"""SGLang's parsers behind the gateway's interface: what is a call, and what stays text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from moerl.agents.episode_types import AnswerParser
from moerl.core.errors import ConfigError
from moerl.engine.host.answer_parser import SglangAnswers
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
        '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud83d"}}\n</tool_call>',
    ],
)
def test_what_cannot_be_parsed_stays_text(parser: AnswerParser, text: str) -> None:
    assert parser.parse(text, [ADD]) == ("", text, ())


def test_a_whole_character_in_escapes_is_a_call(parser: AnswerParser) -> None:
    """The control of half a character, which is text."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud83d\\ude00"}}\n</tool_call>'
    assert parser.parse(call, [ADD]) == ("", "", (("add", '{"a": "😀"}'),))


def test_without_tools_a_call_is_text(parser: AnswerParser) -> None:
    assert parser.parse(CALL, []) == ("", CALL, ())
    assert SglangAnswers().parse(f"<think>x</think>{CALL}", [ADD])[2] == ()


# --- what is shown early -------------------------------------------------------------------------
def deepseek(name: str) -> str:
    """A mark of DeepSeek's, which has a wide bar and a low block in place of blanks."""
    return f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")


BEGIN, SEP, STOP = map(deepseek, ("tool call begin", "tool sep", "tool call end"))
ALL, NONE = map(deepseek, ("tool calls begin", "tool calls end"))
CALLS = {
    "qwen25": CALL,
    "hermes": CALL,
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "glm47": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    "</tool_call>",
    "mimo": "<tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n</tool_call>",
    "deepseekv3": f'{ALL}{BEGIN}function{SEP}add\n```json\n{{"a": 1}}\n```{STOP}{NONE}',
    "deepseekv31": f'{ALL}{BEGIN}add{SEP}{{"a": 1}}{STOP}{NONE}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
}
REASONING = ["", "qwen3", "qwen3-thinking", "deepseek-r1", "glm45", "kimi_k2", "kimi", "gemma4"]
REASONING += ["deepseek-v3", "hunyuan", "k2_horizon", "mistral", "nemotron_3", "interns1", "mimo"]


def whole_answers(call: str, seed: int, num: int) -> list[str]:
    """Random texts of marks, parts of marks, calls, white space and letters."""
    pieces = ["<think>", "</think>", "◁think▷", "◁/think▷", "[THINK]", "[/THINK]", "<|channel>"]
    pieces += ["thought\n", "<channel|>", "\n", " ", "a", "b c", "<", "</", "<thi", "[", call[:5]]
    pieces += [call, call[:-4], "<tool_call>", "</tool_call>", "<ifm|think>", "</ifm|think>"]
    draw = random.Random(seed)
    return ["".join(draw.choices(pieces, k=draw.randint(1, 9))) for _ in range(num)]


def taken_back(parser: AnswerParser, text: str, tools: Any) -> list[str]:
    """Beginnings of the text of which something was shown that the whole text does not have."""
    reasoning, shown, _ = parser.parse(text, tools)
    found = []
    for size in range(len(text) + 1):
        early = parser.begun(text[:size], tools)
        if not (reasoning.startswith(early[0]) and shown.startswith(early[1])):
            found.append(text[:size])
    return found


@pytest.mark.parametrize("call_format", ["", *CALLS])
def test_what_is_shown_early_is_never_taken_back(call_format: str) -> None:
    call = CALLS.get(call_format, CALL)
    for place, reasoning_format in enumerate(REASONING):
        parser = SglangAnswers(call_format, reasoning_format)
        for text in whole_answers(call, place, 12):
            for tools in ([ADD], []):
                assert not taken_back(parser, text, tools), (reasoning_format, text)


@pytest.mark.parametrize("call_format", CALLS)
def test_text_in_front_of_a_call_is_shown_before_the_call_begins(call_format: str) -> None:
    parser, call = SglangAnswers(call_format, "qwen3"), CALLS[call_format]
    text = f"<think>I add.</think>\n\nSo: {call}"
    assert parser.begun(text[: text.index(call)], [ADD]) == ("I add.", "\n\nSo:")
    assert parser.begun("<think>I a", [ADD]) == ("I a", "")
    reasoning, shown, calls = parser.parse(text, [ADD])
    assert (reasoning, shown.rstrip(), [name for name, _ in calls]) == (
        "I add.",
        "\n\nSo:",
        ["add"],
    )


def test_shown_without_hold_backs_is_taken_back() -> None:
    """Control: a parser that shows what `parse` finds in the beginning."""

    class Hasty(SglangAnswers):
        def begun(self, text: str, tools: Any) -> tuple[str, str]:
            return self.parse(text, tools)[:2]

    parser = Hasty("qwen25", "qwen3")
    assert taken_back(parser, f"<think>a</think>b {CALL}", [ADD])
    assert not taken_back(parser, "a b", [ADD])


def test_reasoning_begins_an_answer_or_there_is_none(parser: AnswerParser) -> None:
    assert parser.parse("a <think>b</think> c", []) == ("", "a <think>b</think> c", ())
    assert SglangAnswers("", "deepseek-r1").parse("a</think>b", [])[:2] == ("a", "b")


def test_formats_with_rules_of_their_own_show_nothing_early() -> None:
    assert SglangAnswers("pythonic").begun("text", [ADD]) == ("", "")
    assert SglangAnswers("pythonic").begun("text", []) == ("", "text")
    assert SglangAnswers("", "gpt-oss").begun("text", []) == ("", "")


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
