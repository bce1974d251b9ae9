"""The Responses form, with OpenAI's own client as the oracle of its answers and streams."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.helpers.chat_tokenizer import END
from tests.unit.test_agent_http import ADD, CALL, Served, ids, run, serve

TOOL: Any = {"type": "function"} | ADD["function"]


async def ask(served: Served, *, stream: bool, **fields: Any) -> Any:
    fields = {"model": "m", "tools": [TOOL], "instructions": "You add."} | fields
    if not stream:
        return await served.client.responses.create(**fields)
    async with served.client.responses.stream(**fields) as events:
        return await events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_the_same_as_by_chat_completions(stream: bool) -> None:
    """A parallel call and a text are one answer; it continues in the other form."""

    async def work() -> None:
        async with serve([*ids("so "), CALL, END], [*ids("14"), END], [*ids("a"), END]) as served:
            first = await ask(served, stream=stream, input="hello")
            assert first.status == "completed"
            assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
            call = first.output[2]
            assert first.output_text == "so "
            assert json.loads(call.arguments) == {"a": 5, "b": 6}
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "11"}
            said = [item.model_dump(exclude_none=True) for item in first.output]
            history: Any = [{"role": "user", "content": "hello"}, *said, result]
            second = await ask(served, stream=stream, input=history)
            assert second.output_text == "14"
            calls = [{
                "id": call.call_id, "type": "function",
                "function": {"name": "add", "arguments": call.arguments},
            }]  # fmt: skip
            messages: Any = [
                {"role": "system", "content": "You add."},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "so ", "tool_calls": calls},
                {"role": "tool", "tool_call_id": call.call_id, "content": "11"},
                {"role": "assistant", "content": "14"},
                {"role": "user", "content": "sure?"},
            ]
            create = served.client.chat.completions.create
            await create(messages=messages, model="m", tools=[ADD])
            done = await served.end()
        assert [turn.origin for turn in done.turns] == ["first", "continued", "continued"]
        assert second.usage.input_tokens == done.turns[1].rollout.prompt_len
        assert second.usage.output_tokens == done.turns[1].rollout.num_sampled

    run(work)


def test_an_answer_that_is_cut_says_so() -> None:
    async def work() -> None:
        async with serve([*ids("abcdef")]) as served:
            said = await ask(served, stream=False, input="hello", max_output_tokens=2)
            assert said.status == "incomplete"
            assert said.incomplete_details.reason == "max_output_tokens"
            assert said.output_text == "ab"

    run(work)


REFUSED: list[dict[str, Any]] = [
    {"previous_response_id": "resp_1"},
    {"conversation": "c"},
    {"background": True},
    {"tools": [{"type": "web_search"}]},
    {"tool_choice": "required"},
    {"text": {"format": {"type": "json_object"}}},
    {"input": [{"type": "item_reference", "id": "x"}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    {"input": []},
]


@pytest.mark.parametrize("field", REFUSED, ids=range(len(REFUSED)))
def test_what_needs_a_memory_or_cannot_be_read_is_refused(field: dict[str, Any]) -> None:
    async def work() -> None:
        async with serve() as served:
            with pytest.raises(openai.BadRequestError) as error:
                await ask(served, stream=False, **{"input": "hello"} | field)
            assert error.value.code in ("invalid_request", "unsupported_parameter")

    run(work)


def test_sampling_is_counted() -> None:
    async def work() -> None:
        async with serve([*ids("a"), END]) as served:
            await ask(served, stream=False, input="hello", temperature=0.1, store=False)
            counts = (await served.end()).counts
        assert {name for name in counts if name.startswith("not_taken/")} == {
            "not_taken/temperature",
            "not_taken/store",
        }

    run(work)
