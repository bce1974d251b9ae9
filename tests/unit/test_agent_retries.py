"""Clients whose timeout is shorter than a turn of the trainer; each turn is sampled once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from moerl.agents.gateway import event_streams, open_requests
from moerl.core.errors import EngineError
from tests.helpers.chat_tokenizer import END
from tests.helpers.patience import patience
from tests.helpers.served_gateway import CALL, HELLO, Served, ids, run, serve

TIMEOUT_S = 2.0  # of the clients; on a loaded machine a sign of life comes late
FORMS: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": HELLO},
    "/completions": {"prompt": "x"},
    "/generate": {"prompt_token_ids": ids("x")},
    "/responses": {"input": "hello"},
    "/messages": {"messages": HELLO, "max_tokens": 50},
}


class Asleep:
    """The engine answers nothing until it wakes, `after_s` behind the first request."""

    def __init__(self, served: Served, after_s: float = 1e9) -> None:
        self.asked, self.wakes, self._after_s = 0, asyncio.Event(), after_s
        self._reply, served.engine._reply = served.engine._reply, self._wait  # type: ignore[method-assign]

    async def _wait(self, request: Any) -> Any:
        if not self.asked:
            asyncio.get_running_loop().call_later(self._after_s, self.wakes.set)
        self.asked += 1
        await self.wakes.wait()
        return await self._reply(request)

    async def until_asked(self) -> None:
        async with asyncio.timeout(patience(10.0)):
            while not self.asked:
                await asyncio.sleep(0.01)


def client(served: Served, retries: int = 0) -> openai.AsyncOpenAI:
    return served.client.with_options(timeout=TIMEOUT_S, max_retries=retries)


async def ask(client: openai.AsyncOpenAI, history: list[Any], *, stream: bool) -> str:
    reply: Any = await client.chat.completions.create(model="m", messages=history, stream=stream)
    if not stream:
        return str(reply.choices[0].message.content)
    parts = [chunk.choices[0].delta.content or "" async for chunk in reply]
    return "".join(parts)


def say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No signs of life: every timeout ends a request."""
    monkeypatch.setattr(event_streams, "_pace_s", lambda request: 1000.0)


# --- connections that wait ------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
def test_an_episode_over_long_turns_is_played_to_its_end(stream: bool) -> None:
    async def work() -> None:
        answers = [[*ids(text), END] for text in ("ab", "cd", "ef")]
        async with serve(*answers) as served:
            history, texts = list(HELLO), []
            for _ in answers:
                Asleep(served, 2.5 * TIMEOUT_S)
                texts.append(await ask(client(served), history, stream=stream))
                history += [{"role": "assistant", "content": texts[-1]}, *HELLO]
            assert texts == ["ab", "cd", "ef"]
            done = await served.end()
        assert [turn.origin for turn in done.turns] == ["first", "continued", "continued"]

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_without_signs_of_life_it_is_not(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    say_nothing(monkeypatch)

    async def work() -> None:
        async with serve([*ids("ab"), END]) as served:
            Asleep(served, 2.5 * TIMEOUT_S)
            with pytest.raises(openai.APITimeoutError):
                await ask(client(served), HELLO, stream=stream)

    run(work)


@pytest.mark.parametrize("path", FORMS)
def test_every_form_waits_in_white_space(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "_KEEP_ALIVE_S", 0.05)

    async def work() -> None:
        async with serve([*ids("ab"), END]) as served:
            Asleep(served, 0.3)
            headers = {"Authorization": f"Bearer {served.episode.key}"}
            url = served.gateway.base_url("e") + path
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.post(url, json=FORMS[path]) as reply,
            ):
                text = await reply.text()
            assert (reply.status, reply.content_type) == (200, "application/json")
            assert text.startswith("\n\n")
            assert "error" not in (found := json.loads(text)) or found["error"] is None

    run(work)


def test_anthropics_client_waits_too() -> None:
    async def work() -> None:
        async with serve([*ids("ab"), END]) as served:
            Asleep(served, 2.5 * TIMEOUT_S)
            url = served.gateway.base_url("e").removesuffix("/v1")
            found = anthropic.AsyncAnthropic(
                base_url=url, api_key=served.episode.key, timeout=TIMEOUT_S, max_retries=0
            )
            reply = await found.messages.create(model="m", messages=HELLO, max_tokens=50)
            assert reply.content[0].type == "text"

    run(work)


def test_an_error_behind_white_space_breaks_the_connection() -> None:
    """A client asks again, as of any server that fails; without that it is told of the break."""

    async def work() -> None:
        async with serve([*ids("ab"), END]) as served:
            for retries in (0, 1):
                asleep = Asleep(served)
                asking = asyncio.create_task(ask(client(served, retries), HELLO, stream=False))
                await asleep.until_asked()
                await asyncio.sleep(TIMEOUT_S)
                served.engine.fails = EngineError("gone")
                asleep.wakes.set()
                if not retries:
                    with pytest.raises(openai.APIConnectionError):
                        await asking
                else:
                    await asyncio.sleep(0.1)
                    served.engine.fails = None
                    assert await asking == "ab"
                served.engine.fails = None
                served.engine._reply = asleep._reply  # type: ignore[method-assign]
            done = await served.end()
        assert len(done.turns) == 1

    run(work)


