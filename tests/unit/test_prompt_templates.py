"""Chat templates of prompts: errors name the message, an answer is opened or continued."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moerl.config.schema import TaskConfig
from moerl.core.errors import ConfigError, LineError
from moerl.data.chat_template import ChatTemplate
from moerl.data.tasks import PromptStream
from tests.helpers.chat_tokenizer import chat_tokenizer

USER = {"role": "user", "content": "12="}
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message must be first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m['content'] + '' }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLOSED = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
ALWAYS = CLOSED + "{% if messages[-1].role != 'assistant' %}[assistant]{% endif %}"
PLAIN = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
# As some templates of the field do: tools stand in the system message, if there is one
BEHIND_SYSTEM = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.role == 'system' and tools %}{{ tools | tojson }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def stream(
    folder: Path, messages: Sequence[Any], template: str = "", **fields: Any
) -> PromptStream:
    line = {"messages": list(messages), "answer": "1"} | fields.pop("line", {})
    if not fields.pop("answer", True):
        del line["answer"]
    path = folder / "x.jsonl"
    path.write_text("\n" + json.dumps(line) + "\n")
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    task = TaskConfig(**{"name": "jsonl", "path": str(path), "reward": "exact_match"} | fields)
    return PromptStream(task, tokenizer, 0)


@pytest.mark.parametrize(
    ("messages", "line", "says"),
    [
        (
            [USER, {"role": "system", "content": "be brief"}, USER],
            {},
            "line 2 cannot be used: the model's chat template refuses messages[1] (role system, "
            "role, content): TemplateError: a system message must be first",
        ),
        ([USER], {"tools": [{"type": "function", "function": {"name": "f"}}]}, "refuses the tools"),
    ],
)
def test_an_error_of_a_template_names_line_and_message(
    tmp_path: Path, messages: Any, line: Any, says: str
) -> None:
    with pytest.raises(LineError) as error:
        stream(tmp_path, messages, STRICT, line=line).line(0)
    assert says in str(error.value)
    assert stream(tmp_path, [USER], STRICT).prompt(0).text.endswith("assistant\n"), "control"


def test_a_template_that_opens_no_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path .* ignores add_generation_prompt") as error:
        stream(tmp_path, [USER], CLOSED).line(0)
    assert not isinstance(error.value, LineError), "no line is to blame"
    for template in (STRICT, ALWAYS, PLAIN):  # controls: an answer may begin behind each
        assert stream(tmp_path, [USER], template).prompt(0).token_ids
    tokenizer = chat_tokenizer()
    assert ChatTemplate(tokenizer).opens_answers


def test_a_template_that_writes_no_tools_is_refused(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "get", "parameters": {}}}
    line = {"tools": [tool]}
    for template, asked in ((ALWAYS, [USER]), (BEHIND_SYSTEM, [USER])):
        with pytest.raises(LineError) as error:
            stream(tmp_path, asked, template, line=line).line(0)
        assert (error.value.kind, error.value.value) == ("tools", str(tmp_path / "x.jsonl"))
        said = "line 2 has 'tools', and the model's chat template writes no tools"
        assert said in str(error.value)
        assert "task.columns={tools: ''} leaves the column to the reward" in str(error.value)
    left = stream(tmp_path, [USER], ALWAYS, line=line, columns={"tools": ""}).line(0)
    assert left.extra == line, "control: the way out"
    assert stream(tmp_path, [USER], ALWAYS).line(0), "control: a line without tools"
    system = {"role": "system", "content": "Use tools."}
    for template, asked in (("", [USER]), (BEHIND_SYSTEM, [system, USER])):
        assert '"get"' in stream(tmp_path, asked, template, line=line).line(0).text, "control"


@pytest.mark.parametrize("last", [{"content": "1 + 1 is"}, {"content": " "}])
def test_a_conversation_that_ends_with_the_assistant_is_refused(tmp_path: Path, last: Any) -> None:
    with pytest.raises(LineError, match="line 2 has 'messages' that end with the assistant"):
        stream(tmp_path, [USER, {"role": "assistant"} | last]).line(0)
    demonstrated = stream(tmp_path, [USER, {"role": "assistant", "content": "1"}], answer=False)
    assert demonstrated.line(0).answer == "1", "control: without an answer it is the answer"


def test_messages_of_a_line_reach_a_reward_of_trl_alone(tmp_path: Path) -> None:
    scored = stream(tmp_path, [USER], reward="trl:package.module:f").line(0)
    assert scored.extra["messages"] == [USER]
    assert "messages" not in stream(tmp_path, [USER]).line(0).extra, "control"
