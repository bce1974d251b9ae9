"""Other forms of the gateway: OpenAI's responses and Anthropic's messages, by their own clients."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from moerl.agents.gateway import event_streams
from moerl.agents.gateway.anthropic_messages import MessagesRequest
from moerl.controller.step_metrics import shown_graph
from moerl.core.errors import EngineError
from moerl.core.types import Episode
from tests.helpers.chat_tokenizer import END
from tests.helpers.served_gateway import ADD, CALL, HELLO, Served, anthropic_client, ids, run, serve

SCHEMA: Any = ADD["function"]["parameters"]
TOOL: Any = {"name": "add", "input_schema": SCHEMA}
FUNCTION: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
LOOP = ([*ids("so "), CALL, END], [*ids("14"), END])


async def check_one_branch(served: Served) -> None:
    done = await served.end()
    assert [turn.origin for turn in done.turns] == ["first", "continued"]
    one, two = (turn.rollout.token_ids for turn in done.turns)
    np.testing.assert_array_equal(two[: len(one)], one)
    assert [turn.tools for turn in done.graph] == [("add",), ()], "and a turn that calls none"
    shown = shown_graph(Episode("e", (), graph=done.graph))
    assert [turn["tools"] for turn in shown] == [("add",), ()], "as the report reads it"


# --- Anthropic's messages -------------------------------------------------------------------------
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_loop_of_anthropics_client_is_one_branch(is_stream: bool) -> None:
    async def work() -> None:
        async with serve(*LOOP) as served:
            client, history = anthropic_client(served), list(HELLO)

            async def ask() -> anthropic.types.Message:
                asked: Any = {"model": "m", "max_tokens": 50, "tools": [TOOL], "system": "you add"}
                if not is_stream:
                    return await client.messages.create(messages=history, **asked)
                async with client.messages.stream(messages=history, **asked) as events:
                    return await events.get_final_message()

            first = await ask()
            thought, text, call = first.content
            assert thought.type == "thinking"
            assert thought.thinking == "thought"
            assert (text.type, first.stop_reason) == ("text", "tool_use")
            assert call.type == "tool_use"
            assert (call.name, call.input) == ("add", {"a": 5, "b": 6})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "11"}
            history += [
                {"role": "assistant", "content": [block.model_dump() for block in first.content]},
                {"role": "user", "content": [result]},
            ]
            second = await ask()
            assert (second.stop_reason, second.usage.output_tokens) == ("end_turn", 3)
            await check_one_branch(served)

    run(work)


def test_limits_and_stop_texts_of_messages() -> None:
    async def work() -> None:
        async with serve([*ids("x: y"), END], ids("abc")) as served:
            create = anthropic_client(served).messages.create
            asked: Any = {"model": "m", "messages": HELLO}
            stopped = await create(max_tokens=50, stop_sequences=["; ", ": "], **asked)
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ": ")
            cut = await create(max_tokens=3, **asked)
            assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)

    run(work)


def test_a_call_that_is_no_object_goes_to_the_client_and_back() -> None:
    """Its arguments have no place in this form; a control in another spelling is another key."""
    from moerl.agents.chat_messages import Function, MessageCall
    from moerl.agents.gateway.anthropic_messages import _tool_use

    for arguments in ("[1, 2]", "no json", '{"a": 1}'):
        block = _tool_use(MessageCall(Function("add", arguments), "c"))
        body = {"messages": [{"role": "assistant", "content": [block]}], "max_tokens": 1}
        (message,) = _request(body).chat().messages
        (call,) = message.tool_calls or ()
        same = MessageCall(Function("add", arguments), "c")
        assert message.key == message.__replace__(tool_calls=[same]).key
        other = MessageCall(Function("add", arguments + " "), "d")
        assert message.key != message.__replace__(tool_calls=[other]).key
        assert call.id == "c"


def _request(body: dict[str, Any]) -> MessagesRequest:
    import msgspec

    return msgspec.convert(body, MessagesRequest)


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
REFUSED_MESSAGES = [
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web"}]}, "tools[0]"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
    ({"output_format": {"type": "json_schema"}}, "output_format"),
]


@pytest.mark.parametrize(("field", "named"), REFUSED_MESSAGES, ids=lambda value: str(value)[:20])
def test_what_messages_cannot_have_is_refused_in_their_form(
    field: dict[str, Any], named: str
) -> None:
    async def work() -> None:
        async with serve() as served:
            create = anthropic_client(served).messages.create
            asked: Any = {"model": "m", "messages": HELLO, "max_tokens": 9}
            with pytest.raises(anthropic.BadRequestError, match="unsupported_parameter") as found:
                await create(**(asked | {"extra_body": field}))
            assert named in found.value.message
            assert not served.engine.requests

    run(work)


def test_errors_of_messages_are_those_of_anthropics_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_streams, "_KEEP_ALIVE_S", 0.05)

    async def work() -> None:
        async with serve() as served:
            client = anthropic_client(served)
            asked: Any = {"model": "m", "messages": HELLO, "max_tokens": 9}
            with pytest.raises(anthropic.AuthenticationError):
                await client.with_options(api_key="wrong").messages.create(**asked)
            with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
                await client.messages.create(**(asked | {"max_tokens": 0}))
            served.engine.hangs = True
            events = await client.messages.create(stream=True, **asked)
            served.engine.fails = EngineError("secret path")
            await served.engine.abort([served.engine.requests[0].name])
            with pytest.raises(anthropic.APIStatusError, match="engine failed"):
                [event async for event in events]
            await served.end()
            with pytest.raises(anthropic.APIStatusError, match="episode_ended") as found:
                await client.messages.create(**asked)
            assert found.value.status_code == 410

    run(work)


# --- OpenAI's responses ---------------------------------------------------------------------------
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_loop_of_responses_is_one_branch(is_stream: bool) -> None:
    async def work() -> None:
        async with serve(*LOOP) as served:
            history: list[Any] = list(HELLO)

            async def ask() -> Any:
                asked: Any = {"model": "m", "tools": [FUNCTION], "instructions": "you add"}
                create = served.client.responses.create
                if not is_stream:
                    return await create(input=history, **asked)
                async with served.client.responses.stream(input=history, **asked) as events:
                    return await events.get_final_response()

            first = await ask()
            thought, text, call = first.output
            assert (thought.type, text.type, call.type) == ("reasoning", "message", "function_call")
            assert (first.output_text, json.loads(call.arguments)) == ("so ", {"a": 5, "b": 6})
            history += [item.model_dump(exclude_none=True) for item in first.output]
            answer = {"type": "function_call_output", "call_id": call.call_id, "output": "11"}
            history.append(answer)
            second = await ask()
            assert (second.output_text, second.status) == ("14", "completed")
            assert second.usage.output_tokens == 3
            await check_one_branch(served)

    run(work)


def test_responses_keep_no_state_and_say_when_they_are_cut() -> None:
    async def work() -> None:
        async with serve(ids("abc")) as served:
            create = served.client.responses.create
            cut = await create(model="m", input="hello", max_output_tokens=3)
            assert cut.incomplete_details is not None
            assert (cut.status, cut.incomplete_details.reason) == (
                "incomplete",
                "max_output_tokens",
            )
            for field, named in (
                ({"previous_response_id": "resp_1"}, "previous_response_id"),
                ({"text": {"format": {"type": "json_object"}}}, "text"),
                ({"tools": [{"type": "web_search"}]}, r"tools\[0\]"),
                ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]"),
                ({"tool_choice": "required"}, "tool_choice"),
            ):
                with pytest.raises(openai.BadRequestError, match=named):
                    await create(**({"model": "m", "input": "hello"} | field))

    run(work)
