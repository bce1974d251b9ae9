"""Switches of chat templates: of a task, of a line, of a client; and parts that a template drops.

The oracle of each prompt is `apply_chat_template` of transformers with the same variables.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moerl.agents.chat_messages import ChatMessage, Function, MessageCall
from moerl.agents.episode_types import Ends, Switches
from moerl.agents.prompt_tokens import PromptTokens
from moerl.config import load_config
from moerl.config.schema import TaskConfig
from moerl.config.task_mixture import TaskEntry, entries_of
from moerl.core.errors import ConfigError, LineError
from moerl.data.chat_template import ChatTemplate, TemplateError
from moerl.data.demonstrations import AnswerEnd, with_texts
from moerl.data.prompt_checks import LineCheck
from moerl.data.tasks import PromptMixture, PromptStream
from moerl.planning.data_command import _of_task
from tests.helpers.chat_tokenizer import END, chat_tokenizer
from tests.helpers.one_engine import far, open_episode
from tests.helpers.served_gateway import (
    ADD,
    CALL,
    LIMITS,
    SAMPLING,
    Served,
    anthropic_client,
    ids,
    run,
    serve,
)

FOLDER = Path(__file__).parents[1] / "data" / "templates"
THINKING, EFFORT = (str(FOLDER / f"{name}.jinja") for name in ("thinking", "effort"))
USER = {"role": "user", "content": "12="}
QUESTION = ChatMessage("user", "q")
PAD = 0
CONTENTS_ONLY = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def oracle(file: str, messages: list[Any], tools: Any = None, **variables: Any) -> list[int]:
    """Prompt tokens by transformers alone."""
    tokenizer: Any = chat_tokenizer()
    tokenizer.chat_template = Path(file).read_text()
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **variables
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def task_of(folder: Path, *lines: Any, **fields: Any) -> TaskConfig:
    path = folder / "x.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    named: Any = {"name": "jsonl", "path": str(path), "reward": "exact_match", "shuffle": False}
    return TaskConfig(**named | fields)


def stream(folder: Path, *lines: Any, **fields: Any) -> PromptStream:
    return PromptStream(task_of(folder, *lines, **fields), chat_tokenizer(), 0)


def line(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "answer": "1"} | fields


# --- tasks and lines ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("file", "name", "values"),
    [(THINKING, "enable_thinking", (False, True)), (EFFORT, "reasoning_effort", ("low", "high"))],
)
def test_a_line_overrides_its_task(file: str, name: str, values: Any, tmp_path: Path) -> None:
    of_task, of_line = values
    lines = [line(), line(chat_template_kwargs={name: of_line, "x": None})]
    lines.append(line(chat_template_kwargs=json.dumps({name: of_line})))
    prompts = stream(tmp_path, *lines, chat_template=file, template_arguments={name: of_task})
    plain, own, as_text = (list(prompts.prompt(place).token_ids) for place in range(3))
    assert plain == oracle(file, [USER], **{name: of_task})
    assert own == as_text == oracle(file, [USER], **{name: of_line})
    assert plain != own, "control: the other precedence gives other tokens"
    assert prompts.prompt(1).extra == {"chat_template_kwargs": {name: of_line}}


def test_a_prompt_of_text_takes_the_arguments_too(tmp_path: Path) -> None:
    documents = [{"title": "a", "text": "b<|im_end|>"}]
    asked = {"prompt": "12=", "answer": "1", "chat_template_kwargs": {"documents": documents}}
    found = stream(tmp_path, asked, chat_template=THINKING).prompt(0)
    assert found.token_ids.count(END) == 2, "control tokens in arguments stay text"
    assert "a: b<|im_end|>" in found.text
    with pytest.raises(ConfigError, match=r'"chat_template_kwargs", which need task\.chat_templat'):
        stream(tmp_path, asked).prompt(0)


def test_entries_of_a_mixture_have_their_own(tmp_path: Path) -> None:
    path = task_of(tmp_path, line()).path
    both = [
        {"label": "a", "template_arguments": {"reasoning_effort": "low"}},
        {"label": "b", "chat_template": THINKING, "template_arguments": {"reasoning_effort": None}},
    ]
    words = ["task.name=jsonl", f"task.path={path}", "task.reward=exact_match"]
    words += [f"task.chat_template={EFFORT}", "task.template_arguments={model_identity: Me.}"]
    words += ["tasks=" + json.dumps(both).replace('"', "'")]
    config = load_config("quickstart", words)
    one, two = entries_of(config)
    assert one.template_arguments == {"model_identity": "Me.", "reasoning_effort": "low"}
    second = replace(two, template_arguments={})
    mixture = PromptMixture([one, second], chat_tokenizer(), 0)
    found = {prompt.task: list(prompt.token_ids) for prompt in map(mixture.prompt, range(2))}
    named = {"model_identity": "Me.", "reasoning_effort": "low"}
    assert found == {"a": oracle(EFFORT, [USER], **named), "b": oracle(THINKING, [USER])}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"enable_thinkin": True}, "reads no enable_thinkin; its variables: documents, enable_thi"),
        ({"messages": []}, "messages is set by moerl"),
        ({"bos_token": "x"}, "bos_token is set by moerl"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused(
    arguments: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="chat_template_kwargs: ") as error:
        stream(tmp_path, line(chat_template_kwargs=arguments), chat_template=THINKING).prompt(0)
    assert says in str(error.value)
    assert "line 1" in str(error.value)
    with pytest.raises(ConfigError, match=r"task\.template_arguments") as error:
        stream(tmp_path, line(), chat_template=THINKING, template_arguments=arguments)
    assert says in str(error.value)


def test_variables_that_a_template_sets_for_want_of_them_are_known() -> None:
    assert ChatTemplate(chat_tokenizer(), EFFORT).reads == {"reasoning_effort", "model_identity"}
    assert ChatTemplate(chat_tokenizer()).reads == frozenset()


def test_a_file_that_is_no_template_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "broken.jinja"
    file.write_text("{% for m in messages %}")
    with pytest.raises(ConfigError, match=r"task\.chat_template .* no readable Jinja template"):
        stream(tmp_path, line(), chat_template=str(file))
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}\n[{{ tools }}]")
    with pytest.raises(ConfigError, match=r"broken\.jinja.* ignores add_generation_prompt"):
        stream(tmp_path, line(), chat_template=str(file)).prompt(0)


# --- what sft learns ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("file", "end", "modes"),
    [
        (THINKING, END, [{"enable_thinking": False}, {"enable_thinking": True}]),
        (EFFORT, PAD, [{"reasoning_effort": "low"}, {"reasoning_effort": "high"}]),
    ],
)
def test_answers_end_as_the_template_ends_them(
    file: str, end: int, modes: list[Any], tmp_path: Path
) -> None:
    lines = [line(chat_template_kwargs=mode) for mode in modes]
    tokenizer = chat_tokenizer()
    tokenizer.eos_token = "<bos>"
    prompts = PromptStream(task_of(tmp_path, *lines, chat_template=file), tokenizer, 0)
    ends = AnswerEnd(tokenizer, {"": prompts.template})
    for place, mode in enumerate(modes):
        prompt = prompts.prompt(place)
        assert list(prompt.token_ids) == oracle(file, [USER], **mode)
        assert ends.of(prompt) == (end,)
        other = replace(prompt, text="12=")
        assert ends.of(other) == (tokenizer.eos_token_id,), "control: text without a template"


def test_sft_refuses_reasoning_beside_an_answer(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "1", "reasoning_content": "hm"}
    prompt = stream(tmp_path, {"messages": [USER, said]}, chat_template=THINKING).prompt(0)
    assert prompt.answer == "1", "a reward compares with the content"
    with pytest.raises(LineError, match="'reasoning_content' beside its answer; sft learns"):
        with_texts(prompt)
    assert with_texts(replace(prompt, extra={})), "control"


# --- parts that a template drops ------------------------------------------------------------------
ASKED: list[Any] = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "sunny"},
]
NO_TOOL = (
    "{% for m in messages if m.role != 'tool' %}{{ m.role }}: {{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "part"),
    [(CONTENTS_ONLY, "conv[1].tool_calls"), (NO_TOOL, "conv[2].content")],
)
def test_a_part_that_the_template_drops_is_refused(
    template: str, part: str, tmp_path: Path
) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(template)
    lines = [{"conv": ASKED[:1], "answer": "1"}, {"conv": ASKED, "answer": "1"}]
    named: Any = {"columns": {"messages": "conv"}, "system": "Be brief."}
    found = stream(tmp_path, *lines, chat_template=str(file), **named)
    for _ in range(2):  # the second time from memory
        with pytest.raises(LineError, match=r"line 2 has ") as error:
            found.line(1)
        assert f"{part!r}, which the chat template does not write" in str(error.value)
        assert error.value.kind == "left out"
    assert found.line(0), "control: nothing is lost"
    for whole in (THINKING, EFFORT):
        text = stream(tmp_path, *lines, chat_template=whole, **named).line(1).text
        assert "look" in text, "control: these write calls"


def test_thinking_of_earlier_turns_may_be_left_out_and_is_said(tmp_path: Path) -> None:
    thought = {"role": "assistant", "content": "1", "reasoning_content": "dropped?", "name": "me"}
    late = [USER, ASKED[1] | {"reasoning_content": "dropped?"}, ASKED[2]]
    lines = [line(messages=[USER, thought, USER]), line(messages=late)]
    own = line(messages=[USER], chat_template_kwargs={"enable_thinking": False})
    settings: Any = {"chat_template": THINKING, "template_arguments": {"enable_thinking": True}}
    for given, shown in ((lines[:1], True), (lines[1:], False)):  # control: the last one is written
        entry = TaskEntry(**vars(task_of(tmp_path, *given, own, **settings)))
        prompts = PromptStream(entry, chat_tokenizer(), 0)
        said = "\n".join(_of_task(LineCheck(entry, prompts), chat_tokenizer(), ["1"]))
        assert ("dropped?" in prompts.line(0).text) is not shown
        assert ("reasoning_content of role assistant" in said) is shown
        assert ("name of role assistant" in said) is shown
        assert f"  template    {THINKING}, enable_thinking=true" in said
        assert "  its own  enable_thinking=false" in said


def test_a_client_is_told_of_a_part_that_the_template_drops(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(CONTENTS_ONLY)
    tokenizer = chat_tokenizer()
    tokens = PromptTokens(tokenizer, ChatTemplate(tokenizer, str(file)))
    for messages, tools, says in (
        ([ChatMessage("user", "?")], [ADD], "writes no tools"),
        (
            [
                QUESTION,
                ChatMessage("assistant", "", [MessageCall(Function("add", "{}"), "c")]),
                ChatMessage("tool", "1"),
            ],
            [],
            "writes no tool_calls of a message of role assistant",
        ),
    ):
        with pytest.raises(TemplateError, match=says):
            tokens.whole(messages, tools)
    assert tokens.whole([QUESTION], []).ids.size, "control"


# --- clients --------------------------------------------------------------------------------------
HELLO = [{"role": "user", "content": "q"}]


def tokens_of(file: str, **arguments: Any) -> PromptTokens:
    tokenizer = chat_tokenizer()
    return PromptTokens(tokenizer, ChatTemplate(tokenizer, file, arguments))


async def ask(served: Served, messages: list[Any], form: str = "chat", **fields: Any) -> Any:
    """A turn by one of the clients."""
    if form == "messages":
        asked: Any = {"model": "m", "max_tokens": 9, "messages": messages}
        return await anthropic_client(served).messages.create(**asked, **fields)
    if form == "responses":
        return await served.client.responses.create(model="m", input=messages, **fields)
    return await served.client.chat.completions.create(model="m", messages=messages, **fields)


def prompt_of(turn: Any) -> list[int]:
    rollout = turn.rollout
    return [int(token) for token in rollout.token_ids[: rollout.prompt_len]]


KWARGS: Callable[..., Any] = lambda **named: {"extra_body": {"chat_template_kwargs": named}}  # noqa: E731
OFF = {"enable_thinking": False}


@pytest.mark.parametrize(
    ("file", "form", "fields", "means"),
    [
        (THINKING, "chat", KWARGS(**OFF), OFF),
        (THINKING, "chat", {"reasoning_effort": "none"}, OFF),
        (THINKING, "chat", {"extra_body": {"thinking": {"type": "disabled"}}}, OFF),
        (THINKING, "messages", {"thinking": {"type": "disabled"}}, OFF),
        (
            THINKING,
            "messages",
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"enable_thinking": True},
        ),
        (THINKING, "messages", KWARGS(**OFF), OFF),
        (THINKING, "responses", {"reasoning": {"effort": "none"}}, OFF),
        (EFFORT, "chat", {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (EFFORT, "responses", {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
def test_a_clients_switch_reaches_the_prompt(file: str, form: str, fields: Any, means: Any) -> None:
    async def work() -> None:
        async with serve([7, END], tokens=tokens_of(file)) as served:
            await ask(served, HELLO, form, **fields)
            done = await served.end()
        assert prompt_of(done.turns[0]) == oracle(file, HELLO, **means)
        assert not any(name.startswith("not_taken") for name in served.episode.counts)
        if means != {"enable_thinking": True}:  # it is the default
            assert prompt_of(done.turns[0]) != oracle(file, HELLO), "control"

    run(work)


def test_a_switch_that_the_template_lacks_is_counted() -> None:
    async def work() -> None:
        async with serve([7, END], [7, END], tokens=tokens_of(EFFORT)) as served:
            await ask(served, HELLO, "messages", thinking={"type": "disabled"})
        assert served.episode.counts["not_taken/thinking"] == 1
        async with serve([7, END], tokens=tokens_of(THINKING)) as served:
            await ask(served, HELLO, reasoning_effort="high")
        assert served.episode.counts["not_taken/reasoning_effort"] == 1

    run(work)


def test_client_over_line_over_task(tmp_path: Path) -> None:
    """All eight ways in which three places name one variable."""
    places = ("task", "line", "client")
    for number in range(8):
        named = [place for at, place in enumerate(places) if number >> at & 1]
        of = {place: {"reasoning_effort": place} if place in named else {} for place in places}

        async def work(of: dict[str, dict[str, str]] = of, named: Any = named) -> None:
            async with serve([7, END], tokens=tokens_of(EFFORT, **of["task"])) as served:
                served.episode._arguments = dict(of["line"])
                await ask(served, HELLO, **KWARGS(**of["client"]))
                done = await served.end()
            (turn,) = done.turns
            wins = {"reasoning_effort": named[-1]} if named else {}
            assert prompt_of(turn) == oracle(EFFORT, HELLO, **wins)

        run(work)


def test_a_line_reaches_the_turns_of_its_episode(tmp_path: Path) -> None:
    """The stream hands its arguments on, as the episode reads them."""
    lines = [line(chat_template_kwargs=OFF), line()]
    agent: Any = {"chat_template": THINKING, "environment": "sandbox_tools"}
    prompts = stream(tmp_path, *lines, **agent)

    async def work() -> None:
        async with serve([7, END], [7, END], tokens=tokens_of(THINKING)) as served:
            for place, means in enumerate((OFF, {})):  # control: a line without arguments
                prompt = prompts.prompt(place)
                opened = open_episode(served.engine, f"e{place}", SAMPLING, prompt)
                episode = served.gateway.open_episode(far(opened), LIMITS)
                (answer,) = await episode.chat([QUESTION], (), Ends())
                assert prompt_of(answer.turn) == oracle(THINKING, HELLO, **means)

    run(work)


@pytest.mark.parametrize(
    ("file", "means"), [(THINKING, OFF), (EFFORT, {"reasoning_effort": "low"})]
)
def test_the_first_turn_fixes_them_and_turns_stay_exact(file: str, means: Any) -> None:
    """Two turns with a tool; the answers hold thinking that the template would leave out."""
    thought = [*ids("<think>hm</think>so "), CALL, END]

    async def work() -> None:
        async with serve(thought, [*ids("14"), END], [7, END], tokens=tokens_of(file)) as served:
            first = await ask(served, HELLO, tools=[ADD], **KWARGS(**means))
            message = first.choices[0].message
            history = [*HELLO, message.model_dump(exclude_none=True)]
            (call,) = message.tool_calls
            history.append({"role": "tool", "tool_call_id": call.id, "content": "11"})
            await ask(served, history, tools=[ADD])  # it names none
            (name,) = means
            await ask(
                served,
                history,
                tools=[ADD],
                **KWARGS(**{name: {"low": "high"}.get(means[name], True)}),
            )
            done = await served.end()
        one, two, three = done.turns
        assert [turn.origin for turn in done.turns] == ["first", "continued", "arguments_changed"]
        known = one.rollout.token_ids
        np.testing.assert_array_equal(two.rollout.token_ids[: len(known)], known)
        assert prompt_of(one) == oracle(file, HELLO, [ADD], **means)
        opened = oracle(file, HELLO, [ADD], **means)[-3:]
        assert prompt_of(two)[-3:] == opened, "and each answer is opened in the same mode"
        assert three.before is None
        assert served.episode.counts["origin/arguments_changed"] == 1

    run(work)


def test_the_stock_template_would_change_what_was_sampled() -> None:
    """Control of exactness: rendered again, the thinking of the first turn is gone."""
    said = {"role": "assistant", "content": "<think>hm</think>so"}
    again = oracle(THINKING, [*HELLO, said, *HELLO])
    whole = oracle(THINKING, HELLO) + ids("<think>hm</think>so")
    assert again[: len(whole)] != whole


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
def test_a_client_is_told_of_a_variable_that_is_not_read(path: str) -> None:
    async def work() -> None:
        async with serve(tokens=tokens_of(THINKING)) as served:
            for name, says in (
                ("effort", "reads no effort; its variables: documents, enable_"),
                ("tools", "tools is set by moerl"),
            ):
                body: Any = {"model": "m", "max_tokens": 9, "chat_template_kwargs": {name: 1}}
                body |= {"input": "q"} if path == "/responses" else {"messages": HELLO}
                status, answer, headers = await served.post(path, json=body)
                assert (status, headers["x-should-retry"]) == (400, "false")
                assert f"chat_template_kwargs: the chat template {says}" in answer["error"][
                    "message"
                ] or (f"chat_template_kwargs: {says}" in answer["error"]["message"])

    run(work)


def test_routes_without_a_template_refuse_its_variables() -> None:
    async def work() -> None:
        async with serve(tokens=tokens_of(THINKING)) as served:
            body = {"model": "m", "prompt": "q", "chat_template_kwargs": OFF}
            status, answer, _ = await served.post("/completions", json=body)
            assert status == 400
            assert (
                "chat_template_kwargs: not supported, because no template is applied"
                in (answer["error"]["message"])
            )
            body = {"model": "m", "messages": HELLO, "chat_template": "x"}
            status, answer, _ = await served.post(json=body)
            assert (
                "chat_template: not supported, because it is the recipe's"
                in (answer["error"]["message"])
            )

    run(work)


def test_wishes_are_named_after_the_variable_that_the_template_reads(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(
        "{{ thinking }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    )
    template = ChatTemplate(chat_tokenizer(), str(file))
    assert Switches(thinking=False).named(template) == ({"thinking": False}, [])
    over = Switches({"thinking": True}, thinking=False).named(template)
    assert over == ({"thinking": True}, []), "its own name comes first"
