"""Text of a stream while the engine samples: what arrives, when, and that nothing is taken back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moerl.agents.episode_types import AnswerParser
from moerl.agents.gateway.answer_stream import AnswerStream, GrowingText, PartialAnswer
from moerl.agents.prompt_tokens import PromptTokens
from moerl.agents.stop_texts import Stops
from moerl.core.errors import EngineError
from moerl.core.types import SamplingParams
from moerl.engine.host.answer_parser import SglangAnswers
from moerl.engine.host.host import Mailbox
from tests.helpers.chat_tokenizer import END, TEMPLATE
from tests.helpers.patience import patience
from tests.helpers.served_gateway import (
    ADD,
    CALL,
    HELLO,
    TOKENS,
    Served,
    anthropic_client,
    ids,
    run,
    serve,
)

FORMS: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": HELLO},
    "/completions": {"prompt": "x"},
    "/responses": {"input": "hello"},
    "/messages": {"messages": HELLO, "max_tokens": 50},
}


async def events(served: Served, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, as they arrive."""
    headers = {"Authorization": f"Bearer {served.episode.key}"}
    url = served.gateway.base_url("e") + path
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(url, json=body | {"stream": True}) as reply,
    ):
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if line.startswith(b"data: {"):
                yield msgspec.json.decode(line[6:])


def delta(event: dict[str, Any]) -> tuple[str, str]:
    """Reasoning and text that an event of any form adds."""
    if choices := event.get("choices"):
        part = choices[0].get("delta") or choices[0]
        return part.get("reasoning_content") or "", part.get("content") or part.get("text") or ""
    kind = event.get("type", "")
    if kind == "content_block_delta":
        return event["delta"].get("thinking", ""), event["delta"].get("text", "")
    if kind in ("response.reasoning_text.delta", "response.output_text.delta"):
        return (event["delta"], "") if "reasoning" in kind else ("", event["delta"])
    return "", ""


def whole(reply: dict[str, Any]) -> tuple[str, str]:
    """Reasoning and text of an answer of any form that was not streamed."""
    if choices := reply.get("choices"):
        message = choices[0].get("message") or {"content": choices[0].get("text")}
        return message.get("reasoning_content") or "", message.get("content") or ""
    reasoning = text = ""
    for item in reply.get("content") or reply["output"]:
        parts = item.get("content", [item])
        reasoning += "".join(part.get("thinking", "") for part in parts)
        said = "".join(part.get("text", "") for part in parts)
        reasoning += said if item["type"] == "reasoning" else ""
        text += said if item["type"] != "reasoning" else ""
    return reasoning, text


ANSWERS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "plain": ([*ids("one two three"), END], {}),
    "cut": (ids("one two three")[:9], {"limit": 9}),
    "stopped": ([*ids("a: b; c"), END], {"stop": ["; x", "; "]}),
    "nearly stopped": ([*ids("a ; b ;"), END], {"stop": ["; x"]}),
    "reasoning": ([*ids("<think>I add.</think>\n\nSo it is."), END], {}),
    "reasoning only": ([*ids("<think>I add. </thin"), END], {}),
    "call": ([*ids("<think>I add.</think>So: "), CALL, END], {"tools": [ADD]}),
    "no call": ([*ids(" a <tool_call> b"), END], {"tools": [ADD]}),
    "empty": ([END], {}),
}
TOOLS: dict[str, Any] = {
    "/chat/completions": ADD,
    "/responses": {"type": "function", "name": "add", "parameters": {"type": "object"}},
    "/messages": {"name": "add", "input_schema": {"type": "object"}},
}