# --- clients that ask again -----------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("joins", [True, False])
def test_a_retry_joins_its_original(
    joins: bool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """joins: False is the control: the turn is sampled once more for each retry."""
    say_nothing(monkeypatch)

    async def work() -> None:
        async with serve(*[[*ids("ab"), END]] * 4, awaits_retries=joins) as served:
            asleep = Asleep(served, 2 * TIMEOUT_S)
            assert await ask(client(served, 3), HELLO, stream=stream) == "ab"
            done = await served.end()
        assert asleep.asked == 1 if joins else asleep.asked > 1
        assert done.counts.get("cancelled", 0) == asleep.asked - 1
        assert len(done.turns) == 1

    run(work)


async def hang_up(served: Served, asleep: Asleep, body: dict[str, Any]) -> None:
    asking = asyncio.create_task(served.post(json=body))
    await asleep.until_asked()
    asking.cancel()
    await asyncio.wait([asking])


def test_a_turn_that_ends_without_its_client_is_given_to_the_retry() -> None:
    """Once: the same request after that is another one."""

    async def work() -> None:
        answers = [*ids("ab"), END], [*ids("cd"), END]
        async with serve(*answers, awaits_retries=True) as served:
            asleep = Asleep(served)
            await hang_up(served, asleep, {"messages": HELLO})
            asleep.wakes.set()
            async with asyncio.timeout(patience(10.0)):
                while not served.episode.forest.turns:
                    await asyncio.sleep(0.01)
            for text in ("ab", "cd"):
                _, reply, _ = await served.post(json={"messages": HELLO})
                assert reply["choices"][0]["message"]["content"] == text
            assert asleep.asked == 2
            assert len((await served.end()).turns) == 2

    run(work)


def test_a_retry_of_an_answer_that_was_lost_on_its_way() -> None:
    """The gateway has written it, the client says that it has not come."""

    async def work() -> None:
        async with serve([*ids("ab"), END]) as served:
            first = await served.post(json={"messages": HELLO})
            headers = {"x-stainless-retry-count": "1"}
            again = await served.post(json={"messages": HELLO}, headers=headers)
            assert first[1]["choices"] == again[1]["choices"]
            assert len((await served.end()).turns) == 1

    run(work)


def test_equal_requests_on_purpose_are_siblings() -> None:
    async def work() -> None:
        async with serve([*ids("ab"), END], [*ids("cd"), END], awaits_retries=True) as served:
            Asleep(served, 0.3)
            asking = [asyncio.create_task(served.post(json={"messages": HELLO})) for _ in "ab"]
            texts = [
                reply["choices"][0]["message"]["content"]
                for _, reply, _ in await asyncio.gather(*asking)
            ]
            assert sorted(texts) == ["ab", "cd"]

    run(work)


def test_another_body_or_another_key_joins_nothing() -> None:
    async def work() -> None:
        answers = [[*ids(text), END] for text in ("ab", "cd", "ef")]
        async with serve(*answers, awaits_retries=True) as served:
            asleep = Asleep(served)
            await hang_up(served, asleep, {"messages": HELLO})
            asleep.wakes.set()
            other = served.open("other")
            url = served.gateway.base_url("other") + "/chat/completions"
            headers = {"Authorization": f"Bearer {other.key}", "x-stainless-retry-count": "1"}
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.post(url, json={"messages": HELLO}) as reply,
            ):
                assert reply.status == 200
            assert asleep.asked == 2
            await served.post(json={"messages": HELLO, "max_tokens": 9})
            assert asleep.asked == 3

    run(work)


def test_a_turn_that_nobody_asks_for_again_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then its body counts among those of the episode."""
    monkeypatch.setattr(open_requests, "_KEPT_S", 0.5)

    async def work() -> None:
        async with serve([*ids("ab"), END], awaits_retries=True) as served:
            asleep = Asleep(served)
            await hang_up(served, asleep, {"messages": HELLO})
            await asyncio.sleep(0.1)
            assert not served.engine.aborted
            assert served.gateway._held["e"] > 0
            async with asyncio.timeout(patience(10.0)):
                while not served.engine.aborted or served.gateway._held:
                    await asyncio.sleep(0.02)
            assert not served.gateway._open._requests
            done = await served.end()
        assert (len(done.turns), done.counts["cancelled"]) == (0, 1)

    run(work)


def test_the_end_of_an_episode_ends_what_nobody_waits_for() -> None:
    async def work() -> None:
        async with serve([CALL, END], awaits_retries=True) as served:
            asleep = Asleep(served)
            await hang_up(served, asleep, {"messages": HELLO})
            done = await served.end()
            assert served.engine.aborted
        assert not done.turns

    run(work)
