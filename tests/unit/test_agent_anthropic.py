"""Anthropic's messages form: the same conversation and the same records as OpenAI's form.

Its unchanged client plays in the stage `clients` (tests/e2e/test_agent_clients.py).
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.helpers.chat_tokenizer import END
from tests.unit.test_agent_http import ADD, CALL, HELLO, Served, ids, run, serve

TOOL = {"name": "add", "input_schema": {"type": "object"}}


async def ask(served: Served, key: str = "", **body: Any) -> tuple[int, str]:
    headers = {"x-api-key": key or served.episode.key, "anthropic-version": "2023-06-01"}
    url = served.gateway.base_url("e") + "/messages"
    body = {"model": "m", "max_tokens": 50, "messages": HELLO} | body
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(url, json=body) as reply,
    ):
        return reply.status, await reply.text()


def test_a_conversation_is_the_same_in_both_forms() -> None:
    """It begins in one form and continues in the other, and once more in the first."""

    async def work() -> None:
        says = [[*ids("so "), CALL, END], [*ids("14"), END], [*ids("yes"), END]]
        async with serve(*says) as served:
            status, text = await ask(served, tools=[TOOL], system="You add.")
            first = json.loads(text)
            assert status == 200
            assert first["stop_reason"] == "tool_use"
            said, call = first["content"][1:]
            assert first["content"][0]["thinking"] == "thought"
            assert (said["text"], call["input"]) == ("so ", {"a": 5, "b": 6})
            result = {"role": "tool", "tool_call_id": call["id"], "content": "11"}
            function = {"name": "add", "arguments": '{"b": 6, "a": 5}'}
            calls = [{"id": call["id"], "type": "function", "function": function}]
            answer = {"role": "assistant", "content": "so ", "tool_calls": calls}
            history: Any = [{"role": "system", "content": "You add."}, *HELLO, answer, result]
            create = served.client.chat.completions.create
            second = await create(messages=history, tools=[ADD], model="m")
            assert second.choices[0].message.content == "14"
            used = {"type": "tool_result", "tool_use_id": call["id"]}
            theirs = [
                *HELLO,
                {"role": "assistant", "content": first["content"]},
                {"role": "user", "content": [used | {"content": [{"type": "text", "text": "11"}]}]},
                {"role": "assistant", "content": "14"},
                {"role": "user", "content": [{"type": "text", "text": "sure?"}]},
            ]
            _, text = await ask(served, tools=[TOOL], system="You add.", messages=theirs)
            third = json.loads(text)
            assert third["content"] == [{"type": "text", "text": "yes"}]
            assert third["stop_reason"] == "end_turn"
            done = await served.end()
        assert [turn.origin for turn in done.turns] == ["first", "continued", "continued"]
        assert third["usage"] == {
            "input_tokens": done.turns[2].rollout.prompt_len,
            "output_tokens": done.turns[2].rollout.num_sampled,
        }
        for one, two in zip(done.turns, done.turns[1:], strict=False):
            known = one.rollout.token_ids
            np.testing.assert_array_equal(two.rollout.token_ids[: len(known)], known)

    run(work)


def test_a_stream_has_the_events_of_its_form() -> None:
    async def work() -> None:
        async with serve([*ids("so "), CALL, END]) as served:
            status, text = await ask(served, tools=[TOOL], stream=True)
            assert status == 200
        parts = [part.split("\n") for part in text.strip().split("\n\n")]
        events = [json.loads(data.removeprefix("data: ")) for _, data in parts]
        assert [name.removeprefix("event: ") for name, _ in parts] == [e["type"] for e in events]
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        names = ["message_start", *block * 3, "message_delta", "message_stop"]
        assert [event["type"] for event in events] == names
        deltas = [event["delta"] for event in events if "index" in event and "delta" in event]
        assert [delta["type"] for delta in deltas] == [
            "thinking_delta", "text_delta", "input_json_delta"
        ]  # fmt: skip
        assert json.loads(deltas[2]["partial_json"]) == {"a": 5, "b": 6}
        assert events[-2]["delta"]["stop_reason"] == "tool_use"

    run(work)


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": []}, 400, "invalid_request_error"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error"),
    ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, 400, "invalid_request_error"),
    ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
    ({"mcp_servers": [{"url": "http://x"}]}, 400, "invalid_request_error"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "invalid_request_error"),
    ({"key": "wrong"}, 401, "authentication_error"),
]


@pytest.mark.parametrize(("body", "status", "kind"), BAD, ids=range(len(BAD)))
def test_a_bad_request_is_an_error_in_its_form(
    body: dict[str, Any], status: int, kind: str
) -> None:
    async def work() -> None:
        async with serve() as served:
            found, text = await ask(served, **body)
            error = json.loads(text)
            assert (found, error["type"], error["error"]["type"]) == (status, "error", kind)
            if error["error"]["code"] == "context_length_exceeded":
                assert error["error"]["message"].startswith("prompt is too long")

    run(work)


def test_sampling_is_counted_and_lengths_are_taken() -> None:
    async def work() -> None:
        async with serve([*ids("abcdef")]) as served:
            own = {"temperature": 0.1, "top_k": 3, "metadata": {"user_id": "x"}, "surprise": 1}
            _, text = await ask(served, max_tokens=2, **own)
            assert json.loads(text)["stop_reason"] == "max_tokens"
            (request,) = served.engine.requests
            assert request.sampling.max_new_tokens == 2
            counts = (await served.end()).counts
        names = {name for name in counts if name.startswith("not_taken/")}
        assert names == {f"not_taken/{x}" for x in ("temperature", "top_k", "metadata", "other")}

    run(work)
