"""Answers as server-sent events, in the form of each interface.

Events are written while the engine samples: the newest of what can be shown, so a client that reads
slowly gets fewer and longer ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
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


class EventWriter(Protocol[Answered]):
    """Makes the events of the answers to one request."""

    def more(self, place: int, partial: PartialAnswer) -> Iterable[Json]:
        """The answer at this place has grown."""
        ...

    def end(self, reply: Answered) -> Iterable[Json]:
        """Events that are missing when the answers are complete."""
        ...


class NewestPartials:
    """What can be shown of the answers to one request, and was not yet written."""

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


async def stream(
    request: web.Request,
    reply: Awaitable[Reply],
    partials: NewestPartials,
    writer: EventWriter[Reply],
    form: EventForm,
) -> web.StreamResponse:
    """Comments keep the connection open while nothing can be shown.

    An error before the first event or comment has a status of its own, a later one is an event.
    """
    work = asyncio.ensure_future(reply)
    try:
        if await _done(work, partials):
            work.result()  # raises before the stream begins
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        while not work.done():
            news = partials.take().items()
            events = [event for place, one in news for event in writer.more(place, one)]
            await response.write(b"".join(map(form.event, events)) or b": waiting\n\n")
            await _done(work, partials)
        for line in _lines(work, writer.end, form):
            await response.write(line)
        await response.write_eof()
        return response
    finally:
        work.cancel()


async def _done(work: asyncio.Future[Reply], partials: NewestPartials) -> bool:
    """Wait until the answers are complete or have grown, or a comment is due."""
    grown = asyncio.create_task(partials.wait())
    both: set[asyncio.Future[Any]] = {work, grown}
    try:
        await asyncio.wait(both, timeout=_KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
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
