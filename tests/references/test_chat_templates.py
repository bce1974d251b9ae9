"""Suffixes of the gateway against the chat templates that TRL 1.16 ships, as text.

A suffix is written behind an answer that is a mark.  It must be what the template writes behind the
real answer, with its call; a template that writes something else there is found when it is loaded.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moerl.agents.chat_messages import ChatMessage, Function, Json, MessageCall
from moerl.agents.prompt_tokens import PromptTokens
from moerl.core.errors import ConfigError
from moerl.core.types import Array
from moerl.data.chat_template import TemplateError
from tests.helpers.chat_tokenizer import END, chat_tokenizer

SPEC = importlib.util.find_spec("trl")
FOLDER = Path(SPEC.origin if SPEC and SPEC.origin else "").parent / "chat_templates"
# The training variants mark what is trained, and write the same text.
FILES = {file.stem: file for file in FOLDER.glob("*.jinja") if not file.stem.endswith("_training")}
REFUSED = {"idefics3", "llava_next", "smolvlm"}  # content must be a list of parts
# They write a tool result behind its call only, or not at all.
WITHOUT_TOOLS = {"cohere", "cohere2", "diffusion_gemma", "gemma", "gemma3", "gemma4", "gemma4_v3"}
WITHOUT_TOOLS |= {"gemma4_v4", "gemma4_v5", "gptoss", "muse_glimmer", "phi3", "phi3_5"}
ONE_CALL = {"llama3_1", "llama3_2"}  # of an answer
PARAMETERS: Json = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD: Json = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS},
}
USER, NEXT = ChatMessage("user", "What is 1 + 2?"), ChatMessage("user", "And\n3 + 4?")
CALLS = [MessageCall(Function("add", f'{{"a": {n}}}'), f"call_{n}") for n in (1, 2)]
RESULTS = [ChatMessage("tool", f"{n}\nor so", tool_call_id=f"call_{n}") for n in (1, 2)]


def template(name: str) -> PromptTokens:
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.chat_template = FILES[name].read_text()
    return PromptTokens(tokenizer)


def test_all_templates_are_here() -> None:
    assert len(FILES) == 41
    assert FILES.keys() > REFUSED | WITHOUT_TOOLS


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_templates_of_parts_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="does not write the text of an answer"):
        template(name)


@pytest.mark.parametrize("name", sorted(FILES.keys() - REFUSED))
def test_a_users_message_is_written_as_behind_the_real_answer(name: str) -> None:
    tokens = template(name)
    whole = tokens._render([USER, ChatMessage("assistant", "It is 3."), NEXT], ())
    suffix = tokens._suffix_text([NEXT], ())
    assert NEXT.text in suffix
    assert whole.endswith(f"It is 3.{suffix}")


@pytest.mark.parametrize("name", sorted(FILES.keys() - REFUSED - WITHOUT_TOOLS))
def test_results_are_written_as_behind_the_real_calls(name: str) -> None:
    tokens = template(name)
    for results in (RESULTS[:1],) if name in ONE_CALL else (RESULTS[:1], RESULTS):
        calls = ChatMessage("assistant", "", CALLS[: len(results)])
        whole = tokens._render([USER, calls, *results], [ADD])
        suffix = tokens._suffix_text(results, [ADD])
        assert whole.endswith(suffix)
        assert all(suffix.count(f"{n}") for n in range(1, len(results) + 1))
        assert "or so" in suffix


@pytest.mark.parametrize("name", sorted(WITHOUT_TOOLS))
def test_results_that_would_be_lost_are_refused(name: str) -> None:
    tokens = template(name)
    with pytest.raises(TemplateError, match="role tool"):
        tokens._suffix_text(RESULTS[:1], [ADD])
    try:  # control: what the rule would have written
        lost = tokens._rest(RESULTS[:1], [ADD])
        whole = tokens._render([USER, ChatMessage("assistant", "", CALLS[:1]), RESULTS[0]], [ADD])
    except TemplateError:
        return
    assert RESULTS[0].text not in lost or not whole.endswith(lost)


SWITCHED = [  # template, variable, its values, what only the first of them writes
    ("qwen3", "enable_thinking", (False, True), "<think>\n\n</think>\n\n"),
    ("gptoss", "reasoning_effort", ("low", "high"), "Reasoning: low"),
]


@pytest.mark.parametrize(("name", "variable", "values", "said"), SWITCHED)
def test_switches_of_public_templates(name: str, variable: str, values: Any, said: str) -> None:
    """The prompt is that of transformers; a second turn begins with the first one's tokens."""
    tokens, tokenizer = template(name), chat_tokenizer()
    render: Any = tokens.template.tokenizer.apply_chat_template
    assert tokens.template.reads is not None
    assert variable in tokens.template.reads
    for value in values:
        given: Json = {variable: value}
        first = tokens.whole([USER], [ADD], given)
        shown = render(
            [USER.for_template()], tools=[ADD], tokenize=False, add_generation_prompt=True, **given
        )
        assert tokens.decode(first.ids.tolist()) == shown
        assert (said in shown) is (value == values[0]), "control: the other mode"
        sampled = tokenizer.encode("<think>hm</think>3")
        parent = Row(np.concatenate([first.ids, np.asarray([*sampled, END], np.int32)]))
        second = tokens.continued(parent, frozenset({END}), [NEXT], [ADD], given)
        np.testing.assert_array_equal(
            second.ids[: second.inherited], parent.token_ids[: second.inherited]
        )
        assert second.inherited >= parent.token_ids.size - 1
        opened = render([USER.for_template()], tokenize=False, add_generation_prompt=True, **given)
        whole = tokens.decode(second.ids.tolist())
        assert "3 + 4?" in whole
        assert whole.endswith(opened[-12:]), "the answer is opened in the same mode"
    with pytest.raises(TemplateError, match=f"reads no thinkin; its variables: .*{variable}"):
        tokens.template.checked({"thinkin": True})


@dataclass
class Row:
    token_ids: Array
