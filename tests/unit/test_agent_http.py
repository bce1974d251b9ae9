"""The gateway over HTTP: OpenAI's own client, errors in its form, and clients that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import openai
import pytest

from moerl.agents.gateway import event_streams
from moerl.agents.gateway.gateway import Endpoint
from moerl.core.errors import ConfigError, EngineError
from tests.helpers.chat_tokenizer import END, call_text
from tests.helpers.patience import patience
from tests.helpers.served_gateway import ADD, CALL, HELLO, TOKENS, Served, ids, run, serve


# --- OpenAI's client ------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_of_openais_client_is_one_branch(stream: bool) -> None:
    async def work() -> None:
        async with serve([*ids("so "), CALL, END], [*ids("14"), END]) as served:
            create, history = served.client.chat.completions.create, list(HELLO)
            asked: Any = {"model": "m", "tools": [ADD], "stream": stream}
            first = await _message(await create(messages=history, **asked))
            assert first["content"] == "so "
            (call,) = first["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"a": 5, "b": 6}
            history += [first, {"role": "tool", "tool_call_id": call["id"], "content": "11"}]
            second = await _message(await create(messages=history, **asked))
            assert second["content"] == "14"
            done = await served.end()
        assert [turn.origin for turn in done.turns] == ["first", "continued"]
        one, two = (turn.rollout.token_ids for turn in done.turns)
        np.testing.assert_array_equal(two[: len(one)], one)
        assert [turn.before for turn in done.turns] == [None, done.turns[0]]

    run(work)


async def _message(reply: Any) -> Any:
    """The message as a client echoes it: without reasoning."""
    if not hasattr(reply, "__aiter__"):
        shown = reply.choices[0].message.model_dump(exclude_none=True)
        assert shown.pop("reasoning_content", "thought") == "thought"
        return shown
    message: Any = {"role": "assistant", "content": ""}
    async for chunk in reply:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                message.setdefault("tool_calls", []).append(call.model_dump(exclude={"index"}))
    return message


def test_siblings_stop_texts_logprobs_usage_and_other_routes() -> None:
    async def work() -> None:
        answers = [[*ids("ab"), END], [*ids("cd"), END], ids("x: y") + [END], [*ids("t"), END]]
        async with serve(*answers, [*ids("u"), END]) as served:
            chat, text = served.client.chat.completions, served.client.completions
            two = await chat.create(messages=HELLO, model="policy", n=2, logprobs=True)
            assert [choice.message.content for choice in two.choices] == ["ab", "cd"]
            assert two.usage is not None
            assert two.usage.completion_tokens == 6
            logprobs = two.choices[0].logprobs
            assert logprobs is not None
            assert [entry.token for entry in logprobs.content or []] == ["a", "b", "<|im_end|>"]
            assert logprobs.content is not None
            assert logprobs.content[2].logprob == pytest.approx(-0.01 * END)
            stopped = await chat.create(messages=HELLO, model="policy", stop=": ")
            assert stopped.choices[0].message.content == "x"
            told = await text.create(prompt="once", model="policy", max_tokens=9)
            assert told.choices[0].text == "t"
            status, reply, _ = await served.post(
                "/generate", json={"prompt_token_ids": ids("v"), "logprobs": True}
            )
            assert (status, reply["choices"][0]["token_ids"]) == (200, [*ids("u"), END])
            models = await served.client.models.list()
            assert [model.id for model in models.data] == ["policy"]
            done = await served.end()
        assert [turn.origin for turn in done.turns][:2] == ["first", "repeated"]

    run(work)


def test_without_tool_choice_a_call_is_text_and_the_turn_continues() -> None:
    async def work() -> None:
        async with serve([*ids("a"), END], [CALL, END]) as served:
            create, history = served.client.chat.completions.create, list(HELLO)
            asked: Any = {"model": "m", "tools": [ADD]}
            history += [await _message(await create(messages=history, **asked)), *HELLO]
            reply = await create(messages=history, tool_choice="none", **asked)
            assert reply.choices[0].message.content == call_text(5)
            done = await served.end()
        assert [turn.origin for turn in done.turns] == ["first", "continued"]

    run(work)


def test_an_answer_cut_by_max_tokens_says_so() -> None:
    async def work() -> None:
        async with serve(ids("abcdef")) as served:
            create = served.client.chat.completions.create
            reply = await create(messages=HELLO, model="policy", max_completion_tokens=3)
            assert reply.choices[0].finish_reason == "length"
            assert reply.choices[0].message.content == "abc"

    run(work)


# --- sampling ------------------------------------------------------------------------------------
REFUSED = [
    {"frequency_penalty": 0.5}, {"presence_penalty": 1}, {"repetition_penalty": 1.1},
    {"logit_bias": {"5": 1}}, {"seed": 3}, {"tool_choice": {"type": "allowed_tools"}},
    {"audio": {"voice": "x"}}, {"chat_template_kwargs": {"x": 1}}, {"guided_regex": "a*"},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
]  # fmt: skip


@pytest.mark.parametrize("field", REFUSED, ids=lambda field: next(iter(field)))
def test_what_cannot_be_replayed_is_refused(field: dict[str, Any]) -> None:
    async def work() -> None:
        async with serve() as served:
            status, reply, headers = await served.post(json={"messages": HELLO} | field)
            assert (status, reply["error"]["code"]) == (400, "unsupported_parameter")
            assert next(iter(field)) in reply["error"]["message"]
            assert headers["x-should-retry"] == "false"
            assert not served.engine.requests

    run(work)


def test_neutral_values_are_taken_and_sampling_is_counted() -> None:
    async def work() -> None:
        async with serve([*ids("a"), END]) as served:
            neutral = {"frequency_penalty": 0, "logit_bias": None, "tool_choice": "auto"}
            own = {"temperature": 1.0, "top_p": 0.1, "user": "me", "surprise": 1, "store": True}
            status, _, _ = await served.post(json={"messages": HELLO} | neutral | own)
            assert status == 200
            (request,) = served.engine.requests
            assert (request.sampling.temperature, request.sampling.top_p) == (1.0, 1.0)
            counts = (await served.end()).counts
        assert {name for name in counts if name.startswith("not_taken")} == {
            "not_taken/top_p",
            "not_taken/user",
            "not_taken/store",
            "not_taken/other",
        }

    run(work)


# --- clients that misbehave -----------------------------------------------------------------------
LATE = {"role": "system", "content": "the template takes it as the first message only"}
LONG = {"role": "user", "content": "x" * 5000}
BAD = [
    ({"data": b"{"}, 400, "invalid_request"),
    ({"data": b"[" * 100_000}, 400, "invalid_request"),
    ({"data": b"\xff\xfe"}, 400, "invalid_request"),
    ({"data": b'{"messages": [{"role": "user", "content": "\\ud800"}]}'}, 400, "invalid_request"),
    ({"json": []}, 400, "invalid_request"),
    ({"json": {"messages": []}}, 400, "invalid_request"),
    ({"json": {"messages": [{"role": "king", "content": "x"}]}}, 400, "invalid_request"),
    ({"json": {"messages": HELLO, "max_tokens": 0}}, 400, "invalid_request"),
    ({"json": {"messages": HELLO, "n": 10**9}}, 400, "invalid_request"),
    ({"json": {"messages": HELLO, "tools": [{"type": "web"}]}}, 400, "invalid_request"),
    ({"json": {"messages": [*HELLO, LATE]}}, 400, "invalid_messages"),
    ({"json": {"messages": [LONG]}}, 400, "context_length_exceeded"),
    ({"data": b" " * 300_000}, 413, "request_too_large"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "code"), BAD, ids=range(len(BAD)))
def test_a_bad_request_is_one_clear_error(body: dict[str, Any], status: int, code: str) -> None:
    async def work() -> None:
        async with serve([*ids("a"), END], body_bytes=200_000) as served:
            found, reply, _ = await served.post(**body)
            assert (found, reply["error"]["code"]) == (status, code)
            assert reply["error"].keys() == {"message", "type", "param", "code"}
            found, _, _ = await served.post(json={"messages": HELLO})
            assert found == 200, "and the episode continues"

    run(work)


@pytest.mark.parametrize("kind", ["messages", "prompt"])
def test_a_text_that_cannot_fit_is_not_tokenised(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7 MB, which a body may have, would take seconds of the loop of all episodes."""
    encoded = list[int]()
    real = TOKENS.encode
    monkeypatch.setattr(TOKENS, "encode", lambda text: encoded.append(len(text)) or real(text))
    path = "/chat/completions" if kind == "messages" else "/completions"
    text = "x" * (7 << 20)

    async def work() -> None:
        async with serve([*ids("a"), END]) as served:
            body = [{"role": "user", "content": text}] if kind == "messages" else text
            status, reply, _ = await served.post(path, json={kind: body})
            assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
            assert sum(encoded) < 10, "the answer of the script"
            status, _, _ = await served.post(json={"messages": HELLO})
            assert status == 200, "and the episode continues"

    run(work)


