"""Prompts of later turns against renderers 0.1.12, whose code writes each family by hand.

Both get the same tokens of a prompt and an answer, and new messages; the tokens of the next prompt
are compared.  Templates are those of TRL 1.16, the vocabulary is letters and the family's tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from moerl.agents.chat_messages import ChatMessage, Json
from moerl.agents.prompt_tokens import PromptTokens
from moerl.core.types import Array, Finish, PolicyVersion, Rollout, SamplingParams, VersionSpan
from tests.helpers.chat_tokenizer import chat_tokenizer

SPEC = importlib.util.find_spec("trl")
FOLDER = Path(SPEC.origin if SPEC and SPEC.origin else "").parent / "chat_templates"
QWEN = ["<|endoftext|>", "<tool_response>", "</tool_response>"]
QWEN += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLAMA += ["<|end_of_text|>", "<|eom_id|>"]
GLM = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
GLM += ["<|endoftext|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]


class Family(NamedTuple):
    """of: names of the classes in renderers; end: the token that ends an answer here."""

    module: str
    of: str
    end: str
    tokens: list[str]
    reasons: bool = False  # an answer begins its own reasoning; else the prompt may have


FAMILIES = {
    "qwen3": Family("qwen3", "Qwen3", "<|im_end|>", QWEN),
    "qwen3_instruct_2507": Family("qwen3", "Qwen3", "<|im_end|>", QWEN),
    "qwen3_vl": Family("qwen3_vl", "Qwen3VL", "<|im_end|>", QWEN),
    "qwen3_5_think": Family("qwen35", "Qwen35", "<|im_end|>", QWEN),
    "qwen3_6": Family("qwen36", "Qwen36", "<|im_end|>", QWEN),
    "qwen3_8": Family("qwen38", "Qwen38", "<|im_end|>", QWEN, reasons=True),
    "llama3_1": Family("llama_3", "Llama3", "<|eot_id|>", LLAMA),
    "llama3_2": Family("llama_3", "Llama3", "<|eot_id|>", LLAMA),
    "nemotron_3_nano": Family("nemotron3", "Nemotron3", "<|im_end|>", QWEN),
    "nemotron_3_super": Family("nemotron3", "Nemotron3", "<|im_end|>", QWEN),
    "nemotron_3_ultra": Family("nemotron3", "Nemotron3Ultra", "<|im_end|>", QWEN),
}
GLM45 = Family("glm45", "GLM45", "<|user|>", GLM, reasons=True)
ADD: Json = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
FIRST = ChatMessage("user", "What is 1 + 2?")
USER = ChatMessage("user", "And\n3 + 4?")
RESULTS = [ChatMessage("tool", f"{n}\nor so", tool_call_id=f"c{n}") for n in (1, 2)]
NEW = {"user": [USER], "result": RESULTS[:1], "results": RESULTS, "both": [*RESULTS, USER]}


class Pair:
    """Our rule and the renderer, of one family."""

    def __init__(self, template: str, family: Family) -> None:
        tokenizer = chat_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": family.tokens})
        tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": family.end})
        tokenizer.chat_template = (FOLDER / f"{template}.jinja").read_text()
        self.tokens, self.family, self._ids = PromptTokens(tokenizer), family, tokenizer
        made = getattr(
            importlib.import_module(f"renderers.{family.module}"), f"{family.of}Renderer"
        )
        config = getattr(importlib.import_module("renderers"), f"{family.of}RendererConfig")
        self.renderer: Any = made(tokenizer, config(thinking_retention="all"))
        self.stops = frozenset(self.renderer.get_stop_token_ids())

    def turn(self, *, is_closed: bool) -> tuple[Array, Array]:
        """Tokens of the first prompt and of an answer to it."""
        prompt = self.tokens.whole([FIRST], [ADD]).ids
        begun = self.tokens.decode(prompt.tolist()).rstrip().endswith("<think>")
        reasoning = "so\n</think>\n\n" if begun else "<think>\nso\n</think>\n\n"
        text = reasoning * (begun or self.family.reasons) + "It is 3."
        end = self.family.end if is_closed else ""
        return prompt, self.tokens.encode(text + end)

    def ours(self, prompt: Array, answer: Array, new: list[ChatMessage]) -> list[int]:
        ids = np.concatenate([prompt, answer])
        parent = Rollout(
            "a", ids, np.arange(len(ids)) >= len(prompt), np.zeros(len(answer), np.float32),
            (VersionSpan(0, PolicyVersion(0, 0)),), (), (), Finish.STOP, SamplingParams(9), 0,
        )  # fmt: skip
        found: list[int] = self.tokens.continued(parent, self.stops, new, [ADD]).ids.tolist()
        return found

    def theirs(self, prompt: Array, answer: Array, new: list[ChatMessage]) -> list[int]:
        messages = [
            {"role": one.role, "content": one.text}
            | ({"tool_call_id": one.tool_call_id, "name": "add"} if one.role == "tool" else {})
            for one in new
        ]
        found = self.renderer.bridge_to_next_turn(
            prompt.tolist(), answer.tolist(), messages, tools=[ADD]
        )
        assert found is not None, "the renderer can continue this turn"
        return list(found.token_ids)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "cut"])
@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize("template", FAMILIES)
def test_the_next_prompt_is_the_renderers(template: str, new: str, is_closed: bool) -> None:
    pair = Pair(template, FAMILIES[template])
    turn = pair.turn(is_closed=is_closed)
    assert pair.ours(*turn, NEW[new]) == pair.theirs(*turn, NEW[new])


def test_control_another_rule_gives_other_tokens() -> None:
    """The whole conversation, written once more by the template, loses the reasoning."""
    pair = Pair("qwen3_6", FAMILIES["qwen3_6"])
    turn = pair.turn(is_closed=True)
    again = pair.tokens.whole([FIRST, ChatMessage("assistant", "It is 3."), USER], [ADD])
    assert again.ids.tolist() != pair.theirs(*turn, [USER])


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "cut"])
def test_glm_where_the_two_differ(is_closed: bool) -> None:
    """GLM's template closes no answer: the opener of what follows ends it.

    The renderer keeps a sampled opener of another role, and closes a cut answer with <|endoftext|>;
    we write what the template writes.
    """
    pair = Pair("glm4moe", GLM45)
    prompt, answer = pair.turn(is_closed=is_closed)
    (extra,) = pair.tokens.encode("<|user|>" if is_closed else "<|endoftext|>").tolist()
    for name, new in NEW.items():
        theirs = pair.theirs(prompt, answer, new)
        if not (is_closed and name == "user"):
            place = len(prompt) + len(answer) - is_closed
            assert theirs.pop(place) == extra
        assert pair.ours(prompt, answer, new) == theirs
