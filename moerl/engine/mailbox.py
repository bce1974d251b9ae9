"""Replies of an engine host that its controller has not fetched yet.

Each rollout is handed back when it is done; replies that are done at the same time travel together.
"""

from __future__ import annotations

import asyncio
import contextlib

from moerl.errors import EngineError, RecordError
from moerl.messages import Answers
from moerl.types import Segment

COLLECT_S = 5.0  # longest wait of `collect`, shorter than the controller's wait for this host
_GATHER_S = 0.01  # after the first reply: those that end in the same forward pass travel with it


class Mailbox:
    """Used from one event loop; one controller at a time collects."""

    def __init__(self) -> None:
        self._replies: list[tuple[str, Segment | RecordError | EngineError]] = []
        self._filled = asyncio.Event()
        self._turn = 0  # of the newest `collect`: an earlier one may be of a controller that died
        self.progress = 0

    def put(self, name: str, reply: Segment | RecordError | EngineError) -> None:
        """name: `GenerateRequest.name`."""
        self._replies.append((name, reply))
        self.progress += isinstance(reply, Segment) and len(reply.output_ids) > 0
        self._filled.set()

    def clear(self) -> None:
        """The controller that asked is gone."""
        self._replies.clear()
        self._turn += 1

    async def collect(self) -> Answers:
        """All replies that are there; waits for the first one, for at most COLLECT_S."""
        self._turn += 1
        turn = self._turn
        if not self._replies:
            self._filled.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COLLECT_S):
                    await self._filled.wait()
            await asyncio.sleep(_GATHER_S)
        if turn != self._turn:
            return Answers((), self.progress)
        replies, self._replies = self._replies, []
        return Answers(tuple(replies), self.progress)