def test_an_endless_body_ends() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 65536

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30.0)

    async def work() -> None:
        async with serve(body_bytes=200_000, body_s=0.3) as served:
            status, reply, _ = await served.post(data=slow())
            assert (status, reply["error"]["code"]) == (408, "request_too_slow")
            try:
                status, reply, _ = await served.post(data=endless())
                assert status == 413
            except aiohttp.ClientError:
                pass  # the connection is closed under a client that does not stop to write

    run(work)


def test_bodies_of_an_episode_are_bounded_together() -> None:
    """Those that are not answered; other episodes are not touched."""

    def padded(size: int) -> bytes:
        return json.dumps({"messages": HELLO}).encode().ljust(size)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 10_000

    async def work() -> None:
        async with serve(body_bytes=200_000) as served:
            served.engine.hangs = True
            first = asyncio.create_task(served.post(data=padded(150_000)))
            while not served.engine.requests:
                await asyncio.sleep(0.01)
            for body in (padded(100_000), chunks()):  # with and without a length
                answer = asyncio.create_task(served.post(data=body))
                while not answer.done() and len(served.engine.requests) == 1:
                    await asyncio.sleep(0.01)
                if not answer.done():  # the gateway would wait for both
                    first.cancel()
                    answer.cancel()
                    pytest.fail("a request over the bound reached the engine")
                status, reply, headers = await answer
                assert (status, reply["error"]["code"]) == (429, "request_too_large")
                assert "x-should-retry" not in headers, "clients try it again"
            served.engine.hangs = False
            served.engine.say([*ids("a"), END], [*ids("a"), END])
            assert (await served.post(data=padded(40_000)))[0] == 200
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            async with asyncio.timeout(patience(10.0)):
                while served.gateway._held:
                    await asyncio.sleep(0.01)
            assert (await served.post(data=padded(190_000)))[0] == 200

    run(work)