def asked(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A request of one form."""
    body = dict(FORMS[path])
    if "tools" in fields:
        body["tools"] = [TOOLS[path]]
    if "stop" in fields:
        body["stop_sequences" if path == "/messages" else "stop"] = fields["stop"]
    if "limit" in fields:
        body["max_output_tokens" if path == "/responses" else "max_tokens"] = fields["limit"]
    return body


CASES = [
    (name, path)
    for name, (_, fields) in ANSWERS.items()
    for path in FORMS
    if not ("tools" in fields and path not in TOOLS)
    if not ("stop" in fields and path == "/responses")
]


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize(("name", "path"), CASES)
def test_increments_are_the_answer(name: str, path: str, interrupted: bool) -> None:
    answer, fields = ANSWERS[name]

    async def work() -> None:
        async with serve(answer, answer, parser=SglangAnswers("qwen25", "qwen3")) as served:
            body = asked(path, fields)
            status, reply, _ = await served.post(path, json=body)
            assert status == 200
            if interrupted:
                served.engine.interrupt_at += [len(answer) // 2]
            found = [event async for event in events(served, path, body)]
            deltas = [delta(event) for event in found]
            reasoning, text = ("".join(parts) for parts in zip(*deltas, strict=True))
            assert (reasoning, text) == whole(reply)
            done = await served.end()
        first, second = done.turns
        np.testing.assert_array_equal(first.sampled.output_ids, second.sampled.output_ids)
        if name == "plain":
            assert len([one for one in deltas if any(one)]) > 1

    run(work)


@pytest.mark.parametrize("path", FORMS)
def test_the_first_text_arrives_before_the_last_token_is_sampled(path: str) -> None:
    async def work() -> None:
        async with serve([*ids("abcdef"), END]) as served:
            served.engine.goes_on = asyncio.Event()
            text = ""
            async for event in events(served, path, FORMS[path]):
                text += delta(event)[1]
                if text and not served.engine.goes_on.is_set():
                    assert (text, served.engine.told) == ("a", [1]), "the engine waits"
                    assert not served.episode.forest.turns
                    served.engine.goes_on.set()
            assert text == "abcdef"

    run(work)


def test_the_clients_of_the_interfaces_put_increments_together() -> None:
    answer = [*ids("<think>I add.</think>So: "), CALL, END]

    async def work() -> None:
        parser = SglangAnswers("qwen25", "qwen3")
        async with serve(answer, answer, parser=parser) as served:
            client = anthropic_client(served)
            asked: Any = {"model": "m", "max_tokens": 50, "messages": HELLO}
            async with client.messages.stream(tools=[TOOLS["/messages"]], **asked) as stream:
                texts = [text async for text in stream.text_stream]
                message = await stream.get_final_message()
            thought, text, call = message.content
            assert (thought.type, text.type, call.type) == ("thinking", "text", "tool_use")
            assert (thought.thinking, text.text, "".join(texts)) == ("I add.", "So:", "So:")
            asked = {"model": "m", "input": "hello", "tools": [TOOLS["/responses"]]}
            async with served.client.responses.stream(**asked) as items:
                kinds = [event.type async for event in items]
                response = await items.get_final_response()
            assert {"response.output_text.delta", "response.reasoning_text.delta"} <= set(kinds)
            assert (response.output_text, response.output[0].type) == ("So:", "reasoning")
            assert json.loads(response.output[2].arguments) == {"a": 5, "b": 6}

    run(work)


def test_a_call_comes_whole_behind_the_text_in_front_of_it() -> None:
    async def work() -> None:
        parser = SglangAnswers("qwen25", "qwen3")
        async with serve([*ids("So: "), CALL, END], parser=parser) as served:
            body = {"messages": HELLO, "tools": [ADD]}
            found = [event async for event in events(served, "/chat/completions", body)]
            deltas = [event["choices"][0]["delta"] for event in found]
            assert "".join(one.get("content") or "" for one in deltas) == "So:"
            (called,) = [one["tool_calls"] for one in deltas if "tool_calls" in one]
            assert called[0]["function"]["name"] == "add"
            assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"

    run(work)


def test_siblings_of_a_stream_grow_side_by_side() -> None:
    async def work() -> None:
        async with serve([*ids("abc"), END], [*ids("xyz"), END]) as served:
            body: Any = {"messages": HELLO, "n": 2, "stream_options": {"include_usage": True}}
            texts, usage = ["", ""], None
            async for event in events(served, "/chat/completions", body):
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
                usage = event.get("usage") or usage
            assert texts == ["abc", "xyz"]
            assert usage is not None
            assert usage["completion_tokens"] == 8

    run(work)


def test_without_stream_or_with_logprobs_the_engine_tells_nothing() -> None:
    async def work() -> None:
        async with serve([*ids("abc"), END], [*ids("abc"), END]) as served:
            await served.post(json={"messages": HELLO})
            body = {"messages": HELLO, "logprobs": True}
            found = [event async for event in events(served, "/chat/completions", body)]
            assert found[0]["choices"][0]["logprobs"]["content"][0]["token"] == "a"
            assert not served.engine.told
            assert not any(request.streams for request in served.engine.requests)

    run(work)


def test_a_client_that_hangs_up_in_mid_stream_ends_its_turn() -> None:
    async def work() -> None:
        async with serve([*ids("abcdef"), END]) as served:
            served.engine.goes_on = asyncio.Event()
            async for event in events(served, "/chat/completions", FORMS["/chat/completions"]):
                if delta(event)[1]:
                    break
            async with asyncio.timeout(patience(10.0)):
                while not served.engine.aborted:
                    await asyncio.sleep(0.02)
            done = await served.end()
        assert not done.turns
        assert done.counts["cancelled"] == 1

    run(work)


@pytest.mark.parametrize("path", FORMS)
def test_text_whose_tokens_are_lost_is_not_followed_by_others(path: str) -> None:
    """As after the death of an engine: its tokens are sampled again, and others may come."""

    async def work() -> None:
        async with serve([*ids("abcdef"), END]) as served:
            served.engine.loses = 4
            found = [event async for event in events(served, path, FORMS[path])]
            assert "engine failed" in str(found[-1])
            assert len(served.engine.requests) == 1
            done = await served.end()
        assert not done.turns

    run(work)


def test_tokens_that_are_lost_unheard_are_sampled_again() -> None:
    """Control: what was lost was not told."""

    async def work() -> None:
        async with serve([*ids("abcdef"), END]) as served:
            served.engine.tells, served.engine.loses = 2, 1
            stream = events(served, "/chat/completions", FORMS["/chat/completions"])
            assert "".join([delta(event)[1] async for event in stream]) == "abcdef"
            assert len(served.engine.requests) == 2

    run(work)


class Hasty:
    """A parser whose beginnings are no beginnings of its answers."""

    def parse(self, text: str, tools: Any) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        return "", text.upper(), ()

    def begun(self, text: str, tools: Any) -> tuple[str, str]:
        return "", text

    def call_grammar(self, tools: Any) -> None: ...


def test_an_answer_that_does_not_begin_as_it_was_shown_is_refused() -> None:
    async def work() -> None:
        parser: AnswerParser = Hasty()
        async with serve([*ids("abc"), END], [*ids("ABC"), END], parser=parser) as served:
            stream = events(served, "/chat/completions", FORMS["/chat/completions"])
            found = [event async for event in stream]
            assert found[-1]["error"]["code"] == "record_refused"
            stream = events(served, "/chat/completions", FORMS["/chat/completions"])
            assert "error" not in [event async for event in stream][-1], "control"
            done = await served.end()
        assert len(done.turns) == 1
        assert done.counts["refused/stream"] == 1

    run(work)


# --- characters and stop texts -------------------------------------------------------------------
def byte_tokens() -> PromptTokens:
    """A tokenizer of single bytes: most characters are several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: index for index, byte in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    return PromptTokens(PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE))


