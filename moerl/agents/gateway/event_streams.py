"""Answers as HTTP responses: in one piece, or as server-sent events in the form of each interface.

Events are written while the engine samples: the newest of what can be shown, so a client that reads
slowly gets fewer and longer ones.  A client that waits hears something before its timeout: comments
in a stream, white space in front of a whole answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from moerl.agents.chat_messages import Json
from moerl.agents.gateway import anthropic_messages, openai_responses
from moerl.agents.gateway.answer_stream import PartialAnswer
from moerl.agents.gateway.api_errors import ApiError

Reply = TypeVar("Reply")
Answered = TypeVar("Answered", contravariant=True)
_KEEP_ALIVE_S = 10.0  # at most, between two signs of life
_LEAST_S = 0.2
_TIMEOUTS = ("x-stainless-read-timeout", "x-stainless-timeout")  # of clients in Python and others


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


class EventWriter(Protocol[Answered]):
    """Makes the events of the answers to one request."""

    def more(self, place: int, partial: PartialAnswer) -> Iterable[Json]:
        """The answer at this place has grown."""
        ...

    def end(self, reply: Answered) -> Iterable[Json]:
        """Events that are missing when the answers are complete."""
        ...


class NewestPartials:
    """The parts of the answers to one request that can be shown and are not yet written."""

    def __init__(self) -> None:
        self._partials: dict[int, PartialAnswer] = {}  # by place among siblings
        self._filled = asyncio.Event()

    def tell(self, place: int, partial: PartialAnswer) -> None:
        self._partials[place] = partial
        self._filled.set()

    def take(self) -> dict[int, PartialAnswer]:
        found, self._partials = self._partials, {}
        self._filled.clear()
        return found

    async def wait(self) -> None:
        await self._filled.wait()


async def whole(
    request: web.Request, work: asyncio.Future[Reply], body: Callable[[Reply], Json]
) -> web.StreamResponse:
    """An error behind white space cannot have a status: the connection breaks, as clients expect of
    a server that fails, and they ask again.
    """
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    pace_s = _pace_s(request)
    while not (await asyncio.wait([work], timeout=pace_s))[0]:
        await response.prepare(request)
        await response.write(b"\n")
    if response.prepared and work.exception() is not None:
        assert request.transport is not None, "a client that has left cancels its handler"
        request.transport.close()
        return response
    found = msgspec.json.encode(body(work.result()))
    await response.prepare(request)
    await response.write(found)
    return response


async def stream(
    request: web.Request,
    work: asyncio.Future[Reply],
    partials: NewestPartials,
    writer: EventWriter[Reply],
    form: EventForm,
) -> web.StreamResponse:
    """An error before the first event or comment has its own status, a later one is an event."""
    pace_s = _pace_s(request)
    if await _done(work, partials, pace_s):
        work.result()  # raises before the stream begins
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    while not work.done():
        news = partials.take().items()
        events = [event for place, one in news for event in writer.more(place, one)]
        await response.write(b"".join(map(form.event, events)) or b": waiting\n\n")
        await _done(work, partials, pace_s)
    for line in _lines(work, writer.end, form):
        await response.write(line)
    await response.write_eof()
    return response


def _pace_s(request: web.Request) -> float:
    """Seconds between signs of life: a third of the timeout that the client states."""
    stated = next((request.headers[name] for name in _TIMEOUTS if name in request.headers), "")
    try:
        return min(_KEEP_ALIVE_S, max(_LEAST_S, float(stated) / 3))
    except ValueError:
        return _KEEP_ALIVE_S


async def _done(work: asyncio.Future[Reply], partials: NewestPartials, pace_s: float) -> bool:
    """Wait until the answers are complete or have grown, or a comment is due."""
    grown = asyncio.create_task(partials.wait())
    both: set[asyncio.Future[Any]] = {work, grown}
    try:
        await asyncio.wait(both, timeout=pace_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        grown.cancel()
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
