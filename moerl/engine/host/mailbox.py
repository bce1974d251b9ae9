"""Replies of an engine host that its controller has not fetched yet.

Each rollout is handed back when it is done; replies that are done at the same time travel together.
Tokens of requests that stream wait for a reply a little longer, so they cost few messages.
"""

from __future__ import annotations

import asyncio
import contextlib

from moerl.core.errors import EngineError, RecordError
from moerl.core.messages import Answers
from moerl.core.types import Array, Segment

COLLECT_S = 5.0  # longest wait of `collect`, shorter than the controller's wait for this host
_GATHER_S = 0.01  # after the first reply: replies of the same forward pass travel with it
_STREAM_S = 0.05  # between two messages that have tokens of streams only


class Mailbox:
    """Used from one event loop; one controller at a time collects."""

    def __init__(self) -> None:
        self._replies: list[tuple[str, Segment | RecordError | EngineError]] = []
        self._partial: dict[str, Array] = {}  # tokens so far of requests that stream
        self._filled, self._replied = asyncio.Event(), asyncio.Event()
        self._turn = 0  # of the newest `collect`: an earlier one may be of a controller that died
        self.progress = 0

    def put(self, name: str, reply: Segment | RecordError | EngineError) -> None:
        """Add a reply.  name: `GenerateRequest.name`."""
        self._replies.append((name, reply))
        self._partial.pop(name, None)
        self.progress += isinstance(reply, Segment) and len(reply.output_ids) > 0
        self._filled.set()
        self._replied.set()

    def tell(self, name: str, output_ids: Array) -> None:
        """Replace the tokens so far of a request."""
        self._partial[name] = output_ids
        self._filled.set()

    def clear(self) -> None:
        """Drop everything: the controller that sent the requests is gone."""
        self._replies.clear()
        self._partial.clear()
        self._turn += 1

    async def collect(self) -> Answers:
        """Take all replies and tokens; wait for the first of them for at most COLLECT_S."""
        self._turn += 1
        turn = self._turn
        if not self._replies:
            self._filled.clear()
            self._replied.clear()
            if not self._partial:
                await _wait(self._filled, COLLECT_S)
            if self._partial:
                await _wait(self._replied, _STREAM_S)
            await asyncio.sleep(_GATHER_S)
        if turn != self._turn:
            return Answers((), self.progress)
        replies, self._replies = self._replies, []
        partial, self._partial = self._partial, {}
        return Answers(tuple(replies), self.progress, tuple(partial.items()))


async def _wait(event: asyncio.Event, limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
