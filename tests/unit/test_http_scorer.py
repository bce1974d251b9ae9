"""A scorer behind HTTP: what it is sent, what it may answer, and every way of not answering."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from aiohttp import web

from examples.score_service import KNOWN
from examples.score_service import score as example
from moerl.config.reward_terms import RewardTerm
from moerl.config.task_mixture import TaskEntry
from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import ScoreError, ScorerDown
from moerl.core.types import Prompt, Score
from moerl.scoring.http_service import HttpScorer
from tests.helpers.episode_views import asked, view
from tests.helpers.patience import patience

PROMPT = Prompt(4, (1, 2), "sort 31", "13", {"level": 2})
VIEWS = [view("13", name="4.0"), view("no", "31", name="4.1")]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def ask(
    handler: Handler, questions: Sequence[ScoreRequest] | None = None, **fields: Any
) -> list[Score | ScoreError]:
    """Answers of a service with this handler."""

    async def body() -> list[Score | ScoreError]:
        app = web.Application()
        app.add_routes([web.post("/", handler)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        limit_s = fields.pop("timeout_s", patience(20.0))
        term = RewardTerm("x", where="http", url=url, timeout_s=limit_s, **fields)
        scorer = HttpScorer(TaskEntry(name="jsonl", rewards=[term]), term)
        try:
            return await scorer.score(asked(PROMPT, VIEWS) if questions is None else questions)
        finally:
            await scorer.close()
            await runner.cleanup()

    return asyncio.run(body())


def says(value: Any, **fields: Any) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        return web.Response(body=body, content_type="application/json", **fields)

    return handler


def test_the_example_answers_and_a_repeated_key_costs_nothing() -> None:
    KNOWN.clear()
    right, half = ask(example)
    assert right == Score(1.0, metrics={"length": 2.0}, reason="100% in place")
    assert half == Score(0.0, metrics={"length": 2.0}, reason="0% in place")
    KNOWN["4.0"] = {"reward": 0.25}
    assert ask(example)[0] == Score(0.25), "by its key"


def test_a_service_is_sent_what_its_term_needs() -> None:
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer abc"
        seen.append(await request.json())
        scores = [{"key": one["key"], "reward": 1} for one in seen[-1]["requests"]]
        return web.json_response({"scores": scores[::-1]})

    whole, text = VIEWS[1], VIEWS[1].only(["text"])
    ask(handler, asked(PROMPT, [whole]), api_key="abc", unit="turn")
    ask(handler, asked(PROMPT, [text]), api_key="abc")
    (first,), (second,) = (message["requests"] for message in seen)
    assert seen[0]["unit"] == "turn"
    assert first["prompt"] == {"text": "sort 31", "answer": "13", "extra": {"level": 2}}
    assert [turn["response"] for turn in first["turns"]] == ["no", "31"]
    assert first["turns"][1]["token_ids"] == [0, 1]
    assert second["turns"][1]["token_ids"] == []


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"reward": float("nan")}, "which is not finite"),
        ({"reward": "right"}, "want a number"),
        ({"reward": 10**400}, "int"),
        ({"reward": 1, "steps": [[5, 1.0]]}, r"steps that end at characters \[5\] of 2"),
        ({"reward": 1, "turns": [1, 2, 3]}, "rewards for 3 of 1 turns"),
        ({"reward": 1, "steps": 3}, "for prompt 4"),
        ({"reward": 1, "a b": 3.0}, "cannot name a metric"),
        ({"reward": 1, "reason": "x" * 3000}, "a reason of 3000 characters"),
        ({"error": "too long"}, "service x said 'too long' about prompt 4"),
        ({}, "has no reward, steps, turns or roles"),
    ],
)
def test_a_lie_is_an_error_of_its_request_alone(value: dict[str, Any], why: str) -> None:
    scores = [{"key": "4.0", **value}, {"key": "4.1", "reward": 0.5}, {"key": "9.9", "reward": 7}]
    lie, other = ask(says({"scores": scores}))
    assert other == Score(0.5)
    with pytest.raises(ScoreError, match=why):
        raise lie if isinstance(lie, ScoreError) else AssertionError(lie)


def test_a_missing_answer_is_an_error_of_its_request_alone() -> None:
    lacks, other = ask(says({"scores": [{"key": "4.1", "reward": 0.5}]}))
    assert other == Score(0.5)
    assert isinstance(lacks, ScoreError)
    assert not isinstance(lacks, ScorerDown)


@pytest.mark.parametrize(
    ("body", "fields", "why"),
    [
        (b"{", {}, "what is no JSON"),
        (b"[" * 100_000, {}, "what is no JSON"),
        ({"scores": 3}, {}, "want scores with keys"),
        ({"scores": [{"reward": 1}]}, {}, "want scores with keys"),
        ([], {}, "want scores with keys"),
        (b"x" * (3 << 20), {}, "answered with more than 2097152 bytes"),
        (b"oh", {"status": 500}, "answered with status 500: oh"),
        (b"key abc", {"status": 401}, r"status 401: key \(hidden\)"),
        (b"", {"status": 302, "headers": {"Location": "/other"}}, "status 302"),
    ],
)
def test_what_cannot_be_read_counts_as_no_answer(
    body: Any, fields: dict[str, Any], why: str
) -> None:
    with pytest.raises(ScorerDown, match=why):
        ask(says(body, **fields), api_key="abc")


def test_a_busy_service_names_its_pause() -> None:
    for status, header, wait_s in ((429, "2.5", 2.5), (503, "soon", 1.0), (429, "1e9", 60.0)):
        with pytest.raises(ScorerDown) as error:
            ask(says(b"", status=status, headers={"Retry-After": header}))
        assert error.value.wait_s == wait_s


def test_a_service_that_never_ends_its_answer_is_left() -> None:
    """It floods, or it sends a byte a second, or nothing."""

    async def floods(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        while True:
            await reply.write(b"x" * 65536)

    async def hangs(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    with pytest.raises(ScorerDown, match="answered with more than"):
        ask(floods)
    with pytest.raises(ScorerDown, match=r"did not answer within 0\.3 s"):
        ask(hangs, timeout_s=0.3)
    term = RewardTerm("x", where="http", url="http://127.0.0.1:9/")
    nobody = HttpScorer(TaskEntry(name="jsonl", rewards=[term]), term)

    async def nothing() -> None:
        try:
            await nobody.score(asked(PROMPT, VIEWS))
        finally:
            await nobody.close()

    with pytest.raises(ScorerDown, match="cannot be reached"):
        asyncio.run(nothing())
