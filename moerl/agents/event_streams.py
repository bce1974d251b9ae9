"""Answers as server-sent events, in the form of each interface."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web

from moerl.agents import anthropic_messages, openai_responses
from moerl.agents.api_errors import ApiError
from moerl.agents.chat_messages import Json

Reply = TypeVar("Reply")
_KEEP_ALIVE_S = 10.0  # between two comments in a stream that waits


@dataclass(frozen=True, slots=True)
class EventForm:
    """How an interface writes events.

    is_named: the type of an event is its name, too.  end: behind the last one.  error: body of a
    failure in a stream that has begun.
    """

    is_named: bool
    end: bytes
    error: Callable[[ApiError], Json]

    def event(self, body: Json) -> bytes:
        name = f"event: {body['type']}\n" if self.is_named else ""
        return name.encode() + b"data: " + msgspec.json.encode(body) + b"\n\n"


OPENAI = EventForm(False, b"data: [DONE]\n\n", lambda error: dict(error.body))
RESPONSES = EventForm(True, b"", openai_responses.error_event)
ANTHROPIC = EventForm(True, b"", anthropic_messages.error_body)


async def stream(
    request: web.Request,
    reply: Awaitable[Reply],
    events: Callable[[Reply], Iterable[Json]],
    form: EventForm,
) -> web.StreamResponse:
    """Comments keep the connection open while the turn is sampled.

    An error before the first comment has a status of its own, a later one is an event.
    """
    work = asyncio.ensure_future(reply)
    try:
        if await _done(work):
            work.result()  # raises before the stream begins
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        while not await _done(work):
            await response.write(b": waiting\n\n")
        for line in _lines(work, events, form):
            await response.write(line)
        await response.write_eof()
        return response
    finally:
        work.cancel()


async def _done(work: asyncio.Future[Reply]) -> bool:
    await asyncio.wait({work}, timeout=_KEEP_ALIVE_S)
    return work.done()


def _lines(
    work: asyncio.Future[Reply], events: Callable[[Reply], Iterable[Json]], form: EventForm
) -> Iterator[bytes]:
    try:
        found = work.result()
    except ApiError as error:
        yield form.event(form.error(error))
        return
    yield from map(form.event, events(found))
    yield form.end