TEXTS = ["no \u00e4 \u6c34 \U0001f30a end", "\U0001f30a", "\u6c34\u6c34", "a\ufffdb"]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("text", TEXTS)
def test_a_part_of_a_character_is_held_back(text: str, size: int) -> None:
    tokens = byte_tokens()
    encoded, growing = tokens.encode(text).tolist(), GrowingText(tokens.decode)
    shown = [growing.add(encoded[:end]) for end in range(size, len(encoded) + size, size)]
    assert all(text.startswith(early) for early in shown)
    assert shown[-1] == text
    early = [tokens.decode(encoded[:end]) for end in range(len(encoded))]
    assert "\ufffd" in text or not all(text.startswith(one) for one in early), "control"


def test_bytes_that_are_no_character_do_not_stop_a_stream() -> None:
    tokens, rng = byte_tokens(), np.random.default_rng(5)
    sampled = rng.integers(0, 256, 400).tolist()
    growing, whole_text = GrowingText(tokens.decode), tokens.decode(sampled)
    shown = [growing.add(sampled[:end]) for end in range(1, 401)]
    assert all(whole_text.startswith(one) for one in shown)
    assert len(shown[-1]) > len(whole_text) - 10


def test_a_character_of_several_tokens_arrives_through_the_gateway() -> None:
    async def work() -> None:
        tokens = byte_tokens()
        answer = tokens.encode(TEXTS[0]).tolist()
        end = tokens.encode("<|im_end|>").tolist()
        sampling = SamplingParams(50, stop_token_ids=tuple(end))
        served_by = serve([*answer, *end], tokens=tokens, sampling=sampling)
        async with served_by as served:
            stream = events(served, "/chat/completions", FORMS["/chat/completions"])
            texts = [delta(event)[1] async for event in stream]
        assert "".join(texts) == TEXTS[0]
        assert not any("\ufffd" in text for text in texts)

    run(work)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("ab", "ab"), ("ab:", "ab"), ("ab: ", "ab"), ("ab:c", "ab:c"), ("ab-", "ab"), ("ab--", "ab")],
)
def test_what_may_begin_a_stop_text_is_held_back(text: str, shown: str) -> None:
    stops = Stops((": x", "---"))
    assert stops.begun(text) == shown


def test_a_stop_token_in_mid_answer_is_text_only_when_more_follows() -> None:
    """As where sampling ignores stop tokens: the last one may end the turn, then without text."""
    told: list[str] = []

    def plain(text: str) -> tuple[str, str]:
        return "", text

    def tell(partial: PartialAnswer) -> None:
        told.append(partial.text)

    stream = AnswerStream(TOKENS.decode, plain, frozenset({END}), 3, tell)
    for sampled in ([END], [END, *ids("b")], [END, *ids("b"), END]):
        stream.heard(np.asarray([*ids("a"), *sampled], np.int32))
    assert told == ["a", "a<|im_end|>b"]


# --- messages between host and controller --------------------------------------------------------
def collected(work: Callable[[Mailbox], Any]) -> Any:
    async def body() -> Any:
        return await work(Mailbox())

    return asyncio.run(body())


def test_the_newest_tokens_of_a_request_travel_and_none_behind_its_reply() -> None:
    async def work(mailbox: Mailbox) -> tuple[Any, Any]:
        for count in (1, 2, 3):
            mailbox.tell("a", np.arange(count))
        mailbox.tell("b", np.arange(4))
        first = await mailbox.collect()
        mailbox.tell("a", np.arange(9))
        mailbox.put("a", EngineError("x"))
        return first, await mailbox.collect()

    first, second = collected(work)
    assert {name: len(found) for name, found in first.partial} == {"a": 3, "b": 4}
    assert not first.replies
    assert ([name for name, _ in second.replies], second.partial) == (["a"], ())