def test_what_an_episode_may_send() -> None:
    assert Endpoint().body_bytes == 8 * 2**20


def test_100_megabytes_are_refused_before_they_are_sent() -> None:
    async def head_only(served: Served, key: str) -> bytes:
        """Status line of the answer to a request whose body never comes."""
        url = urlsplit(served.gateway.base_url("e"))
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer "
        writer.write(f"{head}{key}\r\nContent-Length: {10**8}\r\n\r\n".encode())
        try:
            return await asyncio.wait_for(reader.readline(), patience(10.0))
        finally:
            writer.close()

    async def work() -> None:
        async with serve() as served:
            assert b" 413 " in await head_only(served, served.episode.key)
            assert b" 401 " in await head_only(served, "another")

    run(work)


def test_only_the_key_of_the_episode_opens_it() -> None:
    async def work() -> None:
        async with serve([*ids("a"), END]) as served:
            other = served.open("other")
            for key in (other.key, "", served.episode.key + "x", "\u00e9"):
                assert await _status(served.gateway.base_url("e"), key) == 401
            assert await _status(served.gateway.base_url("none"), served.episode.key) == 401
            assert await _status(served.gateway.base_url("e"), served.episode.key) == 200
            await served.end()
            with pytest.raises(openai.APIStatusError) as error:
                await served.client.chat.completions.create(messages=HELLO, model="policy")
            assert (error.value.status_code, error.value.code) == (410, "episode_ended")
            with pytest.raises(ConfigError):
                served.open("e")

    run(work)


async def _status(url: str, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.get(url + "/models") as reply:
        return reply.status


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "a b", "x\n", "\u00e4"])
def test_names_of_episodes_are_plain(name: str) -> None:
    async def work() -> None:
        async with serve() as served:
            with pytest.raises(ConfigError, match="episode"):
                served.open(name)

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_turn(stream: bool) -> None:
    async def work() -> None:
        async with serve() as served:
            served.engine.hangs = True
            with pytest.raises(asyncio.TimeoutError):
                async with asyncio.timeout(0.3):
                    await served.post(json={"messages": HELLO, "stream": stream})
            async with asyncio.timeout(patience(10.0)):
                while not served.engine.aborted:
                    await asyncio.sleep(0.02)
            done = await served.end()
        assert not done.turns
        assert done.counts["cancelled"] == 1

    run(work)


def test_a_stream_that_waits_is_kept_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "_KEEP_ALIVE_S", 0.05)

    async def work() -> None:
        async with serve([*ids("a"), END]) as served:
            served.engine.hangs = True
            url = served.gateway.base_url("e") + "/chat/completions"
            headers = {"Authorization": f"Bearer {served.episode.key}"}
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.post(url, json={"messages": HELLO, "stream": True}) as reply,
            ):
                assert (await reply.content.readline()).startswith(b":")
                served.engine.hangs = False
                await served.engine.abort([served.engine.requests[0].name])
                rest = await reply.text()
            assert rest.endswith("data: [DONE]\n\n")

    run(work)


def test_a_failed_engine_is_an_error_that_clients_try_again() -> None:
    async def work() -> None:
        async with serve() as served:
            served.engine.fails = EngineError("secret path")
            status, reply, headers = await served.post(json={"messages": HELLO})
            assert (status, reply["error"]["type"]) == (503, "server_error")
            assert "secret" not in reply["error"]["message"]
            assert "x-should-retry" not in headers

    run(work)


def test_an_engine_that_fails_behind_a_comment_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "_KEEP_ALIVE_S", 0.05)

    async def work() -> None:
        async with serve() as served:
            served.engine.hangs = True
            create = served.client.chat.completions.create
            chunks = await create(messages=HELLO, model="policy", stream=True)
            served.engine.fails = EngineError("gone")
            await served.engine.abort([served.engine.requests[0].name])
            with pytest.raises(openai.APIError, match="engine failed"):
                [chunk async for chunk in chunks]

    run(work)
